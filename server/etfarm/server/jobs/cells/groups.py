"""Groups of interleaved cells that share attempts: they wait for each other, and one cell leads the others through."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from etfarm.server.jobs import model
from etfarm.server.jobs.cells.cell_run import CellRun
from etfarm.server.reports.analyst import Base
from etfarm.v1 import agent_pb2
from etfarm.v1.job_pb2 import Cell, Job
from etfarm.wire.errors import EtfarmError

MAX_TOGETHER: Final = 8
"""Maximum number of candidates of one attempt: all of their programs are in the device's memory at once, and each makes a round
longer."""

_BEFORE_RESULT: Final = frozenset({model.QUEUED, model.COMPILING, model.WAITING, model.RUNNING})


def together(job: Job, cells: Iterable[Cell]) -> list[list[Cell]]:
    """Return the cells grouped by shared attempts.

    If the job interleaves its candidates, cells with the same device choice, method and thread count share attempts; otherwise
    each cell has its own.
    """
    groups: dict[object, list[Cell]] = {}
    has_one_method = _has_one_method(job)
    for cell in cells:
        if job.spec.measurement.interleave:
            is_known = not has_one_method and (job.spec.methods or not _is_program(job, cell))
            key = (cell.device_index, cell.selector, cell.method if is_known else "", cell.threads)
            groups.setdefault(key, []).append(cell)
        else:
            groups[cell.id] = [cell]
    return list(groups.values())


def base_of(cell_id: str, results: Mapping[str, agent_pb2.CandidateResult]) -> Base | None:
    """Return the cell to compare a cell of an attempt with: the first one measured in blocks, if both were."""
    base_id = next((each for each, result in results.items() if _is_comparable(result)), None)
    return Base(base_id, results[base_id]) if base_id not in (None, cell_id) and _is_comparable(results[cell_id]) else None


def _is_comparable(result: agent_pb2.CandidateResult) -> bool:
    """Return whether the candidate was measured in blocks to the end."""
    return bool(result.blocks) and result.HasField("samples") and not result.HasField("error")


def _name(cell: Cell) -> str:
    return f"{cell.candidate_name} · {cell.recipe_name}" if cell.recipe_name else cell.candidate_name


def _has_one_method(job: Job) -> bool:
    """Return whether every candidate runs one method, as far as their names are known: that of all models, and a program's own.

    A precompiled program's method may only be known after its inspection, whatever its cell says until then.
    """
    if job.spec.methods:
        return len(job.spec.methods) == 1
    return len({cell.method for cell in job.cells if not _is_program(job, cell)}) <= 1


def _is_program(job: Job, cell: Cell) -> bool:
    return model.candidate_of(job, cell).WhichOneof("source") == "program"


Turn = list[tuple[CellRun, asyncio.Future["Turn"]]]
"""Cells that go through an attempt together, each with the future that it awaits. The leader receives the turn; the others
receive an empty one at the end of the attempt."""


@dataclass
class _Group:
    """Cells that share attempts."""

    expected: set[str] = field(default_factory=set)
    """Ids of the cells that still have an attempt to run."""
    arrived: Turn = field(default_factory=list)
    """Cells that wait for the others."""
    is_running: bool = False

    def start_turn(self) -> None:
        """Let one cell lead the attempt once all cells have arrived."""
        if self.is_running or not self.arrived or self.expected != {run.cell.id for run, _ in self.arrived}:
            return
        if any(waiting.done() for _, waiting in self.arrived):
            return  # the cells are being cancelled
        self.arrived.sort(key=lambda each: each[0].cell.index)
        # Attempts that an earlier server sent come first; they may return cells to WAITING.
        turn = [each for each in self.arrived if each[0].cell.state == model.RUNNING] or self.arrived
        self.arrived = [each for each in self.arrived if each not in turn]
        self.is_running = True
        turn[0][1].set_result(turn)


class Groups:
    """The live cells by the attempts that they share.

    Args:
        run: leads cells through one attempt; returns the errors, by cell id, of those that failed.
        on_wait: called with a cell and a sentence that names the cells it waits for, whenever that changes.
    """

    def __init__(
        self,
        run: Callable[[Sequence[CellRun]], Awaitable[Mapping[str, EtfarmError]]],
        on_wait: Callable[[CellRun, str], None] = lambda run, why: None,
    ) -> None:
        self._run = run
        self._on_wait = on_wait
        self._groups: dict[str, _Group] = {}

    def __len__(self) -> int:
        """Return the number of cells that still have an attempt to run."""
        return len(self._groups)

    def expect(self, job: Job) -> None:
        """Expect the job's cells. Each of them calls `attempt` or `leave`."""
        live = [cell for cell in job.cells if cell.state in _BEFORE_RESULT and cell.id not in self._groups]
        for cells in together(job, live):
            group = _Group({cell.id for cell in cells})
            self._groups |= dict.fromkeys(group.expected, group)

    def leave(self, cell_id: str) -> None:
        """Remove a cell that has no further attempt; the others continue without it."""
        group = self._groups.pop(cell_id, None)
        if group is not None:
            group.expected.discard(cell_id)
            self._advance(group)

    async def attempt(self, run: CellRun) -> None:
        """Lead a cell through one attempt with all cells that share it, once they have arrived.

        Raises:
            EtfarmError: the reason why the cell failed.
        """
        group = self._groups[run.cell.id]
        waiting: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        group.arrived.append((run, waiting))
        try:
            self._advance(group)
            turn = await waiting
        finally:
            group.arrived = [each for each in group.arrived if each[1] is not waiting]
        if turn:
            try:
                await self._lead(run, turn)
            finally:
                group.is_running = False

    def _advance(self, group: _Group) -> None:
        """Start a turn if all cells have arrived; otherwise report which cells are missing."""
        group.start_turn()
        missing = group.expected - {run.cell.id for run, _ in group.arrived}
        if group.is_running or not missing:
            return
        for run, _ in group.arrived:
            names = [_name(cell) for cell in run.job.cells if cell.id in missing]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self._on_wait(run, f"{names[0]}{more}, which it is interleaved with, is not compiled yet")

    async def _lead(self, leader: CellRun, turn: Turn) -> None:
        failure: Exception | None = None
        failed: Mapping[str, EtfarmError] = {}
        try:
            failed = await self._run([run for run, _ in turn])
        except Exception as error:  # noqa: BLE001 - also the followers' failure; raised below
            failure = error
        for run, waiting in turn[1:]:
            error_of_run = failure or failed.get(run.cell.id)
            if waiting.done():
                continue
            if error_of_run is None:
                waiting.set_result([])
            else:
                waiting.set_exception(error_of_run)
        if (own := failure or failed.get(leader.cell.id)) is not None:
            raise own
