"""Selection of the jobs of a list by name, labels, state and owner."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, exists, false, func, or_, select, true

from etfarm.server.access.scope import Scope
from etfarm.server.jobs.records.listing import LABELS_BYTES, labels_of
from etfarm.server.state import schema
from etfarm.server.state.sql import position_of
from etfarm.v1.job_pb2 import JobState

SCANNED_JOBS: Final = 5_000
"""Maximum number of jobs that one page examines, so that a filter without matches does not read the whole database."""


@dataclass(frozen=True)
class JobFilter:
    """The conditions that a listed job meets; an empty one accepts every job."""

    name: str = ""
    """A part of the job's name."""
    labels: Mapping[str, str] = field(default_factory=dict)
    states: Collection[JobState.ValueType] = ()
    owner: str = ""
    model: str = ""
    """The name of a candidate."""
    since: datetime | None = None
    """The earliest time of the submission."""

    def clause(self) -> ColumnElement[bool]:
        """Return the SQL condition, without that of the labels, which a job's spec contains."""
        jobs = schema.jobs.c
        conditions: list[ColumnElement[bool]] = [true()]
        if self.name:
            conditions.append(position_of(jobs.name, self.name) > 0)
        if self.owner:
            conditions.append(jobs.owner == self.owner)
        if self.model:
            models = schema.job_models.c
            conditions.append(exists().where(models.job_id == jobs.id, models.model == self.model))
        if self.since is not None:
            conditions.append(jobs.submitted_at >= self.since)
        if self.states:
            conditions.append(or_(*(_in_state(state) for state in set(self.states))))
        return and_(*conditions)

    def accepts_labels(self, spec: bytes) -> bool:
        """Return whether the beginning of a serialized JobSpec has the labels."""
        return self.labels.items() <= labels_of(spec).items()


ALL_JOBS: Final = JobFilter()


class SelectedJob(NamedTuple):
    """A job that matches a filter."""

    id: str
    number: int


def select_jobs(
    connection: Connection, size: int, before: int | None, scope: Scope, filter_: JobFilter
) -> tuple[Sequence[SelectedJob], int | None]:
    """Return the next jobs that match, newest first, and the number that the rest of the list starts at; None at its end.

    Args:
        size: maximum number of jobs.
        before: the highest number to consider; None for the newest.
    """
    jobs = schema.jobs.c
    visible = scope.clause(jobs.project)
    if before is not None:
        visible = and_(visible, jobs.number <= before)
    if filter_.since is not None:
        # The numbers of jobs increase with their times, unless the clock was set back.
        oldest = connection.execute(select(func.min(jobs.number)).where(jobs.submitted_at >= filter_.since)).scalar()
        if oldest is None:
            return [], None
        visible = and_(visible, jobs.number >= oldest)
    newest_first = jobs.number.desc()
    rest = connection.execute(select(jobs.number).where(visible).order_by(newest_first).offset(SCANNED_JOBS).limit(1)).scalar()
    columns: list[ColumnElement[Any]] = [jobs.id, jobs.number]
    if filter_.labels:
        columns.append(func.substr(jobs.spec, 1, LABELS_BYTES).label("spec"))
    query = select(*columns).where(visible, filter_.clause()).order_by(newest_first)
    if rest is not None:
        query = query.where(jobs.number > rest)
    selected: list[SelectedJob] = []
    for row in connection.execute(query if filter_.labels else query.limit(size + 1)):
        if filter_.labels and not filter_.accepts_labels(row.spec or b""):
            continue
        if len(selected) == size:
            return selected, row.number
        selected.append(SelectedJob(row.id, row.number))
    return selected, rest


def _in_state(state: JobState.ValueType) -> ColumnElement[bool]:
    """Return the SQL condition that a job, whose state follows from its cells, is in a state; see `model.job_state`."""
    jobs = schema.jobs.c
    is_finished = jobs.finished_at.is_not(None)
    match state:
        case JobState.JOB_STATE_FAILED:
            return and_(is_finished, _has_cell("FAILED"))
        case JobState.JOB_STATE_CANCELLED:
            return and_(is_finished, ~_has_cell("FAILED"), _has_cell("CANCELLED"))
        case JobState.JOB_STATE_SUCCEEDED:
            return and_(is_finished, ~_has_cell("FAILED"), ~_has_cell("CANCELLED"))
        case JobState.JOB_STATE_QUEUED:
            return and_(~is_finished, ~_has_cell_beside("QUEUED"))
        case JobState.JOB_STATE_RUNNING:
            return and_(~is_finished, _has_cell_beside("QUEUED"))
    return false()


def _has_cell(state: str) -> ColumnElement[bool]:
    cells = schema.cells.c
    return exists().where(cells.job_id == schema.jobs.c.id, cells.state == state)


def _has_cell_beside(state: str) -> ColumnElement[bool]:
    cells = schema.cells.c
    return exists().where(cells.job_id == schema.jobs.c.id, cells.state != state)
