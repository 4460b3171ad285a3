"""Channels to several servers, one of which accepts connections and says nothing, as a stopped process does."""

from __future__ import annotations

import socket
import time

from etfarm.v1 import farm_pb2, farm_pb2_grpc
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.failover import settle
from tests.support.fake_servers import ReadyFarm, serving


async def test_a_server_that_stands_still_does_not_keep_a_client_waiting() -> None:
    async with serving(ReadyFarm()) as address:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            async with open_channel(Access(f"127.0.0.1:{mute.getsockname()[1]},{address}")) as channel:
                began = time.monotonic()
                await settle(channel)
                assert time.monotonic() - began < 2.0  # of a single server
                stub = farm_pb2_grpc.FarmServiceStub(channel)
                assert (await stub.GetServerInfo(farm_pb2.GetServerInfoRequest())).workers_ready
