"""The interceptor around every rpc: who calls, may they, and what an error is to the caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import structlog
from grpc.aio import ServicerContext

from etfarm.server.rpc.auth import Tokens, authorize
from etfarm.wire.errors import EtfarmError, FarmError, Kind, UserError
from etfarm.wire.status import to_status

log = structlog.get_logger()


class Unimplemented(UserError):
    """An rpc that the contract declares for later work."""

    reason = "UNIMPLEMENTED"
    kind = Kind.UNIMPLEMENTED


def later(rpc: str) -> Callable[[object, object, object], NoReturn]:
    """An rpc of a servicer that this version answers with UNIMPLEMENTED and its name."""

    def answer(self: object, request: object, context: object) -> NoReturn:
        raise Unimplemented(f"This server does not have {rpc} yet.", "Update the server.", rpc=rpc)

    return answer


class Edge(grpc.aio.ServerInterceptor):
    """Makes a Principal for every call, and a status of every error."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        header = next((value for key, value in handler_call_details.invocation_metadata or () if key == "authorization"), None)
        token = header.decode(errors="replace") if isinstance(header, bytes) else header

        def enter() -> None:
            authorize(self._tokens.principal(token), method)

        kind = ("stream" if handler.request_streaming else "unary") + "_" + ("stream" if handler.response_streaming else "unary")
        wrap = _streaming if handler.response_streaming else _single
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        made: grpc.RpcMethodHandler[Any, Any] = make(
            wrap(getattr(handler, kind), enter, method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return made


def _single(behavior: Callable[..., Any], enter: Callable[[], None], method: str) -> Callable[..., Awaitable[Any]]:
    async def answer(request: Any, context: ServicerContext[Any, Any]) -> Any:
        try:
            enter()
            return await _awaited(behavior(request, context))
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:  # noqa: BLE001 - the edge: every error becomes a status, a bug is logged
            await _abort(context, error, method)

    return answer


def _streaming(behavior: Callable[..., Any], enter: Callable[[], None], method: str) -> Callable[..., AsyncIterator[Any]]:
    async def answer(request: Any, context: ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            enter()
            async for message in behavior(request, context):
                yield message
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:  # noqa: BLE001 - the edge: every error becomes a status, a bug is logged
            await _abort(context, error, method)

    return answer


async def _awaited(value: Any) -> Any:
    return await value if asyncio.iscoroutine(value) else value


async def _abort(context: ServicerContext[Any, Any], error: Exception, method: str) -> NoReturn:
    if not isinstance(error, EtfarmError):
        log.exception("an rpc failed by a bug", method=method)
        error = FarmError(f"etfarm has a bug: {error!r}.", "The server's log has the traceback.")
    await context.abort_with_status(to_status(error))
    raise AssertionError("abort raises")
