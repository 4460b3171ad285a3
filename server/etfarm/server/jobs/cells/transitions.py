"""State transitions of cell runs, each written to the journal before it is announced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from typing import Any, TypeVar

import structlog

from etfarm.server.jobs import model
from etfarm.server.jobs.cells.cell_run import CellRun
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.state.engine import retry_until_written
from etfarm.v1 import agent_pb2, common_pb2, report_pb2
from etfarm.v1.job_pb2 import Cell

T = TypeVar("T")

log = structlog.get_logger()


class CellTransitions:
    """State transitions of cells. A transition that has begun is completed even if the caller is cancelled."""

    def __init__(self, journal: Journal, now: Callable[[], datetime]) -> None:
        self._journal = journal
        self._now = now

    async def advance(self, cell_runs: Sequence[CellRun], to: common_pb2.CellState.ValueType) -> None:
        """Advance cells of one job, all or none; a cell that has become terminal in the meantime stays terminal."""
        # A result that has arrived must not be lost because it cannot be written now.
        await retry_until_written(lambda: run_to_completion(self._advance(cell_runs, to)))

    async def _advance(self, cell_runs: Sequence[CellRun], to: common_pb2.CellState.ValueType) -> None:
        async with AsyncExitStack() as locks:
            for run in sorted(cell_runs, key=lambda run: run.cell.index):
                await locks.enter_async_context(run.writing)
            live = [run for run in cell_runs if not run.is_over]
            after = [model.advance(run.cell, to, at=self._now()) for run in live]
            if len(live) == 1:
                await self.write(live[0], after[0])
            elif live:
                results = [_finished_result(run, cell) for run, cell in zip(live, after, strict=True)]
                await self._journal.change_together(list(zip(after, results, strict=True)))
                for run, cell in zip(live, after, strict=True):
                    run.cell = cell

    async def write(self, run: CellRun, after: Cell, report: report_pb2.Report | None = None) -> None:
        """Write a new version of a cell. The caller holds `run.writing`."""
        run.cell = await self._journal.change(after, report=report, result=_finished_result(run, after))


def _finished_result(run: CellRun, after: Cell) -> agent_pb2.CandidateResult | None:
    """Return the result of the last attempt if that has ended and is not in the journal yet."""
    is_written = run.cell.state == model.ANALYZING
    return run.result if after.attempts and after.attempts[-1].HasField("end_time") and not is_written else None


async def run_to_completion(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, which completes even if the caller is cancelled, so that the cell in memory and its row agree.

    If it fails after that, the error is logged, as no caller is left to raise it to.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("what was begun for a cancelled caller has failed", exc_info=error)
        raise
