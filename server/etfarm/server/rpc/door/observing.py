"""The outermost interceptor: it measures every call, names it in the log, and passes its duration and code to an observer."""

from __future__ import annotations

import asyncio
import inspect
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, Protocol

import grpc
import structlog
from grpc.aio import ServicerContext

from etfarm.server.rpc.door.auditing import CHANGES, rpc_of
from etfarm.server.rpc.door.failures import address_of
from etfarm.server.rpc.door.forwarded import Forwarded

log = structlog.get_logger()

_CODES: Final = {code.value[0]: code.name for code in grpc.StatusCode}


class Observer(Protocol):
    """A recipient of what calls take."""

    def began(self, rpc: str) -> None:
        """Record that a call began."""

    def ended(self, rpc: str, code: str, seconds: float, *, is_stream: bool) -> None:
        """Record that a call ended.

        Args:
            rpc: `JobService.Submit`.
            code: name of the gRPC code.
            seconds: duration of the handler.
            is_stream: whether the call streams in either direction, so that its duration is its caller's choice.
        """


class ObservingInterceptor(grpc.aio.ServerInterceptor):
    """The interceptor that observes every call, refused ones included.

    Args:
        observer: receives durations and codes; None to only log.
        clock: returns seconds on a monotonic clock.
        forwarded: recognizes callers of calls that other servers forward.
    """

    def __init__(
        self,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
        forwarded: Forwarded | None = None,
    ) -> None:
        self._observer = observer
        self._clock = clock
        self._forwarded = forwarded or Forwarded()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        rpc = rpc_of(handler_call_details.method)
        # The same task runs the interceptors and the handler, and tasks that they start inherit the context.
        structlog.contextvars.bind_contextvars(request=secrets.token_hex(6))
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        is_stream = handler.request_streaming or handler.response_streaming
        peer = self._forwarded.peer(handler_call_details.invocation_metadata)
        call = _Observed(self._observer, self._clock, rpc, peer, is_stream=is_stream)
        kind = ("stream" if handler.request_streaming else "unary") + "_" + ("stream" if handler.response_streaming else "unary")
        behavior = getattr(handler, kind)
        wrapped: grpc.RpcMethodHandler[Any, Any] = getattr(grpc, f"{kind}_rpc_method_handler")(
            call.stream(behavior) if inspect.isasyncgenfunction(behavior) else call.unary(behavior),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return wrapped


class _Observed:
    """One call."""

    def __init__(
        self, observer: Observer | None, clock: Callable[[], float], rpc: str, forwarded_peer: str | None, *, is_stream: bool
    ) -> None:
        self._observer = observer
        self._clock = clock
        self._rpc = rpc
        self._is_stream = is_stream
        self._began_s = 0.0
        self._forwarded_peer = forwarded_peer
        self._peer = ""

    def unary(self, behavior: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        async def observe(request: Any, context: ServicerContext[Any, Any]) -> Any:
            self._begin(context)
            try:
                answer = behavior(request, context)
                answered = await answer if inspect.isawaitable(answer) else answer
            except BaseException as error:
                self._end(context, error)
                raise
            self._end(context, None)
            return answered

        return observe

    def stream(self, behavior: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncIterator[Any]]:
        async def observe(request: Any, context: ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            self._begin(context)
            try:
                async with aclosing(behavior(request, context)) as messages:
                    async for message in messages:
                        yield message
            except BaseException as error:
                self._end(context, error)
                raise
            self._end(context, None)

        return observe

    def _begin(self, context: ServicerContext[Any, Any]) -> None:
        self._began_s = self._clock()
        if self._rpc in CHANGES:
            # gRPC crashes when asked for the peer of a call that its client has cancelled.
            self._peer = address_of(self._forwarded_peer or context.peer())
        if self._observer is not None:
            self._observer.began(self._rpc)

    def _end(self, context: ServicerContext[Any, Any], error: BaseException | None) -> None:
        if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            code = "CANCELLED"
        else:
            # The handler below has turned its error into a status.
            number = context.code()
            code = "OK" if error is None and not number else _CODES.get(_number(number), "UNKNOWN")
        seconds = self._clock() - self._began_s
        if self._observer is not None:
            self._observer.ended(self._rpc, code, seconds, is_stream=self._is_stream)
        if self._rpc in CHANGES:
            log.info("rpc", rpc=self._rpc, code=code, ms=round(seconds * 1e3, 1), peer=self._peer)


def _number(code: Any) -> int:
    return int(code.value[0]) if isinstance(code, grpc.StatusCode) else int(code)
