"""Compilations on a real server with real children: sharing, caching and cancellation over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from etfarm.v1 import (
    common_pb2,
    compile_pb2,
    compile_pb2_grpc,
    job_pb2,
    report_pb2,
)
from etfarm.v1.job_pb2 import Candidate, JobSpec, JobState
from etfarm.wire import recipes, tensors
from etfarm.wire.channel import Access, open_channel
from tests.support import models
from tests.support.farm import FarmProcess
from tests.support.farm_calls import FarmCalls

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


class Client(FarmCalls):
    """The calls of a farm that compiles."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        super().__init__(channel)
        self.compilations = compile_pb2_grpc.CompileServiceStub(channel)

    async def model(self, folder: Path, recipe: str, **methods: Callable[[], Any]) -> Candidate:
        created = Candidate(name="net", recipe=recipe)
        created.model.name = "net"
        for name, make in methods.items():
            data = models.save(make, folder / f"{name}.pt2").read_bytes()
            created.model.methods[name].exported_program.CopyFrom(await self.put(data))
        return created

    async def compile(self, candidate: Candidate, **more: Any) -> tuple[job_pb2.Job, report_pb2.Report]:
        job = await self.submit(JobSpec(candidates=[candidate], **more))
        await self.watch(job.id)
        (report,) = await self.reports_of(job.id)
        return await self.call(self.jobs.Get, job_pb2.GetJobRequest(job_id=job.id)), report


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
    job, report = await client.compile(candidate)
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
    facts = (await client.compilations.GetCompilation(compile_pb2.GetCompilationRequest(key=job.cells[0].compilation_key))).facts
    assert set(facts.methods) == {"forward", "encode", "eos"}

    candidate.recipe = NAIVE
    job, report = await client.compile(candidate)
    assert stages(report) == [("QUANTIZE", True), ("TORCH_EXPORT", True), *((stage, False) for stage in LOWERED)]
    assert not report.compile.cached
    assert report.compile.compilation.exported_programs == created.exported_programs

    job, report = await client.compile(candidate)
    assert report.compile.cached and job.cells[0].compile_cached


async def test_a_failed_compilation_fails_again_from_the_cache(client: Client, tmp_path: Path) -> None:
    candidate = await client.model(tmp_path, FP32, forward=models.unknown)
    first, report = await client.compile(candidate)
    again, second = await client.compile(candidate)
    assert (first.state, again.state) == (JobState.JOB_STATE_FAILED, JobState.JOB_STATE_FAILED)
    assert not report.compile.cached and second.compile.cached
    assert (second.error.reason, second.error.message) == (report.error.reason, report.error.message)
    assert second.error.remedy == report.error.remedy, "compiling again cannot help"
    assert second.error.metadata["cached"] == "true"
    assert stages(second) == stages(report)
    assert again.cells[0].compile_cached
    kept = await client.compilations.GetCompilation(compile_pb2.GetCompilationRequest(key=again.cells[0].compilation_key))
    assert kept.error.reason == report.error.reason
    _, third = await client.compile(candidate, no_cache=True)
    assert not third.compile.cached


async def test_a_device_runs_a_program_with_external_weights_and_constants(farm: FarmProcess, tmp_path: Path) -> None:
    beside = recipes.from_toml('recipe = "portable"\n[executorch]\nexternal_constants = true\n').json
    async with open_channel(Access.of(farm.address)) as channel:
        client = Client(channel)
        candidate = await client.model(tmp_path, beside, forward=models.conv, encode=models.dynamic)
        candidate.model.constant_methods["eos"].CopyFrom(await client.put(tensors.encode([tensors.Scalar("", 7)])))
        measurement = job_pb2.Measurement(warmup=1, iterations=20, min_time_s=0)
        spec = JobSpec(candidates=[candidate], devices=[job_pb2.DeviceChoice()], measurement=measurement)
        spec.methods.extend(["forward", "encode", "eos"])
        job = await client.submit(spec)
        await client.watch(job.id)
        forward, encode, eos = await client.reports_of(job.id)
    for report in (forward, encode, eos):
        assert report.state == common_pb2.CELL_STATE_SUCCEEDED, report.error
        assert sum(data.size_bytes for data in report.compile.compilation.program.data.values()) > 0
        assert not [warning for warning in report.compile.warnings if warning.code.startswith("ANALYSIS")]
    for report in (forward, encode):
        assert report.accuracy[0].sqnr_db > 100, "each is compared with its own method's program"
        assert any(row.source.file.endswith("models.py") for row in report.operators)
    assert not eos.accuracy
