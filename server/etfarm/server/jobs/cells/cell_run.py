"""Cells on their way, and how a change of them is written down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from etfarm.server.jobs import model
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.state.engine import retry_when_full
from etfarm.v1 import agent_pb2, compile_pb2, job_pb2, report_pb2
from etfarm.v1.device_pb2 import Device
from etfarm.v1.job_pb2 import Cell, Job

T = TypeVar("T")


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
    numerics: compile_pb2.Compilation | None = None
    """What the numerics pass runs, which may be `compilation`; None where there is no such pass."""
    warnings: list[compile_pb2.Warning] = field(default_factory=list)
    """For the report, beside those of the compilation and of the analysis."""
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a change of the cell is decided and written. Its own task is not alone in that: cells that share an attempt
    are led through it by one of them."""


class Steps:
    """Takes ways from one state to the next; a step that was begun is finished, whatever happens to the caller."""

    def __init__(self, journal: Journal, now: Callable[[], datetime]) -> None:
        self._journal = journal
        self._now = now

    async def advance(self, ways: Sequence[Way], to: job_pb2.CellState.ValueType) -> None:
        """One or several ways of one job a step on, all or none of them; what is terminal meanwhile stays so."""
        # A result that came is not lost because it cannot be written now.
        await retry_when_full(lambda: to_the_end(self._advance(ways, to)))

    async def _advance(self, ways: Sequence[Way], to: job_pb2.CellState.ValueType) -> None:
        async with AsyncExitStack() as locks:
            for way in sorted(ways, key=lambda way: way.cell.index):
                await locks.enter_async_context(way.writing)
            live = [way for way in ways if way.cell.state not in model.TERMINAL]
            after = [model.advance(way.cell, to, at=self._now()) for way in live]
            if len(live) == 1:
                await self.write(live[0], after[0])
            elif live:
                results = [_finished(way, cell) for way, cell in zip(live, after, strict=True)]
                await self._journal.change_together(list(zip(after, results, strict=True)))
                for way, cell in zip(live, after, strict=True):
                    way.cell = cell

    async def write(self, way: Way, after: Cell, report: report_pb2.Report | None = None) -> None:
        """Writes a new version of a cell down; the caller holds `way.writing`."""
        way.cell = await self._journal.change(after, report=report, result=_finished(way, after))


def _finished(way: Way, after: Cell) -> agent_pb2.CandidateResult | None:
    """What the last attempt gave, where it has ended."""
    return way.result if after.attempts and after.attempts[-1].HasField("finished_at") else None


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, which runs to its end even if the caller is cancelled meanwhile: a write that was begun is finished,
    so that the cell in memory and its row agree."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
