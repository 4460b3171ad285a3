"""Calls to a farm whose server may be killed, stopped or unreachable at any time: each is repeated until it is answered."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import grpc

from etfarm.v1 import (
    artifact_pb2_grpc,
    common_pb2,
    compile_pb2,
    device_pb2_grpc,
    farm_pb2,
    farm_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
    report_pb2,
    report_service_pb2_grpc,
)
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.chunks import artifact_of, upload
from etfarm.wire.names import PROTOCOL_VERSION
from etfarm.wire.status import is_unanswered

GIVE_UP_S: Final = 120.0
"""After which a call that is not answered fails the test."""
CALL_S: Final = 15.0
"""After which one try of a call is given up, as the server may be stopped."""
PAUSE_S: Final = 0.1
_AWAY: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})

LIVE: Final = frozenset({job_pb2.JOB_STATE_QUEUED, job_pb2.JOB_STATE_RUNNING})


def is_away(error: grpc.aio.AioRpcError) -> bool:
    """Return whether a call failed because the server was away, not because of the call."""
    # grpc.aio's own words for a stream that broke while a message was in flight.
    return error.code() in _AWAY or "Internal error from Core" in (error.details() or "")


@asynccontextmanager
async def open_channels(address: str, tokens: Mapping[str, str]) -> AsyncIterator[dict[str, grpc.aio.Channel]]:
    """Open a connection with each token; yield them by the tokens' names."""
    async with AsyncExitStack() as stack:
        yield {name: await stack.enter_async_context(open_channel(Access(address, token))) for name, token in tokens.items()}


class FarmCalls:
    """The stubs of a farm."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.repeated = Counter[str]()
        """Names of the codes for which calls were repeated; UNAVAILABLE is what clients take for it."""
        self.artifacts = artifact_pb2_grpc.ArtifactServiceStub(channel)
        self.devices = device_pb2_grpc.DeviceServiceStub(channel)
        self.farm = farm_pb2_grpc.FarmServiceStub(channel)
        self.jobs = job_pb2_grpc.JobServiceStub(channel)
        self.reports = report_service_pb2_grpc.ReportServiceStub(channel)

    async def call(self, method: Callable[..., Any], request: Any, *, give_up_s: float = GIVE_UP_S) -> Any:
        """Return the answer to a call that may be repeated.

        Raises:
            grpc.aio.AioRpcError: the server refuses the call.
        """
        async with asyncio.timeout(give_up_s):
            while True:
                try:
                    return await method(request, timeout=CALL_S)
                except grpc.aio.AioRpcError as error:
                    if not is_away(error):
                        raise
                    self._count(error)
                await asyncio.sleep(PAUSE_S)

    def _count(self, error: grpc.aio.AioRpcError) -> None:
        # gRPC's server cancels calls that arrive while it closes its port.
        self.repeated["UNAVAILABLE" if is_unanswered(error) else error.code().name] += 1

    async def put(self, data: bytes) -> common_pb2.Artifact:
        """Upload bytes."""
        artifact = artifact_of(data)
        await upload(self.artifacts, artifact, data)
        return artifact

    async def program(self, data: bytes, name: str) -> job_pb2.Candidate:
        """Upload a program, and return it as a candidate."""
        return job_pb2.Candidate(name=name, program=compile_pb2.Program(pte=await self.put(data)))

    async def submit(self, spec: job_pb2.JobSpec, request_id: str = "") -> job_pb2.Job:
        """Submit a job exactly once."""
        request = job_pb2.SubmitJobRequest(
            protocol_version=PROTOCOL_VERSION, request_id=request_id or uuid.uuid4().hex, spec=spec
        )
        answer: job_pb2.Job = await self.call(self.jobs.Submit, request)
        return answer

    async def watch(self, job_id: str, seen: list[job_pb2.JobEvent] | None = None) -> list[job_pb2.JobEvent]:
        """Return the journaled events of a job once it is terminal, received over as many streams as necessary.

        Args:
            seen: receives the events as they arrive; a caller may look at it meanwhile.
        """
        seen = [] if seen is None else seen
        while True:
            try:
                request = job_pb2.WatchJobRequest(job_id=job_id, after_sequence=len(seen))
                async for event in self.jobs.Watch(request):
                    if event.HasField("sequence"):
                        assert event.sequence == len(seen) + 1, f"job {job_id}: event {event.sequence} follows {len(seen)}"
                        seen.append(event)
                assert seen[-1].job_state not in LIVE, f"the watch of job {job_id} ended before the job"
                return seen
            except grpc.aio.AioRpcError as error:
                if not is_away(error):
                    raise
                self._count(error)
            await asyncio.sleep(PAUSE_S)

    async def all_jobs(self) -> list[job_pb2.Job]:
        """Return every job that the farm knows, newest first."""
        jobs: list[job_pb2.Job] = []
        token = ""
        while True:
            answer = await self.call(self.jobs.List, job_pb2.ListJobsRequest(page_size=500, page_token=token))
            jobs += answer.jobs
            if not (token := answer.next_page_token):
                return jobs

    async def reports_of(self, job_id: str) -> list[report_pb2.Report]:
        """Return the reports of a job."""
        return list((await self.call(self.reports.Get, report_pb2.GetReportsRequest(job_id=job_id))).reports)

    async def online(self) -> int:
        """Return the number of connected devices."""
        answer = await self.call(self.farm.GetServerInfo, farm_pb2.GetServerInfoRequest())
        return int(answer.devices_online)

    async def until_online(self, devices: int, give_up_s: float = GIVE_UP_S) -> None:
        """Wait until at least this number of devices is connected."""
        async with asyncio.timeout(give_up_s):
            while await self.online() < devices:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.02)


@asynccontextmanager
async def farm_calls(address: str, access: Access | None = None) -> AsyncIterator[FarmCalls]:
    """The calls of a farm, over a channel of their own.

    Args:
        access: of the caller, if it is not who this process acts as.
    """
    async with open_channel(access or Access.of(address)) as channel:
        yield FarmCalls(channel)
