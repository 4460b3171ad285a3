"""The stage that compiles a cell, including the second program of jobs with --numerics."""

from __future__ import annotations

from collections.abc import Callable

from etfarm.server.compile.compiler import Compiler
from etfarm.server.compile.single_flight import Listener
from etfarm.server.jobs.cells.cell_run import CellRun
from etfarm.server.jobs.cells.numerics import NumericsPrograms
from etfarm.server.jobs.cells.progress import CellProgress, PhaseTimer, TurnPhases
from etfarm.server.jobs.records.log import JobLog
from etfarm.v1 import common_pb2
from etfarm.v1.common_pb2 import Actor, LogSource
from etfarm.v1.job_pb2 import Progress


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
