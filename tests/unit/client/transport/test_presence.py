"""Which failures end a wait for a server at once: servers and other programs on loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import grpc
import pytest

from etfarm.client.errors import EtfarmError
from etfarm.client.transport.retry import Patience, repeat
from etfarm.v1 import farm_pb2, farm_pb2_grpc
from etfarm.wire.channel import Access, open_channel
from tests.support.fake_servers import ReadyFarm, serving


@asynccontextmanager
async def other_program() -> AsyncIterator[str]:
    """Yield the address of a program that is no gRPC server."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def free_address() -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{bound.getsockname()[1]}"


def serving_at(address: str) -> AbstractAsyncContextManager[str]:
    return serving(ReadyFarm(), address=address, options=[("grpc.so_reuseport", 0)])


async def version(addresses: str, shown: list[str]) -> str:
    async with open_channel(Access(addresses)) as channel:
        patience = Patience.of(channel, addresses, 60.0, shown.append)
        farm = farm_pb2_grpc.FarmServiceStub(channel)
        try:
            return (await repeat(lambda: farm.GetServerInfo(farm_pb2.GetServerInfoRequest()), patience.backoff())).version
        finally:
            patience.presence.close()


@pytest.mark.parametrize("first", ["a program", "an unknown name"])
async def test_a_hopeless_first_server_does_not_end_the_wait_for_the_second(first: str) -> None:
    async with AsyncExitStack() as stack:
        hopeless = await stack.enter_async_context(other_program()) if first == "a program" else "no-such-host.invalid:7433"
        away, shown = free_address(), list[str]()
        asking = asyncio.create_task(version(f"{hopeless},{away}", shown))
        async with asyncio.timeout(60):
            while not shown and not asking.done():  # noqa: ASYNC110 - the change has no event
                await asyncio.sleep(0.01)
        async with serving_at(away):
            assert await asking


async def test_servers_that_are_all_hopeless_end_a_wait_at_once() -> None:
    async with other_program() as one, other_program() as two, asyncio.timeout(30):
        with pytest.raises(EtfarmError) as refused:
            await version(f"{one},{two}", [])
    assert refused.value.reason == "SERVER_UNREACHABLE"


async def test_what_has_answered_once_is_waited_for() -> None:
    address = free_address()
    async with open_channel(Access(address)) as channel:
        patience = Patience.of(channel, address)
        async with serving_at(address):
            await patience.presence.ask()
        hopeless = grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details="Failed parsing HTTP/2"
        )
        assert not patience.presence.is_out_of_reach(hopeless)
        assert Patience.of(channel, address).presence.is_out_of_reach(hopeless)


async def test_the_error_at_the_end_is_why_no_server_answers_by_then() -> None:
    """Not what the last one said when it began to stop."""
    address = free_address()
    former = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details="This server no longer leads the farm."
    )
    async with open_channel(Access(address)) as channel:
        patience = Patience.of(channel, address, 1.0)
        async with serving_at(address):
            await patience.presence.ask()
        with pytest.raises(EtfarmError) as ended:
            await patience.backoff().after(former)
        patience.presence.close()
    assert ended.value.reason == "SERVER_UNREACHABLE" and address in ended.value.message
    assert "no longer leads" not in ended.value.message


async def test_what_a_server_that_is_there_cannot_do_is_shown_once() -> None:
    address, shown = free_address(), list[str]()
    away = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details="The artifacts' S3 server is away."
    )
    failures = [away] * 5

    async def submit() -> str:
        if failures:
            raise failures.pop()
        return "done"

    async with open_channel(Access(address)) as channel, serving_at(address):
        patience = Patience.of(channel, address, 60.0, shown.append)
        assert await repeat(submit, patience.backoff()) == "done"
        patience.presence.close()
    assert len(shown) == 1 and shown[0].endswith("Waiting."), shown
