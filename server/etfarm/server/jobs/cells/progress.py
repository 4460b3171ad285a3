"""Progress and timings of cells, for watchers and for the reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final

from etfarm.server.jobs.cells.cell_run import CellRun
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.reports.assembly import since
from etfarm.v1 import common_pb2
from etfarm.v1.common_pb2 import Actor, LogSource
from etfarm.v1.job_pb2 import Job, JobEvent, Progress

WAIT_FOR_WORKER: Final = "WAIT_FOR_WORKER"
"""The phase in which a cell waits for a turn at the compile workers, which also analyze."""

_MOMENT_MS: Final = 20.0
"""Phases of workers below this are not recorded by themselves."""

ANNOUNCED_S: Final = 0.3
"""Seconds after which watchers are told of a wait."""

OnProgress = Callable[[str, Progress], None]
"""Function that receives (job id, progress)."""

OnLine = Callable[[str, str, LogSource.ValueType, str], None]
"""Function that receives (job id, cell id, source, text) of a line that a compiler or runner printed."""


class CellProgress:
    """Announcements to a job's watchers of what its cells are doing."""

    def __init__(self, announcer: Announcer, now: Callable[[], datetime]) -> None:
        self._announcer = announcer
        self._now = now

    def announce(self, job_id: str, progress: Progress) -> None:
        """Announce the progress of a cell."""
        event = JobEvent(progress=progress)
        event.time.FromDatetime(self._now())
        self._announcer.announce(job_id, event)

    def announce_phase(self, cell_runs: Iterable[CellRun], phase: str, message: str = "") -> None:
        """Announce what the server is doing for cells."""
        for run in cell_runs:
            self.announce(run.job.id, Progress(cell_id=run.cell.id, actor=Actor.ACTOR_SERVER, phase=phase, message=message))


class TurnPhases:
    """Consecutive phases of work of the server's workers for a cell: work, and waits for a turn at it. Use a with statement.

    Args:
        work: the phase of the work.
        on_turn: called as `turn`; the work goes on when the block ends.
        announced_s: seconds after which watchers are told of a wait.
    """

    def __init__(
        self,
        run: CellRun,
        work: str,
        timer: PhaseTimer,
        progress: CellProgress,
        *,
        on_turn: Callable[[bool], None] = lambda has_turn: None,
        announced_s: float = ANNOUNCED_S,
    ) -> None:
        self._on_turn = on_turn
        self._run = run
        self._work = work
        self._timer = timer
        self._progress = progress
        self._started = timer.start(run.job)
        self._wait: StartedPhase | None = None
        """The wait that may be recorded; None while the work goes on."""
        self._announced_s = announced_s
        self._announcing: asyncio.TimerHandle | None = None

    def __enter__(self) -> TurnPhases:
        return self

    def __exit__(self, *_: object) -> None:
        self._announce_no_wait()
        self._on_turn(True)

    def turn(self, has_turn: bool) -> None:
        """Record and announce that the work goes on, or waits for its turn; waits of a moment are a part of the work."""
        self._on_turn(has_turn)
        wait, self._wait = self._wait, None
        if wait is None:
            self._wait = None if has_turn else self._timer.start(self._run.job)
        elif not has_turn:
            self._wait = wait  # a try that was lost while it waited
        elif wait.elapsed_ms() >= _MOMENT_MS:
            self._record_until(wait)
            wait.record(WAIT_FOR_WORKER, self._run)
            self._started = self._timer.start(self._run.job)
        if has_turn:
            if self._announce_no_wait():
                self._progress.announce_phase([self._run], self._work)
        elif wait is None:
            announce = partial(self._progress.announce_phase, [self._run], WAIT_FOR_WORKER)
            self._announcing = asyncio.get_running_loop().call_later(self._announced_s, announce)

    def _announce_no_wait(self) -> bool:
        """Announce no further wait; return whether one was announced."""
        announcing, self._announcing = self._announcing, None
        if announcing is None:
            return False
        is_announced = announcing.when() <= asyncio.get_running_loop().time()
        announcing.cancel()
        return is_announced

    def end(self) -> None:
        """Record the last phase."""
        if self._wait is not None and self._wait.elapsed_ms() >= _MOMENT_MS:  # it failed while it waited
            self._record_until(self._wait)
            self._wait.record(WAIT_FOR_WORKER, self._run)
        else:
            self._started.record(self._work, self._run)

    def _record_until(self, wait: StartedPhase) -> None:
        """Record the work before a wait, unless it was that of a moment, such as to ask a cache."""
        duration_ms = (wait.started - self._started.started) * 1e3
        if duration_ms >= _MOMENT_MS:
            self._started.record(self._work, self._run, duration_ms=duration_ms)


class PhaseTimer:
    """Timer of the server's phases for the timelines of cells.

    Args:
        clock: returns seconds on a monotonic clock.
    """

    def __init__(self, now: Callable[[], datetime], clock: Callable[[], float]) -> None:
        self._now = now
        self._clock = clock

    def start(self, job: Job) -> StartedPhase:
        """Start a phase of cells of a job."""
        return StartedPhase(self.since(job), self._clock(), self._clock)

    def since(self, job: Job) -> float:
        """Return the milliseconds since the submission of a job."""
        return since(job, self._now())


@dataclass(frozen=True)
class StartedPhase:
    """A phase that has not ended yet."""

    start_ms: float
    started: float
    clock: Callable[[], float]

    def elapsed_ms(self) -> float:
        """Return the milliseconds since the phase began."""
        return (self.clock() - self.started) * 1e3

    def record(self, phase: str, *cell_runs: CellRun, duration_ms: float | None = None) -> None:
        """Add the phase, which ends now if it has no duration, to the timelines of cells."""
        duration_ms = self.elapsed_ms() if duration_ms is None else duration_ms
        for run in cell_runs:
            run.cell.timeline.add(actor=common_pb2.ACTOR_SERVER, phase=phase, start_ms=self.start_ms, duration_ms=duration_ms)
