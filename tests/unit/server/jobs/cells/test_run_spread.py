"""The spread of a single run from the history that the same cells leave, project by project."""

from __future__ import annotations

from array import array
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from etfarm.v1 import agent_pb2, common_pb2, report_pb2
from etfarm.wire.chunks import artifact_of
from tests.support.cells import BUNDLE, Agent, World, opened_world
from tests.support.jobs import AT, queued_job


async def measure(world: World, agent: Agent, p50_ns: float, project: str) -> report_pb2.Report:
    """Lead a cell with one measured run of 100 samples to its report."""

    async def analyze(*arguments: object, **_: object) -> report_pb2.Report:
        return report_pb2.Report(latency=report_pb2.Latency(p50_ns=p50_ns), runs=[report_pb2.Run(p50_ns=p50_ns)])

    world.analyst.analyze = analyze  # type: ignore[method-assign]
    job = queued_job(f"job-{world.ids()}", project=project, cell={"method": "forward", "device_index": 0})
    job.spec.candidates.add(name="net").program.pte.CopyFrom(artifact_of(b"pte"))
    job.spec.measurement.SetInParent()
    await world.begin(job)
    run = await agent.started()
    result = agent_pb2.CandidateResult(
        cell_id=job.cells[0].id, threads=1, iterations=100, duration_ns=100_000, stop_reason=common_pb2.STOP_REASON_MAX_TIME,
        samples=agent.uploaded(array("q", [900] * 100).tobytes()),
    )  # fmt: skip
    assert world.runs.deliver(agent_pb2.RunResult(attempt_id=run.attempt_id, device_id=run.device_id, candidates=[result]))
    await agent.expect_message("ack", run.attempt_id)
    _, (report,) = await world.end(job)
    assert report.verdict.status == report_pb2.VERDICT_STATUS_VALID, report.verdict
    return report


async def test_the_fourth_report_of_a_program_knows_how_much_it_varies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter(range(1_000_000))

    def tick(world: World) -> datetime:
        return AT + timedelta(seconds=next(looks))

    monkeypatch.setattr(World, "now", tick)
    async with opened_world(tmp_path, BUNDLE) as world:
        agent = await world.agent()
        reports = [await measure(world, agent, p50_ns, "team") for p50_ns in (1000.0, 1100.0, 1210.0, 1050.0)]
        foreign = await measure(world, agent, 1000.0, "others")
    assert [(report.run_spread.source, report.run_spread.runs) for report in (*reports, foreign)] == [
        *[(report_pb2.RUN_SPREAD_SOURCE_PRIOR, 0)] * 3,
        (report_pb2.RUN_SPREAD_SOURCE_HISTORY, 3),
        (report_pb2.RUN_SPREAD_SOURCE_PRIOR, 0),
    ]
    assert reports[3].run_spread.relative_stddev == pytest.approx(0.0953, abs=0.0001)
