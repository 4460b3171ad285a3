"""The rpcs of the contract, and calls of a real server by their names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from importlib import import_module
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.message import Message

from tests.support.farm import Daemon

_FILES = "agent artifact audit compile device farm job project report_service session token webhook"
_MODULES = [import_module(f"etfarm.v1.{name}_pb2") for name in _FILES.split()]
SERVICES = {service.name: service for module in _MODULES for service in module.DESCRIPTOR.services_by_name.values()}
RPCS = {f"{service.name}.{method.name}": method for service in SERVICES.values() for method in service.methods}
ENDLESS = ("DeviceService.Watch", "JobService.WatchAll")
"""Rpcs whose stream of responses ends only when the caller leaves."""
WAIT_S = 200.0
"""An answer may have to wait until the compile workers are warm."""


def address_of(server: Daemon) -> str:
    """Where it says that it listens."""
    line = next((line for line in server.lines if "listening on" in line), None) or server.expect("listening on")
    return line.removeprefix("etfarm serve: listening on ")


async def call(channel: grpc.aio.Channel, rpc: str, *requests: Message, wait_s: float = WAIT_S) -> list[Any]:
    """Return the answers of an rpc by its name; an empty request where none is given."""
    while True:
        try:
            return await _call_once(channel, rpc, requests, wait_s)
        except grpc.aio.AioRpcError as error:
            # grpc.aio loses the status when the server answers a stream in the moment of its first write; so do it again.
            if not (error.details() or "").startswith("Internal error from Core"):
                raise


async def _call_once(channel: grpc.aio.Channel, rpc: str, requests: Sequence[Message], wait_s: float) -> list[Any]:
    method = RPCS[rpc]
    values = requests or (message_factory.GetMessageClass(method.input_type)(),)
    kind = ("stream" if method.client_streaming else "unary") + "_" + ("stream" if method.server_streaming else "unary")
    stub = getattr(channel, kind)(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
    )

    async def stream() -> AsyncIterator[Message]:
        for request in values:
            yield request

    running = stub(stream() if method.client_streaming else values[0], timeout=wait_s)
    if rpc in ENDLESS:
        first = [await anext(aiter(running))]
        running.cancel()
        return first
    return [message async for message in running] if method.server_streaming else [await running]
