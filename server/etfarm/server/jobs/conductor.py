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
from etfarm.server.jobs.takeups import CARE_S, HANDLED, IN_SERVER, MOST, STABLE_S, SetAside, Takeups, is_handled
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
        self._held: dict[str, Job] = {}
        """Live jobs that are resumed one at a time."""
        self._careful: asyncio.Task[None] | None = None
        self._is_draining = False
        announcer.on_event(self._release_if_draining)

    @property
    def live(self) -> int:
        """Number of jobs with live cells."""
        return self.count_live(EVERYTHING)

    def count_live(self, scope: Scope) -> int:
        """Return the number of jobs in a scope that have live cells or wait to be resumed."""
        jobs = (*self._jobs.values(), *self._held.values())
        return len({job.id for job in jobs if scope.allows(job.project)})

    def runs(self) -> Iterable[CellRun]:
        """Return the runs of the live cells."""
        return self._runs.values()

    def project_of(self, job_id: str) -> str:
        """Return the project of a job with live cells; empty for any other job."""
        job = self._jobs.get(job_id)
        return "" if job is None else job.project

    def live_by_project(self) -> Counter[str]:
        """Return the numbers of jobs that have live cells or wait to be resumed, by project."""
        return Counter(job.project for job in {**self._held, **self._jobs}.values())

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

    async def resume(self, takeups: Takeups | None = None) -> None:
        """Resume the jobs of an earlier server.

        Call it before agents can connect: an agent that connects earlier would have to stop its attempts, which no cell awaits
        yet.

        Args:
            takeups: counts of recoveries, after a server that did not end cleanly. Jobs that it was handling are resumed one
                after the other in the background; jobs that were being handled for the third time are set aside.
        """
        counts = await takeups.counts() if takeups is not None else {}
        for job in await self._journal.live():
            if (damaged := _damage_of(job)) is not None:
                await self._journal.fail(job, damaged)
                continue
            await self._stages.resume(job)
            if takeups is None or not is_handled(job):
                log.info("taking up a job", job=job.id)
                self.start(job)
            elif counts.get(job.id, 0) + 1 >= MOST:
                await self._set_aside(job)
            else:
                self._held[job.id] = job
        if takeups is not None:
            self._careful = asyncio.create_task(self._take_up(takeups), name="take-up")

    async def _take_up(self, takeups: Takeups) -> None:
        """Resume the held jobs one at a time; clear the counts once the server has run for a while."""
        while self._held:
            job = self._held[next(iter(self._held))]
            await takeups.count(job.id)
            if self._held.pop(job.id, None) is None:
                continue  # cancelled in the meantime
            log.info("resuming a job that was being handled when the server died", job=job.id)
            if await self._comes_to_rest(job):
                await takeups.uncount(job.id)
        await asyncio.sleep(STABLE_S)
        await takeups.clear()

    async def _comes_to_rest(self, job: Job) -> bool:
        """Start a job and let it run alone for a while; return whether the server is done with it until a device is free."""
        states = {cell.id: cell.state for cell in job.cells}
        with self._announcer.subscribe(job.id) as subscription:
            self.start(job)
            try:
                async with asyncio.timeout(CARE_S):
                    while any(state in IN_SERVER for state in states.values()):
                        for event in await subscription.take():
                            if event.WhichOneof("event") == "cell":
                                states[event.cell.id] = event.cell.state
            except TimeoutError:
                return False
        return not any(state in HANDLED for state in states.values())

    async def _set_aside(self, job: Job) -> None:
        """End a job's live cells without reading any of its data."""
        error = SetAside(job.id)
        log.error("a job is set aside", job=job.id, why=error.message)
        for cell in job.cells:
            if cell.state not in model.TERMINAL:
                await self._stages.finish(CellRun(job, cell), model.FAILED, error)

    async def cancel(self, job: Job) -> None:
        """End the job's live cells; return once they are terminal."""
        if (held := self._held.pop(job.id, None)) is not None:
            self.start(held)
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
        self._held.clear()
        for cell_id, run in self._runs.items():
            if run.cell.state in (model.QUEUED, model.WAITING):
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
        tasks = [*self._tasks.values(), *([self._careful] if self._careful is not None else [])]
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
