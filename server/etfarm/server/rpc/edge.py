"""The interceptor around every rpc: who calls, may they, and what an error is to the caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import structlog
from grpc.aio import ServicerContext

from etfarm.server.rpc.auth import Resolve, Tokens, authorize, resolve_default
from etfarm.wire.errors import EtfarmError, FarmError, Kind, UserError
from etfarm.wire.status import to_status

log = structlog.get_logger()

PROJECT_KEY = "etfarm-project"
"""The metadata that names the project of a call."""


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

    def __init__(self, tokens: Tokens, resolve: Resolve = resolve_default) -> None:
        """Args:
        resolve: gives a principal its projects.
        """
        self._tokens = tokens
        self._resolve = resolve

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        metadata = handler_call_details.invocation_metadata
        token, project = _text(metadata, "authorization"), _text(metadata, PROJECT_KEY) or ""

        def enter() -> None:
            authorize(self._resolve(self._tokens.principal(token), project), method)

        kind = ("stream" if handler.request_streaming else "unary") + "_" + ("stream" if handler.response_streaming else "unary")
        wrap = _streaming if handler.response_streaming else _single
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        made: grpc.RpcMethodHandler[Any, Any] = make(
            wrap(getattr(handler, kind), enter, method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return made


def _text(metadata: Any, key: str) -> str | None:
    value = next((value for name, value in metadata or () if name == key), None)
    return value.decode(errors="replace") if isinstance(value, bytes) else value


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
