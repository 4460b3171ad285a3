"""What a waiting command shows of a job, and that it ends with the job whatever becomes of the job's log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from etfarm.client.cli.terminal.display import PlainDisplay
from etfarm.client.cli.workflows import job as flow
from etfarm.client.jobs.job import AsyncJob
from etfarm.client.models import Cell, CellChanged, CellState, Event, JobInfo, JobResult, JobState, LogLine
from etfarm.wire.errors import EtfarmError, Fault, error_of

AT = datetime(2026, 1, 2, tzinfo=UTC)


def _cell(index: int, state: CellState = CellState.QUEUED) -> Cell:
    return Cell(id=f"c{index}", index=index, model=f"net{index}", recipe="xnnpack_fp32", method="forward", state=state)


class Job:
    """A job that runs its cells at once; its log is `lines`, and then what `ends` does."""

    id = "j1"

    def __init__(
        self, cells: int, lines: Sequence[LogLine] = (), ends: EtfarmError | None = None, *, hangs: bool = False
    ) -> None:
        cells_ = tuple(_cell(index) for index in range(cells))
        self.info = JobInfo(id="j1", owner="me", state=JobState.RUNNING, submitted_at=AT, cells=cells_)
        self.asked_for_log = False
        self._lines, self._ends, self._hangs = lines, ends, hangs

    async def watch(self) -> AsyncIterator[Event]:
        for cell in self.info.cells:
            await asyncio.sleep(0)
            yield CellChanged(1, AT, _cell(cell.index, CellState.SUCCEEDED), JobState.RUNNING)

    async def logs(self, *, follow: bool) -> AsyncIterator[LogLine]:
        self.asked_for_log = follow
        for line in self._lines:
            yield line
        if self._hangs:
            await asyncio.Event().wait()
        if self._ends is not None:
            raise self._ends

    async def refresh(self) -> JobInfo:
        return self.info

    async def document(self, *, with_series: bool = True) -> dict[str, Any]:
        return {"schema": "etfarm.report/1", "job": {"id": "j1", "state": "SUCCEEDED"}, "reports": [], "error": None}


def _line(number: int, cell: int, text: str) -> LogLine:
    return LogLine(at=AT, number=number, cell_id=f"c{cell}", source="COMPILE", text=text)


async def _followed(job: Job, *, verbose: bool) -> tuple[JobResult, list[str]]:
    shown: list[str] = []
    with PlainDisplay(shown.append) as display:
        result = await flow.follow(cast(AsyncJob, job), display, verbose=verbose)
    return result, shown


async def test_a_command_that_is_not_verbose_asks_for_no_log() -> None:
    job = Job(1, [_line(1, 0, "words")])
    result, shown = await _followed(job, verbose=False)
    assert result.state is JobState.SUCCEEDED and not job.asked_for_log
    assert shown == ["net0 · xnnpack_fp32: succeeded"]


async def test_lines_of_the_only_cell_have_no_label() -> None:
    _, shown = await _followed(Job(1, [_line(1, 0, "words")]), verbose=True)
    assert sorted(shown) == ["compile: words", "net0 · xnnpack_fp32: succeeded"]


async def test_lines_of_several_cells_say_whose_they_are() -> None:
    _, shown = await _followed(Job(2, [_line(1, 1, "one"), _line(2, 0, "two")]), verbose=True)
    assert [line for line in shown if "compile" in line] == [
        "net1 · xnnpack_fp32: compile: one",
        "net0 · xnnpack_fp32: compile: two",
    ]


async def test_a_log_that_breaks_off_is_reported_and_loses_no_result() -> None:
    lost = error_of(Fault.FARM, "SERVER_UNREACHABLE", "The server is away.")
    result, shown = await _followed(Job(1, [_line(1, 0, "words")], lost), verbose=True)
    assert result.state is JobState.SUCCEEDED
    assert shown[-1] == "The log ended early: The server is away. `etfarm jobs logs j1` shows all of it."


async def test_a_log_that_does_not_end_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "LAST_LINES_S", 0.01)
    result, shown = await _followed(Job(1, hangs=True), verbose=True)
    assert result.state is JobState.SUCCEEDED
    assert shown[-1] == "The log's last lines did not arrive in time; `etfarm jobs logs j1` shows all of it."
