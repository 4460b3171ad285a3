"""The source lines of a session's program, which the errors of its calls name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack

import pytest

from etfarm.client.errors import EtfarmError
from etfarm.client.sessions.open_calls import Line, SessionCalls
from etfarm.v1 import compile_pb2, session_pb2, session_pb2_grpc
from etfarm.wire.errors import Fault, error_of
from etfarm.wire.status import to_proto
from tests.support.fake_servers import stubs_of

LOG = "E [method.cpp:1391] KernelCall failed at instruction 0:3 in operator aten::div.out_mode: 0x12"
FAILED = error_of(Fault.USER, "PROGRAM_FAILED", "execute: ExecuTorch says InvalidArgument.", "", metadata={"log": LOG})


class Failing(session_pb2_grpc.SessionServiceServicer):
    """A server whose device fails each call."""

    async def Open(self, request: object, context: object) -> AsyncIterator[session_pb2.SessionEvent]:
        yield session_pb2.SessionEvent(session_id="s", ready=session_pb2.SessionReady())
        await asyncio.Event().wait()

    async def Call(self, request: object, context: object) -> session_pb2.CallSessionResponse:
        return session_pb2.CallSessionResponse(answer=session_pb2.SessionAnswer(error=to_proto(FAILED)))


async def test_the_lines_are_fetched_once_for_all_failing_calls() -> None:
    fetched = 0

    async def find_operators() -> Mapping[str, compile_pb2.LocatedOperators]:
        nonlocal fetched
        fetched += 1
        return {"forward": compile_pb2.LocatedOperators(by_instruction={3: "aten::div at net.py:7 (a // b)"})}

    async def connect(stack: AsyncExitStack) -> Line:
        stubs = await stack.enter_async_context(stubs_of(Failing()))
        return Line(stubs, session_pb2.OpenSessionRequest(), find_operators=find_operators)

    calls = SessionCalls(connect, "", None, None)
    try:
        await calls.open()
        for _ in range(3):
            with pytest.raises(EtfarmError, match=r"in aten::div at net\.py:7"):
                await calls.call(session_pb2.SessionTask(method="forward"), None)
        assert fetched == 1
    finally:
        await calls.close()
