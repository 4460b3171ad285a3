"""A gRPC server that decides about each call before it costs more than its metadata.

grpcio 1.85 accepts all calls in one loop that requests one call of each method at a time, and starts two tasks for each. Here, each
method has loops of its own. They drop calls of connections that flood, which takes a third of the time of a refusal.

grpcio's loop also decodes the path of a call to an unknown method. A path that is not UTF-8 ends that loop, and with it the server:
one frame from an unauthenticated client suffices. Methods that are registered by name do not take that route, and all methods of
etfarm are; so the remaining calls can be refused without decoding their names.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from etfarm.server.rpc.door.connections import Connections, Peer, parse_peer

AT_ONCE: Final = 4
"""Number of calls of each method that are requested at a time. With one, each call would wait for a thread of gRPC."""


class _Accepting(cygrpc.AioServer):  # type: ignore[misc]
    """grpcio's server with own loops that accept calls."""

    connections: Connections | None = None
    has_token: Callable[[Any], bool] = staticmethod(lambda metadata: False)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._own_interceptors = tuple(arguments[3] or ())
        self._own_handlers: dict[str, Any] = {}

    def add_registered_method_handlers(self, method_handlers: dict[str, Any]) -> None:
        super().add_registered_method_handlers(method_handlers)
        self._own_handlers.update(method_handlers)

    def _make_request_call_future(self, method_bytes: bytes | None) -> Any:
        """Accept calls of a method, or with None of all unknown methods, until the server ends, when requests for calls raise."""
        return asyncio.gather(*(self._accept(method_bytes) for _ in range(AT_ONCE)))

    async def _accept(self, method_bytes: bytes | None) -> None:
        loop = asyncio.get_running_loop()
        if method_bytes is None:
            name, resolver, interceptors = "", cygrpc._MethodResolver([], {}), ()
        else:
            name, interceptors = method_bytes.decode(), self._own_interceptors
            resolver = cygrpc._MethodResolver([], self._own_handlers)
        answering: set[asyncio.Task[None]] = set()
        while True:
            call = await (self._request_call() if method_bytes is None else self._request_registered_call(method_bytes))
            if not self._admits(call, loop):
                del call  # which ends it
                continue
            handling = cygrpc._handle_rpc(name, resolver, interceptors, call, loop, False)
            task = loop.create_task(cygrpc._schedule_rpc_coro(handling, call, loop, name), name="a call")
            answering.add(task)
            task.add_done_callback(answering.discard)

    def _admits(self, call: Any, loop: asyncio.AbstractEventLoop) -> bool:
        if self.connections is None:
            return True
        context = cygrpc._ServicerContext(call, None, None, loop)
        return self.connections.admits(context.peer(), lambda: self.has_token(context.invocation_metadata()))


class _Counts:
    """The calls that began at the server that this process has created last, as gRPC's channelz service knows them."""

    def __init__(self) -> None:
        self._server = max(int(server["ref"]["serverId"]) for server in _pages(cygrpc.channelz_get_servers, "server"))

    def begun(self) -> int:
        return int(json.loads(cygrpc.channelz_get_server(self._server))["server"]["data"].get("callsStarted", 0))

    def begun_by(self, peers: Collection[Peer]) -> dict[Peer, int]:
        counts = {}
        for socket in _pages(lambda first: cygrpc.channelz_get_server_sockets(self._server, first, 0), "socketRef"):
            # The name is that of the transport and the peer: "chttp2 ipv4:127.0.0.1:4711".
            if (peer := parse_peer(socket["name"].rpartition(" ")[2])) in peers:
                try:
                    data = json.loads(cygrpc.channelz_get_socket(int(socket["socketId"])))["socket"]["data"]
                except ValueError:
                    continue  # closed in the meantime
                counts[peer] = int(data.get("streamsStarted", 0))
        return counts


def _pages(fetch: Callable[[int], bytes], key: str) -> Iterator[dict[str, Any]]:
    first, is_end = 0, False
    while not is_end:
        page = json.loads(fetch(first))
        is_end = page.get("end", False) or not page.get(key)
        for entry in page.get(key, ()):
            first = max(first, int(entry["socketId"] if key == "socketRef" else entry["ref"]["serverId"]) + 1)
            yield entry


def new_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor],
    options: Sequence[tuple[str, Any]],
    connections: Connections | None = None,
    has_token: Callable[[Any], bool] = lambda metadata: False,
) -> grpc.aio.Server:
    """Return a server that is not started yet. Its methods must be registered by name, as generated code does.

    Args:
        interceptors: as of `grpc.aio.server`.
        options: as of `grpc.aio.server`.
        connections: decides which calls are dropped; None to handle all.
        has_token: returns whether the metadata of a call contain a valid token.
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
        connections.counts = _Counts()
        server._server.connections, server._server.has_token = connections, has_token  # type: ignore[attr-defined]
    return server
