"""Calls that are open when a server ends or stops forwarding: none looks as if its caller had cancelled it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from etfarm.server.cluster.leadership import Leader, Leadership
from etfarm.server.cluster.standby import standing_by
from etfarm.server.config import Config
from etfarm.v1 import (
    artifact_pb2,
    artifact_pb2_grpc,
    device_pb2,
    device_pb2_grpc,
    farm_pb2,
    farm_pb2_grpc,
)
from etfarm.wire.channel import Access, open_channel, parse_address
from etfarm.wire.chunks import artifact_of
from tests.support.contract import address_of
from tests.support.farm import Daemon, serve

CHANNELS, CALLERS = 4, 15
"""Number of connections, and of callers of each kind on each: more than gRPC hands over at once."""


class Callers:
    """Callers of a server, each until its first status that is an error."""

    def __init__(self) -> None:
        self.codes = Counter[tuple[str, str]]()
        """Numbers of statuses, by the kind of the call and the code."""
        self.answered = asyncio.Event()
        self._tasks = list[asyncio.Task[None]]()

    @asynccontextmanager
    async def calling(self, address: str) -> AsyncIterator[None]:
        """Call until the end of the block, and wait there for every status."""
        async with AsyncExitStack() as stack:
            for _ in range(CHANNELS):
                channel = await stack.enter_async_context(open_channel(Access(address)))
                for call in (self._ask, self._watch, self._send):
                    self._tasks += [asyncio.create_task(call(channel)) for _ in range(CALLERS)]
            yield
            async with asyncio.timeout(60):
                await asyncio.gather(*self._tasks)

    async def _ask(self, channel: grpc.aio.Channel) -> None:
        stub = farm_pb2_grpc.FarmServiceStub(channel)
        try:
            while True:
                await stub.GetServerInfo(farm_pb2.GetServerInfoRequest())
                self.answered.set()
        except grpc.aio.AioRpcError as error:
            self._note("ask", error)

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        try:
            async for _ in device_pb2_grpc.DeviceServiceStub(channel).Watch(device_pb2.WatchDevicesRequest()):
                pass
        except grpc.aio.AioRpcError as error:
            self._note("watch", error)

    async def _send(self, channel: grpc.aio.Channel) -> None:
        async def requests() -> AsyncIterator[artifact_pb2.UploadArtifactRequest]:
            yield artifact_pb2.UploadArtifactRequest(header=artifact_pb2.UploadHeader(artifact=artifact_of(os.urandom(1000))))
            await asyncio.Event().wait()  # of a caller that is slow

        try:
            await artifact_pb2_grpc.ArtifactServiceStub(channel).Upload(requests())
        except grpc.aio.AioRpcError as error:
            self._note("send", error)

    def _note(self, kind: str, error: grpc.aio.AioRpcError) -> None:
        self.codes[kind, error.code().name] += 1


@pytest.fixture
async def leader(tmp_path: Path) -> AsyncIterator[Daemon]:
    with serve(tmp_path) as daemon:
        yield daemon


@asynccontextmanager
async def forwarded(leader: Daemon, folder: Path, callers: Callers) -> AsyncIterator[None]:
    """Call a standby, which stops forwarding at the end of the block."""
    async with AsyncExitStack() as stack:
        leadership = Leadership(Leader(1, address_of(leader), "", "", "secret"))
        standby = await stack.enter_async_context(AsyncExitStack())
        address = await standby.enter_async_context(standing_by(Config(parse_address("127.0.0.1:0"), folder), leadership))
        await stack.enter_async_context(callers.calling(address))
        yield
        await standby.aclose()


async def test_a_standby_that_takes_the_lead_cancels_no_call(leader: Daemon, tmp_path: Path) -> None:
    callers = Callers()
    async with forwarded(leader, tmp_path, callers):
        await callers.answered.wait()
    assert {code for _, code in callers.codes} == {"UNAVAILABLE"}, callers.codes
    assert [callers.codes[kind, "UNAVAILABLE"] for kind in ("ask", "watch", "send")] == [CHANNELS * CALLERS] * 3


@pytest.mark.parametrize("is_forwarded", [False, True])
async def test_a_server_that_ends_cancels_no_call(leader: Daemon, tmp_path: Path, *, is_forwarded: bool) -> None:
    callers = Callers()
    async with callers.calling(address_of(leader)) if not is_forwarded else forwarded(leader, tmp_path, callers):
        await callers.answered.wait()
        leader.signal(signal.SIGTERM)
        assert leader.process is not None
        await asyncio.to_thread(leader.process.wait)
    assert {code for _, code in callers.codes} == {"UNAVAILABLE"}, callers.codes
    assert callers.codes["watch", "UNAVAILABLE"] == CHANNELS * CALLERS
