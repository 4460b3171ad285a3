"""The stages of a cell's run, with the state transitions between them: compile, place and run, analyze, finish."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from typing import Final

import structlog

from etfarm.server.artifacts.s3.waiting import retry_while_away
from etfarm.server.compile.cache import CompilationNotFound
from etfarm.server.compile.compiler import Compiler
from etfarm.server.compile.single_flight import Listener
from etfarm.server.jobs import model
from etfarm.server.jobs.cells.analysis import CellAnalysis
from etfarm.server.jobs.cells.attempts import Attempts, OnDeviceFault
from etfarm.server.jobs.cells.cell_run import CellRun
from etfarm.server.jobs.cells.dispatch import Dispatch
from etfarm.server.jobs.cells.groups import Groups
from etfarm.server.jobs.cells.limits import require_in_time
from etfarm.server.jobs.cells.numerics import NumericsPrograms
from etfarm.server.jobs.cells.progress import CellProgress, PhaseTimer, TurnPhases
from etfarm.server.jobs.cells.requirements import Requirements
from etfarm.server.jobs.cells.results import Results
from etfarm.server.jobs.cells.transitions import CellTransitions, run_to_completion
from etfarm.server.jobs.records.journal import Journal, StaleVersion
from etfarm.server.jobs.records.log import JobLog
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.jobs.takeups import Hands
from etfarm.server.state.engine import retry_until_written
from etfarm.server.workers.measurement_lock import MeasurementLock
from etfarm.v1 import agent_pb2, common_pb2
from etfarm.v1.common_pb2 import Actor, LogSource
from etfarm.v1.job_pb2 import Job, Progress
from etfarm.wire.errors import EtfarmError
from etfarm.wire.status import to_proto

log = structlog.get_logger()

RETRY_S: Final = 5.0
"""Pause in seconds before a failed write of a cell's end is repeated."""


class CellStages:
    """The stages that every `CellRun` is led through. The journal is written at each transition.

    Args:
        measurement_lock: keeps the server quiet while a device on its machine measures.
        hands: the jobs that the server handles.
        clock: returns seconds on a monotonic clock.
    """

    def __init__(
        self,
        journal: Journal,
        joblog: JobLog,
        announcer: Announcer,
        compiler: Compiler,
        requirements: Requirements,
        dispatch: Dispatch,
        results: Results,
        analysis: CellAnalysis,
        measurement_lock: MeasurementLock,
        hands: Hands,
        *,
        now: Callable[[], datetime],
        clock: Callable[[], float],
        new_id: Callable[[], str],
        on_device_fault: OnDeviceFault,
    ) -> None:
        self._journal = journal
        self._joblog = joblog
        self._requirements = requirements
        self._dispatch = dispatch
        self._results = results
        self._analysis = analysis
        self._now = now
        self._new_id = new_id
        self._progress = CellProgress(announcer, now)
        self._timer = PhaseTimer(now, clock)
        self._transitions = CellTransitions(journal, now)
        self._compilation = CellCompilation(compiler, joblog, self._progress, self._timer)
        attempts = Attempts(
            self._transitions, requirements, dispatch, results, joblog, measurement_lock, self._progress, self._timer, hands,
            now=now, on_device_fault=on_device_fault, compile_again=self._compile_again,
        )  # fmt: skip
        self.groups = Groups(attempts.run, lambda run, why: self._progress.announce_phase([run], "WAIT_FOR_OTHERS", why))
        self.hands = hands
        self._turn = asyncio.Lock()

    async def resume(self, job: Job) -> None:
        """Continue the log and the running attempts of a job that an earlier server led."""
        await self._joblog.resume(job.id)
        self._dispatch.rejoin(job, self._progress.announce, self._joblog.add)

    async def compile(self, run: CellRun) -> None:
        """Compile the cell and check that it can run, until it waits for a device. A cell without a device succeeds here."""
        await self._results.wait_for_space(partial(self._progress.announce_phase, [run], "WAIT_FOR_ROOM"))
        await self._take_turn()
        async with self.hands.hold(run.job.id) as turn:
            await self._compile(run, turn)

    async def _compile(self, run: CellRun, turn: Callable[[bool], None]) -> None:
        require_in_time(run.job.spec, self._now())
        if run.cell.state == model.QUEUED:
            await self._transitions.advance([run], model.COMPILING)
        await retry_while_away(partial(self._compilation.compile, run, turn), turn)
        await self._take_turn()
        assert run.compilation is not None
        if run.compilation.HasField("program"):
            await retry_while_away(partial(self._requirements.check_inputs, run), turn)
        if not run.cell.HasField("device_index"):
            await self.finish(run, model.SUCCEEDED)
            return
        await retry_while_away(partial(self._compilation.compile_numerics, run, turn), turn)
        await self._transitions.advance([run], model.WAITING)

    async def _compile_again(self, run: CellRun) -> None:
        """Compile a cell that was compiled before, since its program or compilation is damaged or lost where it is stored."""
        self._joblog.add(
            run.job.id, run.cell.id, common_pb2.LogSource.LOG_SOURCE_FARM,
            "compiled again: the farm has lost the program, or what its device needs with it",
        )  # fmt: skip
        async with self.hands.hold(run.job.id) as turn:
            await retry_while_away(partial(self._compilation.compile, run, turn), turn)
            if run.numerics is not None:
                await retry_while_away(partial(self._compilation.compile_numerics, run, turn), turn)

    async def recover(self, run: CellRun) -> None:
        """Load the compilation of a cell that an earlier server compiled, or compile again what the database has lost of it."""
        await self._take_turn()
        try:
            await self._compilation.recover(run)
        except CompilationNotFound:  # it is damaged in the database
            await self._compile_again(run)
            await self._compilation.recover(run)

    async def place_and_run(self, run: CellRun) -> None:
        """Place the cell on a device and run it there once, together with all cells that share the attempt."""
        await self.groups.attempt(run)

    def leave(self, run: CellRun) -> None:
        """Release the cells that wait for this one before their next attempt."""
        self.groups.leave(run.cell.id)

    async def analyze(self, run: CellRun) -> None:
        """Analyze the result and write the report of a cell that succeeded."""
        async with self.hands.hold(run.job.id) as turn:
            await self._analyze(run, turn)

    async def _analyze(self, run: CellRun, turn: Callable[[bool], None]) -> None:
        results = await self._results_of_attempt(run)
        if run.result is None:  # an earlier server received the result
            run.result = results[run.cell.id]
            run.device = self._dispatch.device_of(run.cell)
        self._progress.announce_phase([run], "ANALYZE")
        with TurnPhases(run, "ANALYZE", self._timer, self._progress, on_turn=turn) as phases:
            analyze = partial(self._analysis.analyze, run, results, phases.turn)
            run.analysis = await retry_until_written(partial(retry_while_away, analyze, turn))
        measured = self._analysis.report(run, run.cell, "", at=self._now())
        run.earlier = await self._journal.reports.find_earlier(run.job.project, measured)
        phases.end()
        await self.finish(run, model.SUCCEEDED)

    async def _results_of_attempt(self, run: CellRun) -> Mapping[str, agent_pb2.CandidateResult]:
        """Return the results of all cells that shared the last attempt, from the journal where this server does not know them."""
        if run.result is not None and not run.job.spec.measurement.interleave:
            return {run.cell.id: run.result}
        return await self._journal.results_of(run.cell.attempts[-1].id)

    async def finish(self, run: CellRun, to: common_pb2.CellState.ValueType, error: EtfarmError | None = None) -> None:
        """Write the last change of a cell with its report. Failed writes, for example on a full disk, are repeated."""
        while not run.is_over:
            try:
                await run_to_completion(self._finish(run, to, error))
            except (StaleVersion, model.IllegalTransition):
                raise
            except Exception:
                log.exception("a cell's end could not be written, trying again", cell=run.cell.id, seconds=RETRY_S)
                await asyncio.sleep(RETRY_S)

    async def _finish(self, run: CellRun, to: common_pb2.CellState.ValueType, error: EtfarmError | None) -> None:
        await self._take_turn()
        async with run.writing:
            after = model.advance(run.cell, to, at=self._now())
            if error is not None:
                after.error.CopyFrom(to_proto(error))
            elif to == model.CANCELLED:
                after.error.CopyFrom(
                    common_pb2.Error(fault=common_pb2.Fault.FAULT_USER, reason="CANCELLED", message="The job was cancelled.")
                )
            self._dispatch.abandon(after, "the cell is over")
            after.report_id = self._new_id()
            report = self._analysis.report(run, after, after.report_id, at=self._now())
            model.copy_result(report, after)
            await self._joblog.flush()
            await self._transitions.write(run, after, report)
            self._dispatch.end(after)

    async def _take_turn(self) -> None:
        """Wait until no other cell continues in this event loop iteration: thousands may have waited for the same event."""
        async with self._turn:
            await asyncio.sleep(0)


class CellCompilation:
    """Compilation of cells, or loading of an earlier server's compilations."""

    def __init__(self, compiler: Compiler, joblog: JobLog, progress: CellProgress, timer: PhaseTimer) -> None:
        self._compiler = compiler
        self._numerics = NumericsPrograms(compiler)
        self._joblog = joblog
        self._progress = progress
        self._timer = timer

    async def compile(self, run: CellRun, on_turn: Callable[[bool], None]) -> None:
        """Compile the cell's candidate and set `run.compilation`.

        Args:
            on_turn: called with False when that begins to wait for its turn, and with True when it goes on.

        Raises:
            EtfarmError: the candidate cannot be compiled.
        """
        job, cell = run.job, run.cell
        if not cell.timeline:
            _add_client_stages(run)
        with TurnPhases(run, "COMPILE", self._timer, self._progress, on_turn=on_turn) as phases:
            outcome = await self._compiler.compile(
                run.candidate,
                owner=job.owner,
                project=job.project,
                fresh=job.spec.no_cache,
                stop_after=job.spec.stop_after,
                listener=self._listener(run, phases),
            )
        run.compilation = compilation = outcome.compilation
        cell.compilation_key, cell.compile_cached = compilation.key, outcome.cached
        phases.end()
        if outcome.error is not None:
            raise outcome.error
        if compilation.HasField("program"):
            cell.program.CopyFrom(compilation.program)
        if compilation.HasField("etrecord"):
            cell.etrecord.CopyFrom(compilation.etrecord)

    async def compile_numerics(self, run: CellRun, on_turn: Callable[[bool], None]) -> None:
        """Compile the program of the numerics pass, if the job has one and the program differs from the cell's; see `compile`."""
        if not run.job.spec.measurement.numerics:
            return
        with TurnPhases(run, "COMPILE_NUMERICS", self._timer, self._progress, on_turn=on_turn) as phases:
            await self._numerics.compile(run, self._listener(run, phases, "NUMERICS_"))
        if run.cell.numerics_compilation_key:
            phases.end()

    async def recover(self, run: CellRun) -> None:
        """Load the compilations of a cell that an earlier server compiled."""
        run.compilation = await self._compiler.get(run.cell.compilation_key)
        await self._numerics.recover(run)

    def _listener(self, run: CellRun, phases: TurnPhases, prefix: str = "") -> Listener:
        """Return a listener that announces the stages with a prefix, and logs printed lines."""
        job, cell_id = run.job, run.cell.id

        def on_stage(stage: str, duration_ms: float | None, *, cached: bool = False) -> None:
            progress = Progress(cell_id=cell_id, actor=Actor.ACTOR_SERVER, phase=f"{prefix}{stage}", duration_ms=duration_ms)
            progress.message = "from an earlier compilation" if cached else ""
            self._progress.announce(job.id, progress)

        def on_log(line: str) -> None:
            self._joblog.add(job.id, cell_id, LogSource.LOG_SOURCE_COMPILE, line)

        return Listener(on_stage, on_log, phases.turn)


def _add_client_stages(run: CellRun) -> None:
    stages = run.candidate.stages_done
    start_ms = -sum(stage.duration_ms for stage in stages)
    for stage in stages:
        run.cell.timeline.add(actor=common_pb2.ACTOR_CLIENT, phase=stage.stage, start_ms=start_ms, duration_ms=stage.duration_ms)
        start_ms += stage.duration_ms
