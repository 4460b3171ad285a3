"""Leads every cell through its states: compile, place, run, analyze. One task a cell; the journal is written at each step.

A server that starts again takes every live cell up in the state that the journal has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from functools import partial

import structlog

from etfarm.server.access.scope import EVERYTHING, Scope
from etfarm.server.compile.compiler import Compiler
from etfarm.server.compile.single_flight import Listener
from etfarm.server.jobs import model
from etfarm.server.jobs.cells.attempts import Attempts
from etfarm.server.jobs.cells.cell_run import Steps, Way, to_the_end
from etfarm.server.jobs.cells.execution import Execution
from etfarm.server.jobs.cells.groups import Groups, base_of
from etfarm.server.jobs.cells.numerics import NumericsPrograms
from etfarm.server.jobs.records.journal import Journal, StaleVersion
from etfarm.server.jobs.records.log import JobLog
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.jobs.takeups import CARE_S, HANDLED, IN_SERVER, MOST, STABLE_S, SetAside, Takeups, is_handled
from etfarm.server.reports.analyst import Analyst
from etfarm.server.reports.assembly import assemble, since
from etfarm.server.reports.verdict import Thresholds
from etfarm.server.state.engine import retry_when_full
from etfarm.server.workers.measurement_lock import MeasurementLock
from etfarm.v1 import common_pb2, job_pb2
from etfarm.v1.job_pb2 import Cell, Job, JobEvent, Progress
from etfarm.wire.errors import EtfarmError, FarmError, Fault
from etfarm.wire.status import to_proto

log = structlog.get_logger()

AGAIN_S = 5.0
"""Pause before a cell's end is written again where it could not be."""


class Conductor:
    """Owns the tasks of all live cells."""

    def __init__(
        self,
        journal: Journal,
        joblog: JobLog,
        announcer: Announcer,
        compiler: Compiler,
        execution: Execution,
        analyst: Analyst,
        quiet: MeasurementLock,
        *,
        thresholds: Thresholds,
        now: Callable[[], datetime],
        clock: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self._journal = journal
        self._joblog = joblog
        self._announcer = announcer
        self._compiler = compiler
        self._numerics = NumericsPrograms(compiler)
        self._execution = execution
        self._analyst = analyst
        self._steps = Steps(journal, now)
        attempts = Attempts(self._steps, execution, joblog, quiet, self.progress, now=now, clock=clock)
        self._groups = Groups(attempts.run, self._waits_for_others)
        self._thresholds = thresholds
        self._now = now
        self._clock = clock
        self._new_id = new_id
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._jobs: dict[str, tuple[str, str]] = {}
        """By cell on its way, its job's id and project."""
        self._cancelled: set[str] = set()
        self._held: dict[str, Job] = {}
        """Live jobs whose turn to be taken up has not come."""
        self._careful: asyncio.Task[None] | None = None

    @property
    def live(self) -> int:
        """Jobs with cells on their way."""
        return self.count_live(EVERYTHING)

    def count_live(self, scope: Scope) -> int:
        """Return how many jobs of a scope have cells on their way, or wait to be taken up."""
        live = {job_id for job_id, project in self._jobs.values() if scope.allows(project)}
        return len(live | {job.id for job in self._held.values() if scope.allows(job.project)})

    def start(self, job: Job) -> None:
        """Begins, or goes on, with the live cells of a job."""
        self._groups.expect(job)
        for cell in job.cells:
            if cell.state not in model.TERMINAL and cell.id not in self._tasks:
                task = asyncio.create_task(self._lead(Way(job, cell)), name=f"cell-{cell.id}")
                self._tasks[cell.id] = task
                self._jobs[cell.id] = job.id, job.project
                task.add_done_callback(partial(self._forget, cell.id))

    def _forget(self, cell_id: str, _: asyncio.Task[None]) -> None:
        del self._tasks[cell_id], self._jobs[cell_id]

    async def resume(self, takeups: Takeups | None = None) -> None:
        """Takes up what an earlier server left. Call it before agents can connect: one that came first would be told to
        stop what it runs, since nobody would wait for it yet.

        Args:
            takeups: counts jobs, after a server that did not end cleanly: those that it was handling are taken up one after
                the other, in the background, and those that were at the third time are set aside.
        """
        counts = await takeups.counts() if takeups is not None else {}
        for job in await self._journal.live():
            await self._joblog.resume(job.id)
            self._execution.rejoin(job, self.progress, self._joblog.add)
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
        """Takes the held jobs up one at a time; then clears the counts, once the server has lived for a while."""
        while self._held:
            job = self._held[next(iter(self._held))]
            await takeups.count(job.id)
            if self._held.pop(job.id, None) is None:
                continue  # it was cancelled meanwhile
            log.info("taking up a job with care", job=job.id)
            if await self._comes_to_rest(job):
                await takeups.uncount(job.id)
        await asyncio.sleep(STABLE_S)
        await takeups.clear()

    async def _comes_to_rest(self, job: Job) -> bool:
        """Start a job, alone for a while; return whether the server has nothing more to do for it until a device is free."""
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
        """Ends a job's live cells without a look at anything that belongs to it."""
        error = SetAside(job.id)
        log.error("a job is set aside", job=job.id, why=error.message)
        for cell in job.cells:
            if cell.state not in model.TERMINAL:
                await self._finish(Way(job, cell), model.FAILED, error)

    async def cancel(self, job: Job) -> None:
        """Ends the job's live cells; returns when they are terminal."""
        # A task that was made in this very moment has its first step before it is cancelled, else it would just vanish.
        if (held := self._held.pop(job.id, None)) is not None:
            self.start(held)
        await asyncio.sleep(0)
        tasks = [(cell.id, task) for cell in job.cells if (task := self._tasks.get(cell.id)) is not None]
        for cell_id, task in tasks:
            self._cancelled.add(cell_id)
            task.cancel()
        if tasks:
            await asyncio.wait([task for _, task in tasks])
        self._cancelled.difference_update(cell_id for cell_id, _ in tasks)

    async def stop(self) -> None:
        """Lets go of all cells; they stay in the journal as they are, and a new server goes on with them."""
        tasks = [*self._tasks.values(), *([self._careful] if self._careful is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _lead(self, way: Way) -> None:
        """A cell's whole way. Whatever happens on it, the cell ends in the journal, unless the server itself ends."""
        to, failure = model.FAILED, None
        try:
            await self._walk(way)
            return
        except asyncio.CancelledError:
            if way.cell.id not in self._cancelled or way.cell.state in model.TERMINAL:
                raise
            to = model.CANCELLED
        except EtfarmError as error:
            failure = error
            if error.fault is Fault.FARM:
                log.error("a cell failed by the farm's fault", cell=way.cell.id, reason=error.reason, error=str(error))
        except Exception as error:
            failure = FarmError(f"etfarm has a bug: {error!r}.", "The server's log has the traceback.")
            log.exception("a cell failed by a bug", cell=way.cell.id)
        await self._finish(way, to, failure)

    async def _walk(self, way: Way) -> None:
        try:
            if way.cell.state in (model.QUEUED, model.COMPILING):
                await self._compile(way)
            else:
                way.compilation = await self._compiler.get(way.cell.compilation_key)
                await self._numerics.recover(way)
            assert way.compilation is not None
            if way.cell.state == model.COMPILING:
                if way.compilation.HasField("program"):
                    await self._execution.check_inputs(way.job, way.cell, way.compilation)
                if not way.cell.HasField("device_index"):
                    await self._finish(way, model.SUCCEEDED)
                    return
                await self._compile_numerics(way)
                await self._steps.advance([way], model.WAITING)
            while way.cell.state in (model.WAITING, model.RUNNING):
                await self._groups.attempt(way)
        finally:
            self._groups.leave(way.cell.id)
        await self._analyze(way)

    async def _compile(self, way: Way) -> None:
        if way.cell.state == model.QUEUED:
            await self._steps.advance([way], model.COMPILING)
        job, cell = way.job, way.cell
        candidate = model.candidate_of(job, cell)
        if not cell.timeline:
            self._add_client_stages(cell, candidate)
        started_ms, started = since(job, self._now()), self._clock()
        outcome = await self._compiler.compile(
            candidate, owner=job.owner, project=job.project, fresh=job.spec.no_cache, stop_after=job.spec.stop_after,
            listener=self._listener(way),
        )  # fmt: skip
        way.compilation = compilation = outcome.made
        cell.compilation_key, cell.compile_cached = compilation.key, outcome.cached
        self._time(cell, "SERVER", "COMPILE", started_ms, started)
        if outcome.error is not None:
            raise outcome.error
        if compilation.HasField("program"):
            cell.program.CopyFrom(compilation.program)
        if compilation.HasField("etrecord"):
            cell.etrecord.CopyFrom(compilation.etrecord)

    async def _compile_numerics(self, way: Way) -> None:
        if not way.job.spec.measurement.numerics:
            return
        started_ms, started = since(way.job, self._now()), self._clock()
        await self._numerics.compile(way, self._listener(way, "NUMERICS_"))
        if way.cell.numerics_compilation_key:
            self._time(way.cell, "SERVER", "COMPILE_NUMERICS", started_ms, started)

    def _listener(self, way: Way, before: str = "") -> Listener:
        """Tells the watchers of a compilation's stages, with `before` before their names, and the log what is printed."""
        job, cell_id = way.job, way.cell.id

        def on_stage(stage: str, duration_ms: float | None, *, cached: bool = False) -> None:
            said = Progress(cell_id=cell_id, actor="SERVER", phase=f"{before}{stage}", duration_ms=duration_ms)
            said.message = "from an earlier compilation" if cached else ""
            self.progress(job.id, said)

        return Listener(on_stage, lambda line: self._joblog.add(job.id, cell_id, "COMPILE", line))

    async def _analyze(self, way: Way) -> None:
        job, cell = way.job, way.cell
        assert way.compilation is not None
        results = await self._journal.results_of(cell.attempts[-1].id)
        if way.result is None:
            way.result = results[cell.id]
            way.device = self._execution.device_of(cell)
        started_ms, started = since(job, self._now()), self._clock()
        self.progress(job.id, Progress(cell_id=cell.id, actor="SERVER", phase="ANALYZE"))
        analyze = partial(
            self._analyst.analyze, model.candidate_of(job, cell), way.compilation, cell.method,
            self._execution.inputs_of(job, cell, way.compilation), way.result,
            lambda line: self._joblog.add(job.id, cell.id, "ANALYSIS", line), base=base_of(cell.id, results),
            numerics=way.numerics, fresh=job.spec.no_cache, project=job.project,
        )  # fmt: skip
        way.analysis = await retry_when_full(analyze)
        self._time(cell, "SERVER", "ANALYZE", started_ms, started)
        await self._finish(way, model.SUCCEEDED)

    async def _finish(self, way: Way, to: job_pb2.CellState.ValueType, error: EtfarmError | None = None) -> None:
        """The last change of a cell, with its report. What cannot be written now, for a full disk say, is tried again."""
        while way.cell.state not in model.TERMINAL:
            try:
                await to_the_end(self._end(way, to, error))
            except (StaleVersion, model.IllegalTransition):
                raise
            except Exception:
                log.exception("a cell's end could not be written, trying again", cell=way.cell.id, seconds=AGAIN_S)
                await asyncio.sleep(AGAIN_S)

    async def _end(self, way: Way, to: job_pb2.CellState.ValueType, error: EtfarmError | None) -> None:
        async with way.writing:
            after = model.advance(way.cell, to, at=self._now())
            if error is not None:
                after.error.CopyFrom(to_proto(error))
            elif to == model.CANCELLED:
                after.error.CopyFrom(
                    common_pb2.Error(fault=common_pb2.Fault.FAULT_USER, reason="CANCELLED", message="The job was cancelled.")
                )
            self._execution.abandon(after, "the cell is over")
            after.report_id = self._new_id()
            inputs = self._execution.inputs_of(way.job, after, way.compilation) if way.compilation else None
            report = assemble(
                after.report_id, way.job, after, at=self._now(), compilation=way.compilation, device=way.device,
                result=way.result, analysis=way.analysis, thresholds=self._thresholds, numerics=way.numerics,
                inputs=inputs, warnings=way.warnings,
            )  # fmt: skip
            await self._joblog.flush()
            await self._steps.write(way, after, report)
            self._execution.end(after)

    def _waits_for_others(self, way: Way, why: str) -> None:
        self.progress(way.job.id, Progress(cell_id=way.cell.id, actor="SERVER", phase="WAIT_FOR_OTHERS", message=why))

    def progress(self, job_id: str, progress: Progress) -> None:
        """Tells the watchers what a cell is doing."""
        event = JobEvent(progress=progress)
        event.at.FromDatetime(self._now())
        self._announcer.announce(job_id, event)

    def _time(self, cell: Cell, actor: str, phase: str, start_ms: float, started: float) -> None:
        cell.timeline.add(actor=actor, phase=phase, start_ms=start_ms, duration_ms=(self._clock() - started) * 1e3)

    def _add_client_stages(self, cell: Cell, candidate: job_pb2.Candidate) -> None:
        before_ms = -sum(stage.duration_ms for stage in candidate.stages_done)
        for stage in candidate.stages_done:
            cell.timeline.add(actor="CLIENT", phase=stage.stage, start_ms=before_ms, duration_ms=stage.duration_ms)
            before_ms += stage.duration_ms
