"""When a call whose token was revoked is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from etfarm.server.access.tokens import Credential
from etfarm.server.rpc.door.calls import Call, Calls
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
