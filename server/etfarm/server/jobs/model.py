"""States of cells, and the functions that change them. A job's state is derived from its cells and never stored."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Final

from etfarm.v1 import job_pb2, report_pb2
from etfarm.v1.common_pb2 import CellState
from etfarm.v1.job_pb2 import Cell, JobState
from etfarm.wire.errors import FarmError, UserError

QUEUED: Final = CellState.CELL_STATE_QUEUED
COMPILING: Final = CellState.CELL_STATE_COMPILING
WAITING: Final = CellState.CELL_STATE_WAITING_FOR_DEVICE
RUNNING: Final = CellState.CELL_STATE_RUNNING
ANALYZING: Final = CellState.CELL_STATE_ANALYZING
SUCCEEDED: Final = CellState.CELL_STATE_SUCCEEDED
FAILED: Final = CellState.CELL_STATE_FAILED
CANCELLED: Final = CellState.CELL_STATE_CANCELLED

TERMINAL: Final = frozenset({SUCCEEDED, FAILED, CANCELLED})

TRANSITIONS: Final[dict[int, frozenset[int]]] = {
    QUEUED: frozenset({COMPILING, FAILED, CANCELLED}),
    COMPILING: frozenset({WAITING, SUCCEEDED, FAILED, CANCELLED}),
    WAITING: frozenset({RUNNING, FAILED, CANCELLED}),
    RUNNING: frozenset({ANALYZING, WAITING, FAILED, CANCELLED}),
    ANALYZING: frozenset({SUCCEEDED, FAILED, CANCELLED}),
    SUCCEEDED: frozenset(),
    FAILED: frozenset(),
    CANCELLED: frozenset(),
}


class BadJob(UserError):
    """A spec that contradicts itself or is incomplete."""

    reason = "BAD_JOB"


class IllegalTransition(FarmError):
    """A state that does not follow the cell's state: a bug in the caller, never a user's fault."""

    reason = "ILLEGAL_TRANSITION"


def advance(cell: Cell, to: CellState.ValueType, *, at: datetime) -> Cell:
    """Return the cell in its next state with the next version. `cell` is not changed.

    Raises:
        IllegalTransition: `to` does not follow `cell.state`.
    """
    if to not in TRANSITIONS.get(cell.state, ()):
        names = CellState.Name(cell.state), CellState.Name(to)
        raise IllegalTransition(f"Cell {cell.id} cannot go from {names[0]} to {names[1]}.", cell=cell.id)
    after = amend(cell, at=at)
    after.state = to
    return after


def amend(cell: Cell, *, at: datetime) -> Cell:
    """Return a new version of the cell in the same state. `cell` is not changed."""
    after = Cell()
    after.CopyFrom(cell)
    after.version += 1
    after.update_time.FromDatetime(at)
    return after


def copy_result(report: report_pb2.Report, cell: Cell) -> None:
    """Set the cell's result of the timed pass to that of its report. Only cells that succeeded with a measurement have one."""
    for name in ("p50_ns", "p50_ci95_ns", "verdict"):
        cell.ClearField(name)
    if cell.state == SUCCEEDED and report.latency.HasField("p50_ns"):
        cell.p50_ns = report.latency.p50_ns
        cell.p50_ci95_ns.extend(report.latency.p50_ci95_ns)
        cell.verdict = report.verdict.status


def job_state(cells: Iterable[Cell]) -> JobState.ValueType:
    """Return a job's state: live while a cell is, else FAILED if any cell failed, else CANCELLED if any was, else SUCCEEDED."""
    states = {cell.state for cell in cells}
    if states <= TERMINAL:
        if FAILED in states:
            return JobState.JOB_STATE_FAILED
        return JobState.JOB_STATE_CANCELLED if CANCELLED in states else JobState.JOB_STATE_SUCCEEDED
    return JobState.JOB_STATE_QUEUED if states == {QUEUED} else JobState.JOB_STATE_RUNNING


def is_terminal(state: JobState.ValueType) -> bool:
    """Return whether a job in this state never changes again."""
    return state in (JobState.JOB_STATE_SUCCEEDED, JobState.JOB_STATE_FAILED, JobState.JOB_STATE_CANCELLED)


def candidate_of(job: job_pb2.Job, cell: Cell) -> job_pb2.Candidate:
    """Return the candidate that the cell was created from."""
    return job.spec.candidates[cell.candidate_index]
