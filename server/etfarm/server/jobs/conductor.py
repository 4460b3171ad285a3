"""The tasks of live cells: one task leads each `CellRun`. A new server resumes live cells in their journaled states."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from functools import partial

import structlog

from etfarm.server.access.scope import EVERYTHING, Scope
from etfarm.server.jobs import model
from etfarm.server.jobs.cells.cell_run import CellRun
from etfarm.server.jobs.cells.stages import CellStages
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.jobs.takeups import set_aside
from etfarm.server.state.bodies import ValueDamaged
from etfarm.server.state.engine import wait_without_limit
from etfarm.v1.job_pb2 import Job, JobEvent
from etfarm.wire.errors import EtfarmError, FarmError, Fault

log = structlog.get_logger()


class Conductor:
    """The owner of the tasks of all live cells."""

    def __init__(self, journal: Journal, announcer: Announcer, stages: CellStages) -> None:
        self._journal = journal
        self._announcer = announcer
        self._stages = stages
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._runs: dict[str, CellRun] = {}
        """Runs of live cells, by cell id."""
        self._jobs: dict[str, Job] = {}
        """Jobs with live cells, by id."""
        self._live: Counter[str] = Counter()
        """Number of live cells by job id."""
        self._cancelled: set[str] = set()
        self._is_draining = False
        announcer.on_event(self._release_if_draining)

    @property
    def live(self) -> int:
        """Number of jobs with live cells."""
        return self.count_live(EVERYTHING)

    def count_live(self, scope: Scope) -> int:
        """Return the number of jobs in a scope that have live cells."""
        return sum(scope.allows(job.project) for job in self._jobs.values())

    def runs(self) -> Iterable[CellRun]:
        """Return the runs of the live cells."""
        return self._runs.values()

    def project_of(self, job_id: str) -> str:
        """Return the project of a job with live cells; empty for any other job."""
        job = self._jobs.get(job_id)
        return "" if job is None else job.project

    def live_by_project(self) -> Counter[str]:
        """Return the numbers of jobs that have live cells, by project."""
        return Counter(job.project for job in self._jobs.values())

    def start(self, job: Job) -> None:
        """Start, or resume, the live cells of a job. While the server drains, they are left to the next server."""
        if self._is_draining:
            return
        self._stages.groups.expect(job)
        for cell in job.cells:
            if cell.state not in model.TERMINAL and cell.id not in self._tasks:
                run = self._runs[cell.id] = CellRun(job, cell)
                task = asyncio.create_task(self._lead(run), name=f"cell-{cell.id}")
                self._tasks[cell.id] = task
                self._jobs[job.id] = job
                self._live[job.id] += 1
                task.add_done_callback(partial(self._forget, job.id, cell.id))

    def _forget(self, job_id: str, cell_id: str, _: asyncio.Task[None]) -> None:
        del self._tasks[cell_id], self._runs[cell_id]
        self._live[job_id] -= 1
        if not self._live[job_id]:
            del self._live[job_id], self._jobs[job_id]

    async def resume(self) -> None:
        """Resume the jobs of an earlier server. Those that servers have died with three times are set aside.

        Call it before agents can connect: an agent that connects earlier would have to stop its attempts, which no cell awaits
        yet.
        """
        for job in await self._journal.live():
            if (damaged := _damage_of(job)) is not None:
                await self._journal.fail(job, damaged)
                continue
            await self._stages.resume(job)
            if self._stages.hands.is_over(job.id):
                await self._set_aside(job)
            else:
                log.info("taking up a job", job=job.id)
                self.start(job)

    async def _set_aside(self, job: Job) -> None:
        """End a job's live cells without reading any of its data."""
        error = set_aside(job.id)
        log.error("a job is set aside", job=job.id, why=error.message)
        for cell in job.cells:
            if cell.state not in model.TERMINAL:
                await self._stages.finish(CellRun(job, cell), model.FAILED, error)

    async def cancel(self, job: Job) -> None:
        """End the job's live cells; return once they are terminal."""
        # A newly created task must take its first step before it is cancelled; otherwise it would not run at all.
        await asyncio.sleep(0)
        tasks = [(cell.id, task) for cell in job.cells if (task := self._tasks.get(cell.id)) is not None]
        for cell_id, task in tasks:
            self._cancelled.add(cell_id)
            task.cancel()
        if tasks:
            await asyncio.wait([task for _, task in tasks])
        self._cancelled.difference_update(cell_id for cell_id, _ in tasks)

    async def drain(self) -> None:
        """Release all cells that wait, start none, and return once those that compile, run or are analyzed do so no longer.

        Cells that begin to wait meanwhile are released, too. They stay in the journal, and a new server resumes them.
        """
        self._is_draining = True
        for cell_id, run in self._runs.items():
            is_suspect = run.cell.state in (model.COMPILING, model.ANALYZING) and self._stages.hands.is_waiting(run.job.id)
            if is_suspect or run.cell.state in (model.QUEUED, model.WAITING):
                self._tasks[cell_id].cancel()
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    def _release_if_draining(self, job_id: str, event: JobEvent) -> None:
        if not self._is_draining or event.WhichOneof("event") != "cell" or event.cell.state != model.WAITING:
            return
        if (task := self._tasks.get(event.cell.id)) is not None:
            task.cancel()

    async def stop(self) -> None:
        """Release all cells. They stay in the journal unchanged, and a new server resumes them."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _lead(self, run: CellRun) -> None:
        """Lead a cell to its end. The end is always written to the journal, unless the server itself ends."""
        to, failure = model.FAILED, None
        structlog.contextvars.bind_contextvars(job=run.job.id, cell=run.cell.id)
        wait_without_limit()
        try:
            await run.lead(self._stages)
            return
        except asyncio.CancelledError:
            if run.cell.id not in self._cancelled or run.is_over:
                raise
            to = model.CANCELLED
        except EtfarmError as error:
            failure = error
            if error.fault is Fault.FARM:
                log.error("a cell failed because of a fault of the farm", cell=run.cell.id, reason=error.reason, error=str(error))
        except Exception as error:
            failure = FarmError(f"etfarm has a bug: {error!r}.", "The server's log has the traceback.")
            log.exception("a cell failed because of a bug", cell=run.cell.id)
        await self._stages.finish(run, to, failure)


def _damage_of(job: Job) -> ValueDamaged | None:
    """Return why a live job, as the journal has it, cannot go on; None if it can."""
    if not job.HasField("spec"):
        return ValueDamaged("the specification", job.id)
    is_damaged = any(cell.error.reason == ValueDamaged.reason for cell in job.cells if cell.state not in model.TERMINAL)
    return ValueDamaged("a cell", job.id) if is_damaged else None
