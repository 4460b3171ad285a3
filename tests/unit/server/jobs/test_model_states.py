"""The states of a cell: one table, one door, and a job's state that follows from its cells."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.server.jobs import model
from etfarm.server.jobs.model import (
    ANALYZING,
    CANCELLED,
    COMPILING,
    FAILED,
    QUEUED,
    RUNNING,
    SUCCEEDED,
    TRANSITIONS,
    WAITING,
    IllegalTransition,
)  # fmt: skip
from etfarm.v1.common_pb2 import CellState
from etfarm.v1.job_pb2 import Cell, JobState
from etfarm.wire.errors import Fault

STATES = [state for state in CellState.values() if state != CellState.CELL_STATE_UNSPECIFIED]
LIVE = {QUEUED, COMPILING, WAITING, RUNNING, ANALYZING}
AT = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)
FORWARD = {
    (QUEUED, COMPILING), (COMPILING, WAITING), (COMPILING, SUCCEEDED), (WAITING, RUNNING), (RUNNING, ANALYZING),
    (RUNNING, WAITING), (ANALYZING, SUCCEEDED),
}  # fmt: skip


def test_no_cell_skips_a_step_and_what_is_over_stays_over() -> None:
    allowed = {(before, after) for before, afters in TRANSITIONS.items() for after in afters}
    assert allowed == FORWARD | set(product(LIVE, {FAILED, CANCELLED}))
    assert set(TRANSITIONS) == set(STATES) == LIVE | model.TERMINAL


@pytest.mark.parametrize(("before", "after"), [*product(STATES, STATES)])
def test_advance_goes_where_the_table_says_and_nowhere_else(before: CellState, after: CellState) -> None:
    cell = Cell(id="c", state=before, version=7)
    kept = Cell.FromString(cell.SerializeToString())
    if after in TRANSITIONS[before]:
        moved = model.advance(cell, after, at=AT)
        assert (moved.state, moved.version, moved.update_time.ToDatetime(UTC)) == (after, 8, AT)
    else:
        with pytest.raises(IllegalTransition, match="Cell c cannot go from") as refused:
            model.advance(cell, after, at=AT)
        assert refused.value.fault is Fault.FARM
    assert cell == kept


def test_a_cell_without_a_state_goes_nowhere() -> None:
    with pytest.raises(IllegalTransition):
        model.advance(Cell(id="c"), COMPILING, at=AT)


def test_amending_changes_version_and_instant_only() -> None:
    cell = Cell(id="c", state=RUNNING, version=3, method="forward")
    after = model.amend(cell, at=AT + timedelta(seconds=1))
    assert (after.version, after.state, after.method) == (4, RUNNING, "forward")
    assert cell.version == 3


cells = st.lists(st.sampled_from(STATES).map(lambda state: Cell(state=state)), min_size=1, max_size=8)


@given(cells)
def test_a_jobs_state_follows_from_its_cells(cells: list[Cell]) -> None:
    states = {cell.state for cell in cells}
    state = model.job_state(cells)
    assert model.is_terminal(state) == (not states & LIVE)
    assert (state == JobState.JOB_STATE_FAILED) == (not states & LIVE and FAILED in states)
    assert (state == JobState.JOB_STATE_CANCELLED) == (not states & LIVE and CANCELLED in states and FAILED not in states)
    assert (state == JobState.JOB_STATE_SUCCEEDED) == (states == {SUCCEEDED})
    assert (state == JobState.JOB_STATE_QUEUED) == (states == {QUEUED})
