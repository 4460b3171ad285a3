"""Calls that gRPC's server cancels, as it does when it stops: each goes on as after UNAVAILABLE."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from etfarm.client.admin.stored_artifacts import AsyncArtifacts
from etfarm.client.errors import EtfarmError
from etfarm.client.fleet.watches import watch_devices, watch_jobs
from etfarm.client.jobs.job import AsyncJob
from etfarm.client.sessions.open_calls import Line, SessionCalls
from etfarm.client.transport import transfers
from etfarm.client.transport.retry import Patience
from etfarm.client.transport.stubs import Stubs
from etfarm.v1 import (
    artifact_pb2,
    artifact_pb2_grpc,
    device_pb2,
    device_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)
from etfarm.wire.chunks import artifact_of
from tests.support.fake_servers import serving, stubs_of

DATA = bytes(range(256)) * 20
ARTIFACT = artifact_of(DATA)
HALF = len(DATA) // 2
WAIT_S = 60.0


class Stopping(
    job_pb2_grpc.JobServiceServicer,
    device_pb2_grpc.DeviceServiceServicer,
    artifact_pb2_grpc.ArtifactServiceServicer,
    session_pb2_grpc.SessionServiceServicer,
):
    """A farm that cancels the first call of each method, streams after their first message."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.committed = False

    async def cut(self, method: str, context: Any) -> None:
        self.calls[method] += 1
        if self.calls[method] == 1:
            await context.abort(grpc.StatusCode.CANCELLED)

    async def Get(self, request: Any, context: Any) -> job_pb2.Job:
        await self.cut("Get", context)
        return job_pb2.Job(id=request.job_id)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if isinstance(request, device_pb2.WatchDevicesRequest):
            yield device_pb2.DeviceEvent(device=device_pb2.Device(id=f"d{self.calls['devices']}"))
            await self.cut("devices", context)
            await asyncio.Event().wait()
        for sequence in range(request.after_sequence + 1, 4):
            yield job_pb2.JobEvent(sequence=sequence, job=job_pb2.Job(id="j"))
            await self.cut("Watch", context)

    async def WatchAll(self, request: Any, context: Any) -> AsyncIterator[job_pb2.JobChange]:
        number = self.calls["WatchAll"]
        yield job_pb2.JobChange(job_id=f"j{number}", job=job_pb2.Job(id=f"j{number}", state=job_pb2.JOB_STATE_QUEUED))
        await self.cut("WatchAll", context)
        await asyncio.Event().wait()

    async def TailLog(self, request: Any, context: Any) -> AsyncIterator[job_pb2.LogLine]:
        for number in (1, 2):
            yield job_pb2.LogLine(number=number, text=str(number))
            await self.cut("TailLog", context)

    async def FindMissing(self, request: Any, context: Any) -> artifact_pb2.FindMissingArtifactsResponse:
        await self.cut("FindMissing", context)
        return artifact_pb2.FindMissingArtifactsResponse(missing=request.digests)

    async def GetUploadStatus(self, request: Any, context: Any) -> artifact_pb2.UploadStatus:
        await self.cut("GetUploadStatus", context)
        return artifact_pb2.UploadStatus(digest=request.digest, complete=self.committed)

    async def Upload(self, requests: AsyncIterator[Any], context: Any) -> artifact_pb2.UploadStatus:
        async for _ in requests:
            pass
        await self.cut("Upload", context)
        self.committed = True
        return artifact_pb2.UploadStatus(digest=ARTIFACT.digest, committed_bytes=len(DATA), complete=True)

    async def List(self, request: Any, context: Any) -> artifact_pb2.ListArtifactsResponse:
        return artifact_pb2.ListArtifactsResponse(artifacts=[artifact_pb2.StoredArtifact(artifact=ARTIFACT)])

    async def Download(self, request: Any, context: Any) -> AsyncIterator[artifact_pb2.Chunk]:
        for start in range(request.offset, len(DATA), HALF):
            yield artifact_pb2.Chunk(offset=start, data=DATA[start : start + HALF])
            await self.cut("Download", context)

    async def Open(self, request: Any, context: Any) -> AsyncIterator[session_pb2.SessionEvent]:
        yield session_pb2.SessionEvent(session_id="s", waiting=session_pb2.SessionWaiting(why="busy"))
        await self.cut("Open", context)
        yield session_pb2.SessionEvent(session_id="s", ready=session_pb2.SessionReady())
        await asyncio.Event().wait()


@pytest.fixture(params=["", "token"], ids=["plain", "intercepted"])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Stopping, Stubs]]:
    """A farm, over a channel without and with interceptors, whose calls gRPC ends in other ways."""
    farm = Stopping()
    async with stubs_of(farm, token=request.param) as stubs, asyncio.timeout(WAIT_S):
        yield farm, stubs


async def test_a_call_is_repeated(served: tuple[Stopping, Stubs]) -> None:
    farm, stubs = served
    assert (await stubs.jobs.Get(job_pb2.GetJobRequest(job_id="j"))).id == "j"
    assert farm.calls["Get"] == 2


async def test_the_events_and_the_log_of_a_job_go_on(served: tuple[Stopping, Stubs]) -> None:
    job = AsyncJob(served[1], job_pb2.Job(id="j"))
    assert [event.sequence async for event in job.watch()] == [1, 2, 3]
    assert [str(line.text) async for line in job.logs()] == ["1", "2"]


async def test_the_watches_of_all_devices_and_jobs_go_on(served: tuple[Stopping, Stubs]) -> None:
    _, stubs = served
    changes = watch_devices(stubs, "", telemetry=False)
    assert [(await anext(changes)).device_id for _ in range(2)] == ["d0", "d1"]
    jobs = watch_jobs(stubs, "")
    assert [(await anext(jobs)).id for _ in range(2)] == ["j0", "j1"]


async def test_uploads_and_downloads_go_on(served: tuple[Stopping, Stubs], tmp_path: Path) -> None:
    farm, stubs = served
    assert await transfers.upload_missing(stubs, {ARTIFACT.digest: (ARTIFACT, DATA)}) == len(DATA)
    assert farm.calls["GetUploadStatus"] > 1 and farm.calls["Upload"] == 2
    await transfers.download_file(stubs, ARTIFACT, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == DATA
    farm.calls.clear()
    assert await transfers.download_bytes(stubs, ARTIFACT) == DATA
    farm.calls.clear()
    assert b"".join([part async for part in AsyncArtifacts(stubs).read(ARTIFACT.digest)]) == DATA


async def test_a_session_that_waits_for_a_device_waits_again(served: tuple[Stopping, Stubs]) -> None:
    farm, stubs = served
    waits: list[str] = []

    async def connect(_: AsyncExitStack) -> Line:
        return Line(stubs, session_pb2.OpenSessionRequest())

    calls = SessionCalls(connect, "", waits.append, None)
    await calls.open()
    assert (farm.calls["Open"], waits) == (2, ["busy", "busy"])
    await calls.close()


async def test_an_upload_for_a_session_does_not_outlive_it() -> None:
    """The inputs of a call wait for the server, and the session is lost."""
    asked = asyncio.Event()

    class Hanging(Stopping):
        async def FindMissing(self, request: Any, context: Any) -> artifact_pb2.FindMissingArtifactsResponse:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

    server = AsyncExitStack()
    address = await server.enter_async_context(serving(Hanging()))
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(WAIT_S):
        stubs = Stubs.of(channel, Patience.of(channel, address))

        async def connect(_: AsyncExitStack) -> Line:
            return Line(stubs, session_pb2.OpenSessionRequest())

        calls = SessionCalls(connect, "", None, None)
        await calls.open()
        storing = asyncio.create_task(calls._while_open(calls._store(DATA)))
        await asked.wait()
        await server.aclose()
        with pytest.raises(EtfarmError) as lost:
            await storing
        assert lost.value.reason == "SERVER_UNREACHABLE"
        await calls.close()
