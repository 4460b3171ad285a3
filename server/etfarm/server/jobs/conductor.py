"""Leads every cell through its states: compile, place, run, analyze. One task a cell; the journal is written at each step.

A server that starts again takes every live cell up in the state that the journal has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import structlog

from etfarm.server.compile.compiler import Compiler
from etfarm.server.jobs import model
from etfarm.server.jobs.execution import Execution
from etfarm.server.jobs.journal import Journal, StaleVersion
from etfarm.server.jobs.log import JobLog
from etfarm.server.jobs.watch import Announcer
from etfarm.server.reports.analyst import Analyst
from etfarm.server.reports.assembly import assemble, since
from etfarm.server.reports.verdict import Thresholds
from etfarm.server.workers.quiet import Quiet
from etfarm.v1 import agent_pb2, common_pb2, compile_pb2, job_pb2, report_pb2
from etfarm.v1.device_pb2 import Device
from etfarm.v1.job_pb2 import Cell, Job, JobEvent, Progress
from etfarm.wire.errors import EtfarmError, FarmError, Fault
from etfarm.wire.status import from_proto, to_proto

log = structlog.get_logger()

T = TypeVar("T")

MAX_ATTEMPTS = 3
"""Attempts of a cell: the first, and two more after device faults."""

AGAIN_S = 5.0
"""Pause before a cell's end is written again where it could not be."""


@dataclass
class Way:
    """A cell on its way and what it has gathered; what the report is made from."""

    job: Job
    cell: Cell
    compilation: compile_pb2.Compilation | None = None
    device: Device | None = None
    sent_ms: float = 0.0
    """When the last attempt was sent, in milliseconds after the submission."""
    result: agent_pb2.CandidateResult | None = None
    analysis: report_pb2.Report | None = None


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
        quiet: Quiet,
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
        self._execution = execution
        self._analyst = analyst
        self._quiet = quiet
        self._thresholds = thresholds
        self._now = now
        self._clock = clock
        self._new_id = new_id
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._jobs: dict[str, str] = {}
        self._cancelled: set[str] = set()

    @property
    def live(self) -> int:
        """Jobs with cells on their way."""
        return len(set(self._jobs.values()))

    def start(self, job: Job) -> None:
        """Begins, or goes on, with the live cells of a job."""
        for cell in job.cells:
            if cell.state not in model.TERMINAL and cell.id not in self._tasks:
                task = asyncio.create_task(self._lead(Way(job, cell)), name=f"cell-{cell.id}")
                self._tasks[cell.id] = task
                self._jobs[cell.id] = job.id
                task.add_done_callback(partial(self._forget, cell.id))

    def _forget(self, cell_id: str, _: asyncio.Task[None]) -> None:
        del self._tasks[cell_id], self._jobs[cell_id]

    async def resume(self) -> None:
        """Takes up what an earlier server left. Call it before agents can connect: one that came first would be told to
        stop what it runs, since nobody would wait for it yet."""
        for job in await self._journal.live():
            await self._joblog.resume(job.id)
            log.info("taking up a job", job=job.id)
            for cell in job.cells:
                if cell.state == model.RUNNING:
                    self._execution.rejoin(job, cell, self.progress, self._joblog.add)
            self.start(job)

    async def cancel(self, job: Job) -> None:
        """Ends the job's live cells; returns when they are terminal."""
        # A task that was made in this very moment has its first step before it is cancelled, else it would just vanish.
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
        tasks = list(self._tasks.values())
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
        if way.cell.state in (model.QUEUED, model.COMPILING):
            await self._compile(way)
        else:
            way.compilation = await self._compiler.get(way.cell.compilation_key)
        assert way.compilation is not None
        if way.cell.state == model.COMPILING:
            await self._execution.check_inputs(way.job, way.cell, way.compilation)
            if not way.cell.HasField("device_index"):
                await self._finish(way, model.SUCCEEDED)
                return
            await self._advance(way, model.WAITING)
        while way.cell.state in (model.WAITING, model.RUNNING):
            await self._attempt(way)
        await self._analyze(way)

    async def _compile(self, way: Way) -> None:
        if way.cell.state == model.QUEUED:
            await self._advance(way, model.COMPILING)
        job, cell = way.job, way.cell
        candidate = model.candidate_of(job, cell)
        if not cell.timeline:
            self._add_client_stages(cell, candidate)
        started_ms, started = since(job, self._now()), self._clock()

        def on_stage(stage: str, duration_ms: float | None) -> None:
            self.progress(job.id, Progress(cell_id=cell.id, actor="SERVER", phase=stage, duration_ms=duration_ms))

        compilation, cached = await self._compiler.compile(
            candidate, owner=job.owner, fresh=job.spec.no_cache, on_stage=on_stage,
            on_log=lambda line: self._joblog.add(job.id, cell.id, "COMPILE", line),
        )  # fmt: skip
        way.compilation = compilation
        cell.compilation_key, cell.compile_cached = compilation.key, cached
        cell.program.CopyFrom(compilation.program)
        if compilation.HasField("etrecord"):
            cell.etrecord.CopyFrom(compilation.etrecord)
        self._time(cell, "SERVER", "COMPILE", started_ms, started)

    async def _attempt(self, way: Way) -> None:
        """One placement: to ANALYZING with a result, or back to WAITING after a device fault."""
        is_new = way.cell.state == model.WAITING
        if is_new:
            await self._place(way)
        else:
            way.device = self._execution.device_of(way.cell)
        try:
            async with self._quiet_for(way):
                if is_new:
                    await self._send(way)
                error = await self._receive(way)
        except EtfarmError as raised:
            error = raised
        attempt = way.cell.attempts[-1]
        attempt.finished_at.FromDatetime(self._now())
        if error is None:
            await self._advance(way, model.ANALYZING)
            self._execution.end(way.cell)
            return
        attempt.error.CopyFrom(to_proto(error))
        if error.fault is not Fault.DEVICE or len(way.cell.attempts) >= MAX_ATTEMPTS:
            raise error
        log.warning("placing a cell again", cell=way.cell.id, device=attempt.device_id, error=str(error))
        self._joblog.add(way.job.id, way.cell.id, "FARM", f"placed again after a device fault: {error}")
        await self._advance(way, model.WAITING)
        self._execution.end(way.cell)

    async def _place(self, way: Way) -> None:
        job = way.job
        assert way.compilation is not None
        start_ms, started = since(job, self._now()), self._clock()
        # What an earlier attempt gave is not this one's.
        way.result, way.sent_ms = None, 0.0
        way.cell.ClearField("outputs")
        way.device, attempt = await self._execution.place(job, way.cell, way.compilation, self.progress, self._joblog.add)
        attempt.started_at.FromDatetime(self._now())
        self._time(way.cell, "SERVER", "WAIT_FOR_DEVICE", start_ms, started)
        way.cell.attempts.append(attempt)
        await self._advance(way, model.RUNNING)

    @asynccontextmanager
    async def _quiet_for(self, way: Way) -> AsyncIterator[None]:
        """Nothing else works on this machine while a device on it measures."""
        assert way.device is not None
        if not (way.job.spec.HasField("measurement") and self._execution.is_on_this_machine(way.device)):
            yield
            return
        self.progress(way.job.id, Progress(cell_id=way.cell.id, actor="SERVER", phase="WAIT_FOR_QUIET"))
        start_ms, started = since(way.job, self._now()), self._clock()
        async with self._quiet.measure():
            self._time(way.cell, "SERVER", "WAIT_FOR_QUIET", start_ms, started)
            yield

    async def _send(self, way: Way) -> None:
        cell, job = way.cell, way.job
        assert way.compilation is not None and way.device is not None
        if starting := self._execution.starting:
            self.progress(job.id, Progress(cell_id=cell.id, actor="SERVER", phase="BUNDLE", message=starting))
        await self._execution.start(job, cell, way.device, way.compilation)
        way.sent_ms = since(job, self._now())

    async def _receive(self, way: Way) -> EtfarmError | None:
        """Fills way.result; gives the error that the device reports of the cell."""
        cell = way.cell
        way.result = await self._execution.result(way.job, cell)
        # An attempt that an earlier server sent: its placing is the nearest that is known.
        sent_ms = way.sent_ms or since(way.job, cell.attempts[-1].started_at.ToDatetime(UTC))
        for phase in way.result.phases:
            begun_ms = sent_ms + phase.start_ms
            cell.timeline.add(actor="DEVICE", phase=phase.phase, start_ms=begun_ms, duration_ms=phase.duration_ms)
        if way.result.HasField("outputs"):
            cell.outputs.CopyFrom(way.result.outputs)
        return from_proto(way.result.error) if way.result.HasField("error") else None

    async def _analyze(self, way: Way) -> None:
        job, cell = way.job, way.cell
        assert way.compilation is not None
        if way.result is None:
            way.result = await self._journal.result_of(cell.attempts[-1].id)
            way.device = self._execution.device_of(cell)
        started_ms, started = since(job, self._now()), self._clock()
        self.progress(job.id, Progress(cell_id=cell.id, actor="SERVER", phase="ANALYZE"))
        way.analysis = await self._analyst.analyze(
            model.candidate_of(job, cell), way.compilation, cell.method,
            self._execution.inputs_of(job, cell, way.compilation), way.result,
            lambda line: self._joblog.add(job.id, cell.id, "ANALYSIS", line),
        )  # fmt: skip
        self._time(cell, "SERVER", "ANALYZE", started_ms, started)
        await self._finish(way, model.SUCCEEDED)

    async def _advance(self, way: Way, to: job_pb2.CellState.ValueType) -> None:
        after = model.advance(way.cell, to, at=self._now())
        await _to_the_end(self._change(way, after))

    async def _change(self, way: Way, after: Cell, report: report_pb2.Report | None = None) -> None:
        has_result = way.result is not None and after.attempts and after.attempts[-1].HasField("finished_at")
        way.cell = await self._journal.change(after, report=report, result=way.result if has_result else None)

    async def _finish(self, way: Way, to: job_pb2.CellState.ValueType, error: EtfarmError | None = None) -> None:
        """The last change of a cell, with its report. What cannot be written now, for a full disk say, is tried again."""
        while way.cell.state not in model.TERMINAL:
            try:
                await _to_the_end(self._end(way, to, error))
            except (StaleVersion, model.IllegalTransition):
                raise
            except Exception:
                log.exception("a cell's end could not be written, trying again", cell=way.cell.id, seconds=AGAIN_S)
                await asyncio.sleep(AGAIN_S)

    async def _end(self, way: Way, to: job_pb2.CellState.ValueType, error: EtfarmError | None) -> None:
        after = model.advance(way.cell, to, at=self._now())
        if error is not None:
            after.error.CopyFrom(to_proto(error))
        elif to == model.CANCELLED:
            after.error.CopyFrom(
                common_pb2.Error(fault=common_pb2.Fault.FAULT_USER, reason="CANCELLED", message="The job was cancelled.")
            )
        self._execution.abandon(after, "the cell is over")
        after.report_id = self._new_id()
        report = assemble(
            after.report_id, way.job, after, at=self._now(), compilation=way.compilation, device=way.device, result=way.result,
            analysis=way.analysis, thresholds=self._thresholds,
        )  # fmt: skip
        await self._joblog.flush()
        await self._change(way, after, report)
        self._execution.end(after)

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


async def _to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, which runs to its end even if the caller is cancelled meanwhile: a write that was begun is finished,
    so that the cell in memory and its row agree."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
