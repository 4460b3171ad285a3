"""When a call whose token was revoked is cancelled, and when a connection whose caller does not read is closed."""

from __future__ import annotations

import asyncio

import pytest

from etfarm.server.access.tokens import Credential
from etfarm.server.rpc.door.calls import LEAST_BYTES_PER_S, MAX_UNREAD, READ_S, Call, Calls, is_read
from etfarm.server.rpc.door.roles import ROLES
from etfarm.v1 import common_pb2

ANN = common_pb2.Principal(name="ann", role=common_pb2.ROLE_USER)


class Server:
    """A call of ann, and whether her token is valid."""

    def __init__(self) -> None:
        self.is_valid = True
        self.calls = Calls(lambda credential: self.is_valid, lambda principal, project: principal)

    async def answer(self, begun: asyncio.Future[Call], *, is_handled: bool) -> str:
        call = self.calls.begin("/etfarm.v1.TokenService/Rotate", Credential(b"key", "id", ANN), ANN)
        call.is_handled = is_handled
        begun.set_result(call)
        await asyncio.sleep(0.05)
        return "the end"


async def begun(server: Server, *, is_handled: bool) -> tuple[Call, asyncio.Task[str]]:
    future: asyncio.Future[Call] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(server.answer(future, is_handled=is_handled))
    call = await future
    server.is_valid = False
    server.calls.end_invalid()
    return call, task


async def test_a_handler_of_a_revoked_token_is_cancelled() -> None:
    call, task = await begun(Server(), is_handled=True)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert call.ending is not None and call.ending.reason == "UNAUTHENTICATED"


async def test_a_call_that_grpc_receives_or_answers_is_not_cancelled() -> None:
    """It would end without a status, and a caller without a deadline would wait for ever."""
    call, task = await begun(Server(), is_handled=False)
    assert await task == "the end"
    assert call.ending is not None and call.ending.reason == "UNAUTHENTICATED"


class Readers:
    """Calls of ann on a clock of the test, each over a connection of its own, whose responses are being sent."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.closed: list[str] = []
        self.calls = Calls(
            lambda _: True, lambda principal, _: principal, clock=lambda: self.now_s, close=self.closed.append
        )  # fmt: skip

    def send(self, peer: str, size_bytes: int = 0) -> Call:
        call = self.calls.begin("/etfarm.v1.JobService/Watch", Credential(b"key", "id", ANN), ANN)
        call.peer = peer
        self.calls.sending(call, lambda size: bytes(size))(size_bytes)
        return call


async def test_the_oldest_unread_responses_beyond_the_limit_cost_their_connections() -> None:
    readers = Readers()
    for number in range(MAX_UNREAD + 2):
        readers.now_s = number / 100
        readers.send(f"peer-{number}")
    readers.now_s = READ_S
    readers.calls.look()
    assert readers.closed == [], "they may wait for so long"
    readers.now_s = READ_S + 1.0
    readers.calls.look()
    readers.calls.look()
    assert sorted(readers.closed) == ["peer-0", "peer-1"], "and no more, while these are being closed"


async def test_a_large_response_may_take_longer_and_few_may_wait_for_ever() -> None:
    readers = Readers()
    for number in range(MAX_UNREAD):
        readers.send(f"peer-{number}", LEAST_BYTES_PER_S * 60)
    readers.now_s = 1e6
    readers.calls.look()
    assert readers.closed == []
    readers.send("one more")
    readers.now_s += READ_S + 1.0
    readers.calls.look()
    assert len(readers.closed) == 1


async def test_a_response_that_was_read_does_not_count() -> None:
    readers = Readers()
    for number in range(MAX_UNREAD + 1):
        readers.send(f"peer-{number}").unread_since_s = None
    readers.now_s = 1e6
    readers.calls.look()
    assert readers.closed == []


async def test_what_a_principal_has_read_leaves_no_memory() -> None:
    readers = Readers()

    async def read() -> None:
        call = readers.calls.begin("/etfarm.v1.JobService/List", Credential(b"key", "id", ANN), ANN)
        await readers.calls.take_turn(call)

    await asyncio.gather(*(asyncio.create_task(read()) for _ in range(MAX_UNREAD + 2)))
    kept = [value for value in vars(readers.calls).values() if isinstance(value, dict | set) and value]
    assert not kept


def test_each_rpc_that_lists_is_a_read() -> None:
    reads = {method.rpartition("/")[2] for method in ROLES if is_read(method)}
    assert {"Get", "List", "ListOperators", "FindMissing", "Compare", "GetCompilation"} <= reads
    assert not reads & {"Submit", "Call", "Cancel", "Watch", "Download", "Connect"}
