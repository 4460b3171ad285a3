"""The medians of earlier reports: of the same execution and project only, the newest ones, and valid."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from etfarm.server.jobs import model
from etfarm.server.reports.latency.between_runs import MAX_HISTORY, Earlier
from etfarm.server.state.engine import Database
from etfarm.v1 import report_pb2
from tests.support.jobs import AT, JournalWorld

pytestmark = pytest.mark.usefixtures("each_database")


class World(JournalWorld):
    """A journal of jobs with one report each, a second apart."""

    count = 0

    def report(
        self, p50_ns: float = 2e6, change: Callable[[report_pb2.Report], object] = lambda report: None
    ) -> report_pb2.Report:
        self.count += 1
        report = report_pb2.Report(id=f"r{self.count}", method="forward", threads=2)
        report.create_time.FromDatetime(AT + timedelta(seconds=self.count))
        report.compile.compilation.program.digest = "program"
        report.device.id, report.device.arch, report.device.cores = "d1", "aarch64", 4
        report.runner.bundle_digest, report.inputs.digest = "bundle", "inputs"
        report.latency.p50_ns = p50_ns
        report.verdict.status = report_pb2.VERDICT_STATUS_VALID
        report.runs.add(p50_ns=p50_ns, verdict=report.verdict)
        change(report)
        return report

    async def add(self, report: report_pb2.Report, project: str = "team") -> None:
        job = await self.submit(f"job-{report.id}", project=project)
        after = model.advance(job.cells[0], model.CANCELLED, at=AT)
        after.report_id, report.cell = report.id, after.id
        await self.journal.change(after, report=report)

    async def earlier(self, report: report_pb2.Report | None = None, project: str = "team") -> Earlier:
        return await self.journal.reports.find_earlier(project, report or self.report())


@pytest.fixture
def world(database: Database) -> World:
    return World(database)


async def test_the_newest_medians_of_the_same_execution_come_first(world: World) -> None:
    for number in range(MAX_HISTORY + 2):
        await world.add(world.report(2e6 + number))
    earlier = await world.earlier()
    assert earlier.history == tuple(2e6 + number for number in reversed(range(2, MAX_HISTORY + 2))) and not earlier.similar


async def test_what_differs_invalid_reports_and_other_projects_do_not_count(world: World) -> None:
    def invalid(report: report_pb2.Report) -> None:
        report.verdict.status = report_pb2.VERDICT_STATUS_INVALID

    def of_0_2(report: report_pb2.Report) -> None:
        del report.runs[:]

    def repeated(report: report_pb2.Report) -> None:
        report.runs.add(p50_ns=2e6, verdict=report.verdict)

    changes: list[Callable[[report_pb2.Report], object]] = [
        invalid, of_0_2, repeated,
        lambda report: setattr(report.compile.compilation.program, "digest", "another"),
        lambda report: setattr(report.device, "id", "d2"),
        lambda report: setattr(report, "threads", 1),
        lambda report: setattr(report, "method", "decode"),
        lambda report: setattr(report.inputs, "digest", "others"),
        lambda report: setattr(report.runner, "bundle_digest", "newer"),
        lambda report: setattr(report.runner, "cores", "0-1"),
    ]  # fmt: skip
    for change in changes:
        await world.add(world.report(change=change))
    await world.add(world.report(), "others")
    earlier = await world.earlier()
    assert earlier.history == ()
    assert len(earlier.similar) == 7, "valid ones of the project, each an execution of its own"
    assert await world.earlier(world.report(change=invalid)) == Earlier()
    later = world.report()
    await world.add(world.report())
    assert (await world.earlier(later)).history == (), "only earlier ones"


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_the_history_has_reports_with_equally_many_valid_runs(world: World, count: int) -> None:
    def runs(valid: int, invalid: int = 0) -> Callable[[report_pb2.Report], object]:
        def change(report: report_pb2.Report) -> None:
            del report.runs[:]
            for _ in range(valid):
                report.runs.add(verdict=report.verdict)
            for _ in range(invalid):
                report.runs.add(verdict=report_pb2.Verdict(status=report_pb2.VERDICT_STATUS_INVALID))

        return change

    for number in (1, 2, 3, 5):
        await world.add(world.report(2e6 + number, runs(number)))
    await world.add(world.report(3e6, runs(5, 1)))
    earlier = await world.earlier(world.report(change=runs(count)))
    assert earlier.history == ((3e6, 2e6 + 5) if count == 5 else (2e6 + count,))
    assert earlier.similar == (() if count == 1 else ((2e6 + 1,),)), "the spread of similar programs is that of single runs"


async def test_similar_programs_have_a_similar_duration_on_the_same_kind_of_device(world: World) -> None:
    def program(name: str, cores: int = 4) -> Callable[[report_pb2.Report], object]:
        def change(report: report_pb2.Report) -> None:
            report.compile.compilation.program.digest, report.device.cores = name, cores

        return change

    for p50_ns, name, cores in ((1e6, "a", 4), (9.9e6, "b", 4), (1.1e6, "a", 4), (1e7, "c", 4), (9e5, "d", 4), (2e6, "e", 8)):
        await world.add(world.report(p50_ns, program(name, cores)))
    assert set((await world.earlier()).similar) == {(1.1e6, 1e6), (9.9e6,)}
