"""Which calls a server accepts: a real one, whose event loop a test keeps busy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from etfarm.server.rpc.door.accepting import new_server
from etfarm.server.rpc.door.connections import MAX_STREAMS, REFUSALS, REFUSALS_A_SECOND, Connections, server_options
from tests.support.farm import wait_until
from tests.support.http2 import Http2
from tests.support.waiting import becomes

WAIT_S = 60.0
SERVICE, METHOD = "etfarm.v1.FarmService", "GetServerInfo"
PATH = f"/{SERVICE}/{METHOD}"


class Counting(grpc.aio.ServerInterceptor):
    """An interceptor that counts the calls that are handled."""

    def __init__(self) -> None:
        self.handled = 0

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        self.handled += 1
        return await continuation(handler_call_details)


class Server:
    """A server with one method, and its connections."""

    def __init__(self) -> None:
        async def answer(request: bytes, context: Any) -> bytes:
            return request

        self.counting = Counting()
        self.connections = Connections(lambda: True, time.monotonic)
        self.grpc = new_server(
            [self.counting],
            [*server_options(4096), ("grpc.enable_channelz", 1)],
            self.connections,
            lambda metadata: ("authorization", "valid") in metadata,
            lambda method, context: method == PATH and ("hint", "known") in context.invocation_metadata(),
        )
        handlers: dict[str, Any] = {METHOD: grpc.unary_unary_rpc_method_handler(answer)}
        self.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.grpc.add_registered_method_handlers(SERVICE, handlers)
        self.port = self.grpc.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{self.port}"

    def begun(self) -> int:
        """Return the number of calls that gRPC has received, including those that wait for the event loop."""
        number, started = 0, 0
        while servers := json.loads(cygrpc.channelz_get_servers(number)).get("server"):
            number = max(int(server["ref"]["serverId"]) for server in servers) + 1
            started = int(servers[-1]["data"].get("callsStarted", 0))
        return started


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    created = Server()
    await created.grpc.start()
    created.connections.start(created.port)
    try:
        yield created
    finally:
        created.connections.close()
        await created.grpc.stop(None)


async def ask(channel: grpc.aio.Channel, path: str = PATH) -> bytes:
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
    return await call(b"x", metadata=(("authorization", "valid"),), timeout=WAIT_S)


async def test_waiting_calls_of_closed_connections_are_dropped_and_others_served(server: Server) -> None:
    attackers, calls, started_s = 8, 200, time.monotonic()
    async with grpc.aio.insecure_channel(server.address) as known:
        assert await ask(known) == b"x"
        with ExitStack() as stack:  # without an await: the event loop takes no call meanwhile
            for _ in range(attackers):
                attacker = stack.enter_context(Http2(server.address, timeout_s=WAIT_S))
                attacker.begin()
                attacker.flood(PATH, calls)
            assert wait_until(lambda: server.begun() > attackers * calls)
        async with grpc.aio.insecure_channel(server.address) as fresh:
            assert await ask(fresh) == b"x"
            assert await ask(known) == b"x"
    refused = REFUSALS + REFUSALS_A_SECOND * (time.monotonic() - started_s)
    assert server.connections.dropped >= attackers * calls - refused
    assert server.counting.handled <= refused + 3


async def test_many_calls_at_once_on_a_new_connection_are_all_answered(server: Server) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        assert await asyncio.gather(*(ask(channel) for _ in range(MAX_STREAMS))) == [b"x"] * MAX_STREAMS
    assert server.connections.dropped == 0


async def test_calls_to_unknown_paths_are_dropped_like_others(server: Server) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await ask(channel, path="/no/Such")
        assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with ExitStack() as stack:
            for _ in range(4):
                attacker = stack.enter_context(Http2(server.address, timeout_s=WAIT_S))
                attacker.begin()
                attacker.flood(b"/no/\xff", 200)
            assert wait_until(lambda: server.begun() > 4 * 200)
            assert await ask(channel) == b"x"
        await becomes(lambda: server.connections.dropped >= 4 * 200 - 2 * REFUSALS)


async def test_an_urgent_call_is_handled_during_a_flood(server: Server) -> None:
    server.connections.close()  # the test decides when there is a flood
    server.connections.is_flooded = True
    async with grpc.aio.insecure_channel(server.address) as channel:
        ask = channel.unary_unary(PATH)
        for _ in range(3):
            assert await ask(b"x", metadata=(("hint", "known"),), timeout=WAIT_S) == b"x"
        assert not server.connections.dropped
        for _ in range(2):
            with contextlib.suppress(grpc.aio.AioRpcError):
                await ask(b"x", metadata=(("hint", "unknown"),), timeout=0.2)
        assert server.connections.dropped


async def test_a_server_stops_while_dropped_calls_wait(server: Server) -> None:
    server.connections.close()  # the test decides when there is a flood
    server.connections.is_flooded = True
    async with grpc.aio.insecure_channel(server.address) as known:
        assert await ask(known) == b"x"
        with Http2(server.address, timeout_s=WAIT_S) as attacker:
            attacker.begin()
            attacker.flood(PATH, 200)
            await becomes(lambda: server.connections.dropped, pause_s=0)
            async with asyncio.timeout(WAIT_S):
                await server.grpc.stop(None)
