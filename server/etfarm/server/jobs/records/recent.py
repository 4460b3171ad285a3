"""The recent use of devices, from the journal: by whom, for how long, and for what."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, func, select

from etfarm.server.state import schema
from etfarm.server.state.bodies import ValueDamaged, unseal
from etfarm.server.state.engine import Database
from etfarm.v1.job_pb2 import Cell, JobSpec, Measurement

_JOBS: Final = 5_000
"""Maximum number of jobs that are read, newest first."""

_ATTEMPTS: Final = 2_000
"""Maximum number of attempts that are read, newest first."""

_SPEC_BYTES: Final = 64 << 10
"""Maximum size of a spec that is read for its measurement; larger ones are rare, and take long to parse."""


@dataclass(frozen=True)
class PastAttempt:
    """An attempt that ended."""

    project: str
    owner: str
    device_id: str
    started_at: datetime
    finished_at: datetime
    measurement: Measurement | None
    """What was measured; None if the attempt has no result, or the spec is large."""
    cells: Sequence[Cell]
    """The cells that shared the attempt."""


async def recent_attempts(database: Database, since: datetime) -> list[PastAttempt]:
    """Return attempts of the newest jobs that ended after `since`, in the order of their ends."""
    return await database.read(lambda connection: _read(connection, since))


def _read(connection: Connection, since: datetime) -> list[PastAttempt]:
    jobs, cells, attempts = schema.jobs.c, schema.cells.c, schema.attempts.c
    newest = select(jobs.id).order_by(jobs.number.desc()).limit(_JOBS).subquery()
    query = (
        select(
            attempts.id, attempts.device_id, attempts.started_at, attempts.finished_at, attempts.error,
            cells.job_id, cells.body, jobs.project, jobs.owner,
        )
        .join(schema.cells, cells.id == attempts.cell_id)
        .join(schema.jobs, jobs.id == cells.job_id)
        .where(cells.job_id.in_(select(newest.c.id)), attempts.finished_at >= since)
        .order_by(attempts.finished_at.desc(), attempts.id, cells.index)
        .limit(_ATTEMPTS)
    )  # fmt: skip
    rows = connection.execute(query).all()
    measurements = _measurements(connection, {row.job_id for row in rows})
    shared: dict[str, list[Cell]] = {}
    for row in rows:
        shared.setdefault(row.id, []).append(_cell(row.body, row.job_id))
    past: dict[str, PastAttempt] = {}
    for row in rows:
        is_complete = all(cell.attempts and cell.attempts[-1].id == row.id for cell in shared[row.id])
        past[row.id] = PastAttempt(
            project=row.project,
            owner=row.owner,
            device_id=row.device_id,
            started_at=row.started_at,
            finished_at=row.finished_at,
            measurement=measurements.get(row.job_id) if row.error is None and is_complete else None,
            cells=shared[row.id],
        )
    return list(reversed(past.values()))


def _cell(body: bytes, job_id: str) -> Cell:
    """Return a cell; an empty one, which counts as incomplete, if it is damaged."""
    try:
        return unseal(Cell, body, "a cell", job_id)
    except ValueDamaged:
        return Cell()


def _measurements(connection: Connection, job_ids: set[str]) -> dict[str, Measurement]:
    """Return what jobs measure, by job id."""
    jobs, known = schema.jobs.c, dict[str, Measurement]()
    ids = sorted(job_ids)
    for start in range(0, len(ids), 500):
        few = jobs.id.in_(ids[start : start + 500])
        query = select(jobs.id, jobs.spec).where(few, func.length(jobs.spec) <= _SPEC_BYTES)
        for row in connection.execute(query):
            with suppress(ValueDamaged):  # the others' durations do
                known[row.id] = unseal(JobSpec, row.spec, "the specification", row.id).measurement
    return known
