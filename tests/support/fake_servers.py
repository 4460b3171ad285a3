"""Servers in this process whose calls are answered by the objects that a test gives them."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from typing import Any

import grpc

from etfarm.client.transport.retry import Patience
from etfarm.client.transport.stubs import Stubs
from etfarm.v1 import farm_pb2, farm_pb2_grpc
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.names import PROTOCOL_VERSION

ANY_PORT = "127.0.0.1:0"


class ReadyFarm(farm_pb2_grpc.FarmServiceServicer):
    """A farm of the client's own version, whose workers are warm."""

    def GetServerInfo(self, request: Any, context: Any) -> farm_pb2.ServerInfo:
        return farm_pb2.ServerInfo(version=version("etfarm"), workers_ready=True, protocol_version=PROTOCOL_VERSION)


def add_services(server: Any, *answering: object) -> None:
    """Let each object answer the calls of the services that it is a servicer of, or every call if it is a generic handler."""
    for each in answering:
        if isinstance(each, grpc.GenericRpcHandler):
            server.add_generic_rpc_handlers((each,))
        for base in type(each).__mro__:
            if (add := getattr(sys.modules[base.__module__], f"add_{base.__name__}_to_server", None)) is not None:
                add(each, server)


@asynccontextmanager
async def serving(
    *answering: object, address: str = ANY_PORT, credentials: grpc.ServerCredentials | None = None, **options: Any
) -> AsyncIterator[str]:
    """Yield the address of a server; `options` are those of `grpc.aio.server`."""
    server = grpc.aio.server(**options)
    add_services(server, *answering)
    port = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@contextmanager
def serving_in_threads(*answering: object) -> Iterator[str]:
    """Yield the address of a server for a test without an event loop."""
    server = grpc.server(ThreadPoolExecutor(4))
    add_services(server, *answering)
    port = server.add_insecure_port(ANY_PORT)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@asynccontextmanager
async def stubs_of(*answering: object, token: str = "", wait_s: float | None = None, **options: Any) -> AsyncIterator[Stubs]:
    """Yield the client's stubs of a server, whose calls are repeated for `wait_s`."""
    async with serving(*answering, **options) as address, open_channel(Access(address, token)) as channel:
        yield Stubs.of(channel, Patience.of(channel, address, wait_s))
