"""Cells that are measured in turns share attempts: they wait for each other, and one of them leads all through."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from etfarm.server.jobs import model
from etfarm.server.jobs.cells.cell_run import Way
from etfarm.server.reports.analyst import Base
from etfarm.v1 import agent_pb2
from etfarm.v1.job_pb2 import Cell, Job
from etfarm.wire.errors import EtfarmError

MAX_TOGETHER: Final = 8
"""Candidates of one attempt: all of their programs are in the device's memory at once, and a round gets longer with each."""

_BEFORE_ITS_RESULT: Final = frozenset({model.QUEUED, model.COMPILING, model.WAITING, model.RUNNING})


def together(job: Job, cells: Iterable[Cell]) -> list[list[Cell]]:
    """The cells by who shares attempts: those of one device choice, method and thread count where the job interleaves its
    candidates, else each alone."""
    groups: dict[object, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(_key(job, cell), []).append(cell)
    return list(groups.values())


def base_of(cell_id: str, results: Mapping[str, agent_pb2.CandidateResult]) -> Base | None:
    """What a cell of an attempt is compared with: the first one that was measured in blocks, where both were."""
    first = next((each for each, result in results.items() if _is_comparable(result)), None)
    return Base(first, results[first]) if first not in (None, cell_id) and _is_comparable(results[cell_id]) else None


def _is_comparable(result: agent_pb2.CandidateResult) -> bool:
    """Whether it was measured in blocks, to the end."""
    return bool(result.blocks) and result.HasField("samples") and not result.HasField("error")


def _name(cell: Cell) -> str:
    return f"{cell.candidate_name} · {cell.recipe_name}" if cell.recipe_name else cell.candidate_name


def _key(job: Job, cell: Cell) -> object:
    if not job.spec.measurement.interleave:
        return cell.id
    is_program = model.candidate_of(job, cell).WhichOneof("source") == "program"
    # Of a ready program, which of its methods that is turns out after its inspection.
    method = "" if is_program and not job.spec.methods else cell.method
    return cell.device_index, cell.selector, method, cell.threads


Turn = list[tuple[Way, asyncio.Future["Turn"]]]
"""Ways that go through an attempt together, each with who waits for it: a leader gets the turn, the others an empty one when
it is over."""


@dataclass
class _Group:
    """Cells that share attempts."""

    expected: set[str] = field(default_factory=set)
    """Those that have an attempt before them, by id."""
    here: Turn = field(default_factory=list)
    """Those that wait for the others."""
    is_on_its_way: bool = False

    def go(self) -> None:
        """Lets one lead, once all are here."""
        if self.is_on_its_way or not self.here or self.expected != {way.cell.id for way, _ in self.here}:
            return
        if any(waiting.done() for _, waiting in self.here):
            return  # they are being cancelled
        self.here.sort(key=lambda each: each[0].cell.index)
        # What an earlier server sent is heard first, and may lead back to waiting.
        turn = [each for each in self.here if each[0].cell.state == model.RUNNING] or self.here
        self.here = [each for each in self.here if each not in turn]
        self.is_on_its_way = True
        turn[0][1].set_result(turn)


class Groups:
    """The live cells by who shares attempts.

    Args:
        run: takes ways through one attempt; gives why those are over that are, by cell.
        on_wait: told which others a way waits for, in words, as often as that changes.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Way]], Awaitable[Mapping[str, EtfarmError]]],
        on_wait: Callable[[Way, str], None] = lambda way, why: None,
    ) -> None:
        self._run = run
        self._on_wait = on_wait
        self._groups: dict[str, _Group] = {}

    def expect(self, job: Job) -> None:
        """These cells come to `attempt` or `leave`."""
        live = [cell for cell in job.cells if cell.state in _BEFORE_ITS_RESULT and cell.id not in self._groups]
        for cells in together(job, live):
            group = _Group({cell.id for cell in cells})
            self._groups |= dict.fromkeys(group.expected, group)

    def leave(self, cell_id: str) -> None:
        """A cell has no attempt before it any more; the others go on without it."""
        group = self._groups.pop(cell_id, None)
        if group is not None:
            group.expected.discard(cell_id)
            self._go(group)

    async def attempt(self, way: Way) -> None:
        """One attempt of a cell, with all that share it, once they are here.

        Raises:
            EtfarmError: why the cell is over.
        """
        group = self._groups[way.cell.id]
        waiting: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        group.here.append((way, waiting))
        try:
            self._go(group)
            turn = await waiting
        finally:
            group.here = [each for each in group.here if each[1] is not waiting]
        if turn:
            try:
                await self._lead(way, turn)
            finally:
                group.is_on_its_way = False

    def _go(self, group: _Group) -> None:
        """Lets one lead, and tells those who still wait for others."""
        group.go()
        missing = group.expected - {way.cell.id for way, _ in group.here}
        if group.is_on_its_way or not missing:
            return
        for way, _ in group.here:
            names = [_name(cell) for cell in way.job.cells if cell.id in missing]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self._on_wait(way, f"{names[0]}{more}, with which it takes turns, is not compiled yet")

    async def _lead(self, way: Way, turn: Turn) -> None:
        failure: Exception | None = None
        over: Mapping[str, EtfarmError] = {}
        try:
            over = await self._run([each for each, _ in turn])
        except Exception as error:  # noqa: BLE001 - it is theirs too, and raised below
            failure = error
        for each, waiting in turn[1:]:
            error_of_it = failure or over.get(each.cell.id)
            if waiting.done():
                continue
            if error_of_it is None:
                waiting.set_result([])
            else:
                waiting.set_exception(error_of_it)
        if (own := failure or over.get(way.cell.id)) is not None:
            raise own
