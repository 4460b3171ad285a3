"""A gRPC server that handles calls to unknown paths separately from all others.

grpcio 1.85 decodes the path of such a call in the loop that accepts every call. A path that is not UTF-8 ends that loop, and with
it the server: one frame from an unauthenticated client suffices. Methods that are registered by name do not take that route, and
all methods of etfarm are; so the remaining calls can be refused without decoding their names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]


class _Accepting(cygrpc.AioServer):  # type: ignore[misc]
    """grpcio's accept loop, which requests the next call of each registered method and, with None, of all other methods."""

    def _make_request_call_future(self, method_bytes: bytes | None) -> Any:
        if method_bytes is not None:
            return super()._make_request_call_future(method_bytes)
        return asyncio.get_running_loop().create_task(self._refuse_unknown(), name="calls to unknown paths")

    async def _refuse_unknown(self) -> None:
        """Answer calls to unknown paths with UNIMPLEMENTED until the server ends, at which point `_request_call` raises."""
        loop, resolver = asyncio.get_running_loop(), cygrpc._MethodResolver([], {})
        answering: set[asyncio.Task[None]] = set()
        while True:
            call = await self._request_call()
            refusal = cygrpc._handle_rpc("", resolver, (), call, loop, False)
            task = loop.create_task(cygrpc._schedule_rpc_coro(refusal, call, loop, ""), name="a call to an unknown path")
            answering.add(task)
            task.add_done_callback(answering.discard)


def new_server(interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, Any]]) -> grpc.aio.Server:
    """Return a server that is not started yet. Its methods must be registered by name, as generated code does."""
    original = cygrpc.AioServer
    if not hasattr(original, "_make_request_call_future"):
        # Before 1.85, the path is decoded in the task of the call itself.
        return grpc.aio.server(interceptors=interceptors, options=options)
    cygrpc.AioServer = _Accepting
    try:
        return grpc.aio.server(interceptors=interceptors, options=options)
    finally:
        cygrpc.AioServer = original
