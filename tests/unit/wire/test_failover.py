"""Channels to several servers, one of which accepts connections and says nothing, as a stopped process does."""

from __future__ import annotations

import socket
import time

import grpc

from etfarm.v1 import farm_pb2, farm_pb2_grpc
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.failover import settle


class Farm(farm_pb2_grpc.FarmServiceServicer):
    async def GetServerInfo(self, request: object, context: object) -> farm_pb2.ServerInfo:  # type: ignore[override]
        return farm_pb2.ServerInfo(version="here")


async def test_a_server_that_stands_still_does_not_keep_a_client_waiting() -> None:
    server = grpc.aio.server()
    farm_pb2_grpc.add_FarmServiceServicer_to_server(Farm(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            addresses = f"127.0.0.1:{mute.getsockname()[1]},127.0.0.1:{port}"
            async with open_channel(Access(addresses)) as channel:
                began = time.monotonic()
                await settle(channel)
                assert time.monotonic() - began < 2.0  # of a single server
                stub = farm_pb2_grpc.FarmServiceStub(channel)
                assert (await stub.GetServerInfo(farm_pb2.GetServerInfoRequest())).version == "here"
    finally:
        await server.stop(None)
