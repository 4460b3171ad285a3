"""Work of the server's workers for a cell in its timeline: work, and waits for a turn."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from etfarm.server.jobs.cells.cell_run import CellRun
from etfarm.server.jobs.cells.progress import ANNOUNCED_S, CellProgress, PhaseTimer, TurnPhases
from etfarm.server.jobs.records.watch import Announcer
from etfarm.v1.job_pb2 import Cell, Job, JobEvent

START = datetime(2026, 1, 1, tzinfo=UTC)


class Announced(Announcer):
    """What watchers would receive."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: list[str] = []

    def announce(self, job_id: str, event: JobEvent) -> None:
        self.phases.append(event.progress.phase)


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def phases(self, run: CellRun, announced: Announced, announced_s: float = ANNOUNCED_S) -> TurnPhases:
        def now() -> datetime:
            return START + timedelta(seconds=self.now_s)

        return TurnPhases(
            run, "COMPILE", PhaseTimer(now, lambda: self.now_s), CellProgress(announced, now), announced_s=announced_s
        )


def started() -> CellRun:
    job = Job(id="j")
    job.create_time.FromDatetime(START)
    return CellRun(job, Cell(id="c"))


def recorded(run: CellRun) -> list[tuple[str, float, float]]:
    return [(phase.phase, phase.start_ms, phase.duration_ms) for phase in run.cell.timeline]


@pytest.mark.parametrize(
    ("turns", "end_s", "phases"),
    [
        pytest.param(
            # 1 ms in which a cache is asked, then two children of a compilation
            [(0.001, False), (3, True), (5, False), (6, True)], 10,
            [("WAIT_FOR_WORKER", 1, 2999), ("COMPILE", 3000, 2000), ("WAIT_FOR_WORKER", 5000, 1000), ("COMPILE", 6000, 4000)],
            id="waits for a turn are phases of their own",
        ),
        pytest.param([(0, False), (0.004, True)], 2, [("COMPILE", 0, 2000)], id="a turn at once is no wait"),
        pytest.param(
            [(0, False), (0.004, True), (2, False), (2.004, True)], 6, [("COMPILE", 0, 6000)],
            id="a turn at once does not cut the work",
        ),
        pytest.param(
            # The second time, what starts children was lost.
            [(1, False), (2, False)], 5, [("COMPILE", 0, 1000), ("WAIT_FOR_WORKER", 1000, 4000)],
            id="a wait that starts again or fails is one wait",
        ),
        pytest.param([], 0.5, [("COMPILE", 0, 500)], id="an answer without a worker is work"),
    ],
)  # fmt: skip
async def test_work_and_waits_are_phases(
    turns: list[tuple[float, bool]], end_s: float, phases: list[tuple[str, float, float]]
) -> None:
    clock, announced, run = Clock(), Announced(), started()
    timeline = clock.phases(run, announced)
    for clock.now_s, has_turn in turns:
        timeline.turn(has_turn)
    clock.now_s = end_s
    timeline.end()
    assert recorded(run) == phases and announced.phases == []


async def test_watchers_are_told_of_waits_that_last() -> None:
    announced, run = Announced(), started()
    with Clock().phases(run, announced, 0.01) as phases:
        phases.turn(False)
        phases.turn(True)
        await asyncio.sleep(0.03)
        assert announced.phases == [], "a turn at once"
        phases.turn(False)
        await asyncio.sleep(0.03)
        phases.turn(True)
        assert announced.phases == ["WAIT_FOR_WORKER", "COMPILE"]
        phases.turn(False)
    await asyncio.sleep(0.03)
    assert announced.phases == ["WAIT_FOR_WORKER", "COMPILE"], "the cell ended"
