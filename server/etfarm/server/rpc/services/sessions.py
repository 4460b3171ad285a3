"""SessionService: leases of devices, and calls to the programs that are loaded there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from grpc.aio import ServicerContext

from etfarm.server.rpc.door.caller import active_project, caller, require_owner, scope
from etfarm.server.sessions.sessions import Sessions
from etfarm.v1 import session_pb2, session_pb2_grpc


class SessionService(session_pb2_grpc.SessionServiceServicer):
    """The servicer of SessionService; see session.proto."""

    def __init__(self, sessions: Sessions, require_running: Callable[[], None] = lambda: None) -> None:
        """Initialize the servicer.

        Args:
            require_running: raises while the server accepts no new sessions.
        """
        self._sessions = sessions
        self._require_running = require_running

    async def Open(self, request: session_pb2.OpenSessionRequest, context: object) -> AsyncIterator[session_pb2.SessionEvent]:
        self._require_running()
        async for event in self._sessions.open(request, caller().name, active_project()):
            yield event

    async def Call(
        self, request: session_pb2.CallSessionRequest, context: ServicerContext[Any, Any]
    ) -> session_pb2.CallSessionResponse:
        require_owner(self._sessions.owner_of(request.session_id, scope()), "The session", "Open one of your own.")
        confirm = partial(context.send_initial_metadata, ())
        return session_pb2.CallSessionResponse(call_id=request.call_id, answer=await self._sessions.call(request, confirm))

    async def Generate(
        self, request: session_pb2.GenerateSessionRequest, context: ServicerContext[Any, Any]
    ) -> AsyncIterator[session_pb2.GenerateSessionResponse]:
        require_owner(self._sessions.owner_of(request.session_id, scope()), "The session", "Open one of your own.")
        confirm = partial(context.send_initial_metadata, ())
        async with aclosing(self._sessions.generate(request, confirm)) as parts:
            async for part in parts:
                yield part
