"""Programs of the numerics pass: their operators can be distinguished, unlike those of the timed program.

No error here fails a cell: its measurements remain valid, and a warning in the report says why there is no numeric gap.
"""

from __future__ import annotations

from typing import Final

from etfarm.server.compile.cache import CompilationNotFound
from etfarm.server.compile.compiler import Compiler
from etfarm.server.compile.parsed_recipes import parse_recipe
from etfarm.server.compile.single_flight import Listener
from etfarm.server.jobs.cells.cell_run import CellRun
from etfarm.v1 import compile_pb2, job_pb2
from etfarm.wire.errors import EtfarmError
from etfarm.wire.status import from_proto

NOT_COMPILED: Final = "NUMERICS_NOT_COMPILED"
"""Code of the warning that there is no numerics program."""


def candidate_of(candidate: job_pb2.Candidate) -> job_pb2.Candidate | None:
    """Return the candidate of the numerics program: a copy with `Recipe.per_operator`.

    None if that is already the candidate's recipe, so that its own program serves.
    """
    recipe = parse_recipe(candidate.recipe)
    separate = recipe.per_operator()
    if separate == recipe:
        return None
    numerics = job_pb2.Candidate()
    numerics.CopyFrom(candidate)
    numerics.recipe = separate.json
    return numerics


class NumericsPrograms:
    """The numerics programs of cells: sets `CellRun.numerics`, or adds to `CellRun.warnings`."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler

    async def compile(self, run: CellRun, listener: Listener) -> None:
        """Compile the program if it differs from the cell's own. The cell's `numerics_compilation_key` is set even on failure."""
        job, cell = run.job, run.cell
        if not self._is_wanted(run):
            return
        separate = candidate_of(run.candidate)
        if separate is None:
            self._take(run, run.compilation)
            return
        try:
            # Even with --no-cache, lower the QUANTIZE result of the timed program: other scales would make another model.
            outcome = await self._compiler.compile(
                separate, owner=job.owner, project=job.project, fresh=job.spec.no_cache, quantize_again=False, listener=listener
            )
        except EtfarmError as error:
            _warn(run, str(error))
            return
        cell.numerics_compilation_key = outcome.compilation.key
        self._take(run, outcome.compilation)

    async def recover(self, run: CellRun) -> None:
        """Load the program of a cell that an earlier server compiled."""
        if not self._is_wanted(run):
            return
        if candidate_of(run.candidate) is None:
            self._take(run, run.compilation)
            return
        try:
            self._take(run, await self._compiler.get(run.cell.numerics_compilation_key))
        except CompilationNotFound:
            _warn(run, "It failed on an earlier version of the server, which did not store the reason.")

    def _is_wanted(self, run: CellRun) -> bool:
        if not run.job.spec.measurement.numerics:
            return False
        if run.cell.method not in run.candidate.model.methods:
            _warn(run, f"{run.cell.method} is a constant method: it has no operators.")
            return False
        compilation = run.compilation
        if run.cell.method not in run.job.spec.inputs and compilation and run.cell.method not in compilation.example_inputs:
            _warn(
                run,
                "The model has no example inputs, and the host does not know the inputs that a runner generates. Give --inputs.",
            )
            return False
        return True

    def _take(self, run: CellRun, compilation: compile_pb2.Compilation | None) -> None:
        assert compilation is not None
        if compilation.HasField("error"):
            _warn(run, str(from_proto(compilation.error)))
        elif not compilation.HasField("etrecord"):
            _warn(run, "It was uploaded without an ETRecord, which lists its operators.")
        else:
            run.numerics = compilation


def _warn(run: CellRun, why: str) -> None:
    message = f"There is no program to compare operators with: {why}"
    run.warnings.append(compile_pb2.Warning(code=NOT_COMPILED, message=message))
