"""A gRPC server that decides about each call before it costs more than its metadata.

grpcio 1.85 accepts all calls in one loop, which requests one call of each method at a time and handles it in two tasks. Here,
each method has loops of its own. They drop calls of connections that flood, which takes a tenth of the time of a refusal.

grpcio's loop also decodes the path of a call to an unknown method. A path that is not UTF-8 ends that loop, and with it the
server: one frame from an unauthenticated client suffices. Methods that are registered by name do not take that route, and all
methods of etfarm are; so the remaining calls can be refused without decoding their names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

import grpc
import structlog
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from etfarm.server.rpc.door.connections import STRANGER_S, Connections
from etfarm.wire.heap import give_memory_back

log = structlog.get_logger()

AT_ONCE: Final = 64
"""Number of calls of a method that are requested at a time while many wait. With one, each would wait for a thread of gRPC."""

_END_AFTER_S: Final = 0.2
"""Time after which a dropped call is ended. By then its connection is paused, or closed so that its client reconnects."""

_END_S: Final = 0.01
_END_AT_ONCE: Final = 50
"""Number of dropped calls that are ended in this interval; each takes 0.05 ms."""

_CLOSE_S: Final = 1.0
"""Time in which the connections of calls that have ended are closed; then their memory is returned."""

_QUIET_S: Final = 0.05
_LOOKS: Final = 20
"""Time without a new call after which none waits, and number of looks for that: callers may call again all the time. They are
counted, since on a busy machine calls are handed over more slowly."""

_MOST_DROPPED: Final = 8192
"""Maximum number of dropped calls that are not ended yet; each takes 15 KiB."""


class _Method:
    """A method of a server, and the tasks that accept and handle its calls."""

    def __init__(self, request: Callable[[], Awaitable[Any]], name: str, resolver: Any, interceptors: tuple[Any, ...]) -> None:
        self.request = request
        self.name = name
        self.resolver = resolver
        self.interceptors = interceptors
        self.accepting = 1
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def end_extra(self, task: asyncio.Task[None]) -> None:
        self.accepting -= 1
        if not task.cancelled():
            task.exception()  # that of the end of the server, which the first task raises, too


class _Accepting(cygrpc.AioServer):  # type: ignore[misc]
    """grpcio's server with own loops that accept calls."""

    connections: Connections | None = None
    has_token: Callable[[Any], bool] = staticmethod(lambda metadata: False)
    is_urgent: Callable[[str, Any], bool] = staticmethod(lambda method, context: False)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._own_interceptors = tuple(arguments[3] or ())
        self._own_handlers: dict[str, Any] = {}
        self._accepted = 0
        self._is_closing = False
        self._dropped: list[Any] = []
        self._ending: asyncio.Task[None] | None = None

    def add_registered_method_handlers(self, method_handlers: dict[str, Any]) -> None:
        super().add_registered_method_handlers(method_handlers)
        self._own_handlers.update(method_handlers)

    def _make_request_call_future(self, method_bytes: bytes | None) -> Any:
        """Accept calls of a method, or with None of all unknown methods, until the server ends, when requests for calls raise."""
        if method_bytes is None:
            method = _Method(partial(self._request_call), "", cygrpc._MethodResolver([], {}), ())
        else:
            request = partial(self._request_registered_call, method_bytes)
            resolver = cygrpc._MethodResolver([], self._own_handlers)
            method = _Method(request, method_bytes.decode(), resolver, self._own_interceptors)
        return asyncio.get_running_loop().create_task(self._accept(method), name="calls")

    async def _accept(self, method: _Method, *, is_extra: bool = False) -> None:
        loop = asyncio.get_running_loop()
        while True:
            call = await method.request()
            self._accepted += 1
            is_flooded = self._is_closing or (self.connections is not None and self.connections.is_flooded)
            if self._admits(call, method.name, loop):
                handling = cygrpc._handle_rpc(method.name, method.resolver, method.interceptors, call, loop, False)
                method.add(loop.create_task(cygrpc._schedule_rpc_coro(handling, call, loop, method.name), name="a call"))
            else:
                self._drop(call, loop)
            if not is_flooded and is_extra:
                return
            if is_flooded and method.accepting < AT_ONCE:
                method.accepting += 1
                extra = loop.create_task(self._accept(method, is_extra=True), name="more calls")
                extra.add_done_callback(method.end_extra)
                method.add(extra)

    async def accept_waiting(self) -> None:
        """See the function of this name."""
        self._is_closing = True
        for _ in range(_LOOKS):
            accepted = self._accepted
            await asyncio.sleep(_QUIET_S)
            if accepted == self._accepted:
                return

    def _drop(self, call: Any, loop: asyncio.AbstractEventLoop) -> None:
        """End a call without a status, but not before the waiting ones are taken: to end one takes as long as to take one."""
        self._dropped.append(call)
        if self._ending is None or self._ending.done():
            self._ending = loop.create_task(self._end_dropped(), name="dropped calls")

    async def _end_dropped(self) -> None:
        await asyncio.sleep(_END_AFTER_S)
        while self._dropped:
            await asyncio.sleep(_END_S)
            is_flooded = self.connections is not None and self.connections.is_flooded
            del self._dropped[: max(len(self._dropped) - _MOST_DROPPED, 0) if is_flooded else _END_AT_ONCE]
            for pause_s in (_CLOSE_S, STRANGER_S + _CLOSE_S):  # by then, the connections are closed, too
                ticks = round(pause_s / _END_S)
                while not self._dropped and ticks:
                    await asyncio.sleep(_END_S)
                    ticks -= 1
                if not self._dropped:
                    await asyncio.to_thread(give_memory_back)

    def _admits(self, call: Any, method: str, loop: asyncio.AbstractEventLoop) -> bool:
        if self.connections is None:
            return True
        context = cygrpc._ServicerContext(call, None, None, loop)
        try:
            if self.connections.is_flooded and self.is_urgent(method, context):
                return True
            return self.connections.admits(context.peer(), lambda: self.has_token(context.invocation_metadata()))
        except Exception:
            log.exception("a call could not be checked")
            return True  # an error would end the loop that accepts the method's calls


def new_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor],
    options: Sequence[tuple[str, Any]],
    connections: Connections | None = None,
    has_token: Callable[[Any], bool] = lambda metadata: False,
    is_urgent: Callable[[str, Any], bool] = lambda method, context: False,
) -> grpc.aio.Server:
    """Return a server that is not started yet. Its methods must be registered by name, as generated code does.

    Args:
        interceptors: as of `grpc.aio.server`.
        options: as of `grpc.aio.server`.
        connections: decides which calls are dropped; None to handle all.
        has_token: returns whether the metadata of a call contain a valid token.
        is_urgent: returns whether a call of a method, with this context, is handled even during a flood.
    """
    original = cygrpc.AioServer
    if not hasattr(original, "_make_request_call_future"):
        # Before 1.85, the path is decoded in the task of the call itself.
        return grpc.aio.server(interceptors=interceptors, options=options)
    cygrpc.AioServer = _Accepting
    try:
        server = grpc.aio.server(interceptors=interceptors, options=options)
    finally:
        cygrpc.AioServer = original
    if connections is not None:
        own: Any = server._server  # type: ignore[attr-defined]
        own.connections, own.has_token, own.is_urgent = connections, has_token, is_urgent
    return server


async def accept_waiting(server: grpc.aio.Server) -> None:
    """Accept the calls of a server that wait in gRPC, until none has come for a moment, or for a limited time."""
    own: Any = server
    if isinstance(own._server, _Accepting):
        await own._server.accept_waiting()
