"""Work of the server's workers for a cell in its timeline: work, and waits for a turn."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

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


async def test_waits_for_a_turn_are_phases_of_their_own() -> None:
    clock, announced, run = Clock(), Announced(), started()
    phases = clock.phases(run, announced)
    clock.now_s = 0.001  # what a cache is asked
    phases.turn(False)
    clock.now_s = 3
    phases.turn(True)
    clock.now_s = 5
    phases.turn(False)  # the second child of a compilation
    clock.now_s = 6
    phases.turn(True)
    clock.now_s = 10
    phases.end()
    assert recorded(run) == [
        ("WAIT_FOR_WORKER", 1, 2999),
        ("COMPILE", 3000, 2000),
        ("WAIT_FOR_WORKER", 5000, 1000),
        ("COMPILE", 6000, 4000),
    ]


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


async def test_a_turn_at_once_does_not_cut_the_work() -> None:
    clock, announced, run = Clock(), Announced(), started()
    phases = clock.phases(run, announced)
    for seconds, has_turn in ((0, False), (0.004, True), (2, False), (2.004, True)):
        clock.now_s = seconds
        phases.turn(has_turn)
    clock.now_s = 6
    phases.end()
    assert recorded(run) == [("COMPILE", 0, 6000)]


async def test_a_wait_that_starts_again_or_fails_is_one_wait() -> None:
    clock, announced, run = Clock(), Announced(), started()
    phases = clock.phases(run, announced)
    clock.now_s = 1
    phases.turn(False)
    clock.now_s = 2
    phases.turn(False)  # what starts children was lost
    clock.now_s = 5
    phases.end()
    assert recorded(run) == [("COMPILE", 0, 1000), ("WAIT_FOR_WORKER", 1000, 4000)]


async def test_a_turn_at_once_is_no_wait() -> None:
    clock, announced, run = Clock(), Announced(), started()
    phases = clock.phases(run, announced)
    phases.turn(False)
    clock.now_s = 0.004
    phases.turn(True)
    clock.now_s = 2
    phases.end()
    assert recorded(run) == [("COMPILE", 0, 2000)]


async def test_an_answer_without_a_worker_is_work() -> None:
    clock, announced, run = Clock(), Announced(), started()
    phases = clock.phases(run, announced)
    clock.now_s = 0.5
    phases.end()
    assert recorded(run) == [("COMPILE", 0, 500)] and announced.phases == []
