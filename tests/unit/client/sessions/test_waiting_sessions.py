"""A session that waits for a device while its server restarts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from etfarm.client.errors import EtfarmError
from etfarm.client.sessions.open_calls import Line, SessionCalls
from etfarm.client.transport.retry import Patience
from etfarm.client.transport.stubs import Stubs
from etfarm.v1 import session_pb2, session_pb2_grpc
from tests.support.fake_servers import serving


class Stopping(session_pb2_grpc.SessionServiceServicer):
    """A server that stops while a session waits."""

    async def Open(self, request: object, context: Any) -> AsyncIterator[session_pb2.SessionEvent]:
        yield session_pb2.SessionEvent(waiting=session_pb2.SessionWaiting(why="busy"))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")


async def test_the_time_of_a_wait_begins_anew_once_a_server_has_answered() -> None:
    async with serving(Stopping()) as address, grpc.aio.insecure_channel(address) as channel, AsyncExitStack() as stack:
        patience = Patience.of(channel, "s", 60.0)
        line = Line(Stubs.of(channel, patience), session_pb2.OpenSessionRequest())

        async def connect(_: AsyncExitStack) -> Line:
            return line

        calls = SessionCalls(connect, "", None, None)
        stack.push_async_callback(calls.close)
        backoff = patience.backoff()
        assert await backoff.wait() and backoff._until_s is not None  # a first failure
        with pytest.raises(EtfarmError, match="restarting"):
            await calls._ask_for_device(line, backoff)
        assert backoff._until_s is None
