"""Compilations on a real server with real children: sharing, caching and cancellation over gRPC."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from etfarm.v1 import (
    artifact_pb2_grpc,
    common_pb2,
    compile_pb2,
    compile_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
    report_pb2,
    report_service_pb2_grpc,
)
from etfarm.v1.job_pb2 import Candidate, JobSpec, JobState
from etfarm.wire import recipes, tensors
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.chunks import artifact_of, upload
from etfarm.wire.names import PROTOCOL_VERSION
from tests.support import models
from tests.support.farm import PROMPTLY_S, FarmProcess, descendants, wait_until

pytestmark = pytest.mark.slow(reason="kills farms that compile")

FP32 = recipes.parse("xnnpack_fp32").json
INT8 = recipes.parse("xnnpack_pt2e_int8_static_per_channel").json
NAIVE = recipes.from_toml('recipe = "xnnpack_pt2e_int8_static_per_channel"\n[executorch]\nmemory_planning = "naive"\n').json
LOWERED = ["TO_EDGE_TRANSFORM_AND_LOWER", "TO_EXECUTORCH"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    """A server with two concurrent compilations and no agents."""
    folder, options = tmp_path_factory.mktemp("compilations"), ["--workers", "2", "--threads", "1"]
    with FarmProcess(folder, bundle=False, prewarm=True, serve=options, executes=True) as running:
        yield running.start(agents=0)


@dataclass
class Client:
    """The stubs of a channel."""

    channel: Any

    async def put(self, data: bytes) -> common_pb2.Artifact:
        artifact = artifact_of(data)
        await upload(artifact_pb2_grpc.ArtifactServiceStub(self.channel), artifact, data)
        return artifact

    async def model(self, folder: Path, recipe: str, **methods: Callable[[], Any]) -> Candidate:
        created = Candidate(name="net", recipe=recipe)
        created.model.name = "net"
        for name, make in methods.items():
            data = models.save(make, folder / f"{name}.pt2").read_bytes()
            created.model.methods[name].exported_program.CopyFrom(await self.put(data))
        return created

    async def submit(self, candidate: Candidate, **more: Any) -> job_pb2.Job:
        spec = JobSpec(candidates=[candidate], **more)
        return await self.jobs.Submit(
            job_pb2.SubmitJobRequest(protocol_version=PROTOCOL_VERSION, request_id=str(uuid.uuid4()), spec=spec)
        )

    @property
    def jobs(self) -> Any:
        return job_pb2_grpc.JobServiceStub(self.channel)

    async def reports(self, job: job_pb2.Job) -> list[report_pb2.Report]:
        async for _ in self.jobs.Watch(job_pb2.WatchJobRequest(job_id=job.id)):
            pass
        stub = report_service_pb2_grpc.ReportServiceStub(self.channel)
        return list((await stub.Get(report_pb2.GetReportsRequest(job_id=job.id))).reports)

    async def end(self, job: job_pb2.Job) -> tuple[job_pb2.Job, report_pb2.Report]:
        (report,) = await self.reports(job)
        return await self.jobs.Get(job_pb2.GetJobRequest(job_id=job.id)), report

    async def until(self, job: job_pb2.Job, phase: str) -> None:
        async for event in self.jobs.Watch(job_pb2.WatchJobRequest(job_id=job.id)):
            if event.progress.phase == phase:
                return
        raise AssertionError(f"the job ended before {phase}")

    async def log(self, job: job_pb2.Job) -> list[str]:
        return [line.text async for line in self.jobs.TailLog(job_pb2.TailJobLogRequest(job_id=job.id))]


@pytest.fixture
async def client(server: FarmProcess) -> AsyncIterator[Client]:
    async with open_channel(Access.of(server.address)) as channel:
        yield Client(channel)


def stages(report: report_pb2.Report) -> list[tuple[str, bool]]:
    return [(stage.stage, stage.cached) for stage in report.compile.compilation.stages]


async def test_recipes_with_equal_quantization_share_it_for_all_methods(client: Client, tmp_path: Path) -> None:
    candidate = await client.model(tmp_path, INT8, forward=models.conv, encode=models.dynamic)
    constant = tensors.encode([tensors.Scalar("", 7)])
    candidate.model.constant_methods["eos"].CopyFrom(await client.put(constant))
    job, report = await client.end(await client.submit(candidate))
    assert job.state == JobState.JOB_STATE_SUCCEEDED, report.error
    created = report.compile.compilation
    assert stages(report) == [("QUANTIZE", False), ("TORCH_EXPORT", False), *((stage, False) for stage in LOWERED)]
    assert set(created.stages[0].methods) == {"forward", "encode"}
    assert set(created.delegation) >= {"forward", "encode"}
    assert set(created.exported_programs) == {"forward", "encode"}
    assert created.exported_programs["forward"].digest != candidate.model.methods["forward"].exported_program.digest
    assert {(check.method, check.ran) for check in created.checks} == {("forward", True), ("encode", True)}
    assert created.sizes.delegate_bytes + created.sizes.constant_bytes > 0
    assert created.program.pte.size_bytes and created.etrecord.size_bytes
    compilation = compile_pb2_grpc.CompileServiceStub(client.channel).GetCompilation
    facts = (await compilation(compile_pb2.GetCompilationRequest(key=job.cells[0].compilation_key))).facts
    assert set(facts.methods) == {"forward", "encode", "eos"}

    candidate.recipe = NAIVE
    job, report = await client.end(await client.submit(candidate))
    assert stages(report) == [("QUANTIZE", True), ("TORCH_EXPORT", True), *((stage, False) for stage in LOWERED)]
    assert not report.compile.cached
    assert report.compile.compilation.exported_programs == created.exported_programs

    job, report = await client.end(await client.submit(candidate))
    assert report.compile.cached and job.cells[0].compile_cached


@pytest.mark.parametrize("stage", ["QUANTIZE", "TORCH_EXPORT", "TO_EDGE_TRANSFORM_AND_LOWER"])
async def test_a_stopped_compilation_returns_its_stages_files(client: Client, tmp_path: Path, stage: str) -> None:
    candidate = await client.model(tmp_path, INT8, forward=models.conv)
    job, report = await client.end(await client.submit(candidate, stop_after=stage))
    assert job.state == JobState.JOB_STATE_SUCCEEDED, report.error
    compilation = report.compile.compilation
    assert (compilation.stopped_after, compilation.HasField("program")) == (stage, False)
    assert {"forward.pt2", "forward.txt"} <= set(compilation.stage_files)


async def test_a_failed_compilation_fails_again_from_the_cache(client: Client, tmp_path: Path) -> None:
    candidate = await client.model(tmp_path, FP32, forward=models.unknown)
    first, report = await client.end(await client.submit(candidate))
    again, second = await client.end(await client.submit(candidate))
    assert (first.state, again.state) == (JobState.JOB_STATE_FAILED, JobState.JOB_STATE_FAILED)
    assert not report.compile.cached and second.compile.cached
    assert (second.error.reason, second.error.message) == (report.error.reason, report.error.message)
    assert second.error.remedy == report.error.remedy, "compiling again cannot help"
    assert second.error.metadata["cached"] == "true"
    assert stages(second) == stages(report)
    assert again.cells[0].compile_cached
    get = compile_pb2_grpc.CompileServiceStub(client.channel).GetCompilation
    kept = await get(compile_pb2.GetCompilationRequest(key=again.cells[0].compilation_key))
    assert kept.error.reason == report.error.reason
    _, third = await client.end(await client.submit(candidate, no_cache=True))
    assert not third.compile.cached


async def test_a_shared_quantization_continues_for_the_other_job_after_a_cancel(
    server: FarmProcess, client: Client, tmp_path: Path
) -> None:
    candidate = await client.model(tmp_path, INT8, forward=models.resnet8)
    other = Candidate()
    other.CopyFrom(candidate)
    other.recipe = NAIVE
    mine, theirs = await client.submit(candidate), await client.submit(other)
    await asyncio.gather(client.until(mine, "QUANTIZE"), client.until(theirs, "QUANTIZE"))
    async with asyncio.timeout(PROMPTLY_S):
        await client.jobs.Cancel(job_pb2.CancelJobRequest(job_id=mine.id))
    job, report = await client.end(theirs)
    assert job.state == JobState.JOB_STATE_SUCCEEDED, report.error
    assert stages(report)[0] == ("QUANTIZE", False)
    assert (await client.end(mine))[0].state == JobState.JOB_STATE_CANCELLED


async def test_cancelling_both_jobs_ends_the_child_and_removes_its_folder(
    server: FarmProcess, client: Client, tmp_path: Path
) -> None:
    assert server.server is not None
    pid, children = server.server.pid, server.folder / "server" / "work" / "children"
    idle = descendants(pid)
    candidate = await client.model(tmp_path, INT8, forward=models.resnet8)
    jobs = [await client.submit(candidate, no_cache=True), await client.submit(candidate, no_cache=True)]
    await asyncio.gather(*(client.until(job, "QUANTIZE") for job in jobs))
    assert len(list(children.glob("job-*"))) == 1
    await asyncio.gather(*(client.jobs.Cancel(job_pb2.CancelJobRequest(job_id=job.id)) for job in jobs))
    assert await asyncio.to_thread(wait_until, lambda: descendants(pid) <= idle, PROMPTLY_S), "the child lives"
    # Its folder goes once it is dead.
    assert await asyncio.to_thread(wait_until, lambda: not list(children.glob("job-*")), PROMPTLY_S)


async def test_a_device_runs_a_program_with_external_weights_and_constants(farm: FarmProcess, tmp_path: Path) -> None:
    beside = recipes.from_toml('recipe = "portable"\n[executorch]\nexternal_constants = true\n').json
    async with open_channel(Access.of(farm.address)) as channel:
        client = Client(channel)
        candidate = await client.model(tmp_path, beside, forward=models.conv, encode=models.dynamic)
        candidate.model.constant_methods["eos"].CopyFrom(await client.put(tensors.encode([tensors.Scalar("", 7)])))
        measurement = job_pb2.Measurement(warmup=1, iterations=20, min_time_s=0)
        job = await client.submit(
            candidate, devices=[job_pb2.DeviceChoice()], methods=["forward", "encode", "eos"], measurement=measurement
        )
        forward, encode, eos = await client.reports(job)
    for report in (forward, encode, eos):
        assert report.state == common_pb2.CELL_STATE_SUCCEEDED, report.error
        assert sum(data.size_bytes for data in report.compile.compilation.program.data.values()) > 0
        assert not [warning for warning in report.compile.warnings if warning.code.startswith("ANALYSIS")]
    for report in (forward, encode):
        assert report.accuracy[0].sqnr_db > 100, "each is compared with its own method's program"
        assert any(row.source.file.endswith("models.py") for row in report.operators)
    assert not eos.accuracy
