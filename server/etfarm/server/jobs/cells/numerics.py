"""Step 4 of --numerics: the program whose operators can be told apart, beside the one that is timed.

Nothing that goes wrong here fails a cell: the numbers stand, and a warning of the report says why there is no numeric gap.
"""

from __future__ import annotations

from typing import Final

from etfarm.server.compile.cache import CompilationNotFound
from etfarm.server.compile.compiler import Compiler
from etfarm.server.compile.parsed_recipes import parse_recipe
from etfarm.server.compile.single_flight import Listener
from etfarm.server.jobs import model
from etfarm.server.jobs.cells.cell_run import Way
from etfarm.v1 import compile_pb2, job_pb2
from etfarm.wire.errors import EtfarmError
from etfarm.wire.status import from_proto

NOT_COMPILED: Final = "NUMERICS_NOT_COMPILED"
"""The warning's code."""


def candidate_of(candidate: job_pb2.Candidate) -> job_pb2.Candidate | None:
    """What the numerics program is compiled from: the candidate by `Recipe.per_operator`; None where that is the candidate's
    own recipe, and so its own program."""
    recipe = parse_recipe(candidate.recipe)
    separate = recipe.per_operator()
    if separate == recipe:
        return None
    made = job_pb2.Candidate()
    made.CopyFrom(candidate)
    made.recipe = separate.json
    return made


class NumericsPrograms:
    """Gives cells of jobs with --numerics what their numerics pass runs: `Way.numerics`, or a warning in `Way.warnings`."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler

    async def compile(self, way: Way, listener: Listener) -> None:
        """Compiles it where it is not the cell's own. The cell's key of it is set, a failure's too."""
        job, cell = way.job, way.cell
        if not self._is_wanted(way):
            return
        separate = candidate_of(model.candidate_of(job, cell))
        if separate is None:
            self._take(way, way.compilation)
            return
        try:
            # With --no-cache, too, it is lowered from what QUANTIZE gave the timed program: other scales would be another model.
            outcome = await self._compiler.compile(
                separate, owner=job.owner, project=job.project, fresh=job.spec.no_cache, quantize_again=False, listener=listener
            )  # fmt: skip
        except EtfarmError as error:
            _warn(way, str(error))
            return
        cell.numerics_compilation_key = outcome.made.key
        self._take(way, outcome.made)

    async def recover(self, way: Way) -> None:
        """Finds it again for a cell that an earlier server has compiled."""
        if not self._is_wanted(way):
            return
        if candidate_of(model.candidate_of(way.job, way.cell)) is None:
            self._take(way, way.compilation)
            return
        try:
            self._take(way, await self._compiler.get(way.cell.numerics_compilation_key))
        except CompilationNotFound:
            _warn(way, "It failed on an earlier server, which kept no reason.")

    def _is_wanted(self, way: Way) -> bool:
        if not way.job.spec.measurement.numerics:
            return False
        if way.cell.method not in model.candidate_of(way.job, way.cell).model.methods:
            _warn(way, f"{way.cell.method} is a constant method: it has no operators.")
            return False
        compilation = way.compilation
        if way.cell.method not in way.job.spec.inputs and compilation and way.cell.method not in compilation.example_inputs:
            _warn(way, "The model has no example inputs, and what a runner makes up is not known on the host. Give --inputs.")
            return False
        return True

    def _take(self, way: Way, made: compile_pb2.Compilation | None) -> None:
        assert made is not None
        if made.HasField("error"):
            _warn(way, str(from_proto(made.error)))
        elif not made.HasField("etrecord"):
            _warn(way, "It came without an ETRecord, which tells its operators.")
        else:
            way.numerics = made


def _warn(way: Way, why: str) -> None:
    message = f"There is no program to compare operators with: {why}"
    way.warnings.append(compile_pb2.Warning(code=NOT_COMPILED, message=message))
