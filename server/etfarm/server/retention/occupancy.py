"""What jobs occupy: their rows in the database, and the artifacts that go with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, FromClause, case, exists, func, literal, select

from etfarm.server.access.scope import FARM_HOLDER
from etfarm.server.state import schema
from etfarm.server.state.sql import stored_size

JOB: Final = "job"

# Bytes of a row without its messages, with its entries in indexes, as measured by `tests/bench/stored_jobs.py`.
_JOB_BYTES: Final = 510
_CELL_BYTES: Final = 145
_ATTEMPT_BYTES: Final = 200
_EVENT_BYTES: Final = 65
_REPORT_BYTES: Final = 430
_REFERENCE_BYTES: Final = 215
LINE_BYTES: Final = 140
_ON_POSTGRESQL: Final = 1.5
"""How much more a row takes there."""

_PAGE_BYTES: Final = 4096
"""Size of a message from which on it has pages of its own, the last of which is half empty on average."""
_KEPT: Final = 1 << 40
"""Added to the number of a job that no limit deletes, so that it is the last one."""


def database_bytes(connection: Connection, references: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes that rows of jobs occupy, without those of their logs, by job.

    Args:
        references: the number of digests that each job refers to.
    """
    factor = _ON_POSTGRESQL if connection.dialect.name == schema.POSTGRESQL else 1.0
    jobs, cells, attempts, events, reports = schema.jobs, schema.cells, schema.attempts, schema.events, schema.reports
    sources: Sequence[tuple[FromClause, ColumnElement[str], Sequence[ColumnElement[Any]], int]] = (
        (jobs, jobs.c.id, (jobs.c.spec,), _JOB_BYTES),
        (cells, cells.c.job_id, (cells.c.body,), _CELL_BYTES),
        (events, events.c.job_id, (events.c.body,), _EVENT_BYTES),
        (reports, reports.c.job_id, (reports.c.body,), _REPORT_BYTES),
        (
            attempts.join(cells, cells.c.id == attempts.c.cell_id), cells.c.job_id,
            (attempts.c.result, attempts.c.error), _ATTEMPT_BYTES,
        ),
    )  # fmt: skip
    sizes = {job_id: round(factor * _REFERENCE_BYTES * count) for job_id, count in references.items()}
    for table, key, bodies, row_bytes in sources:
        of_row = sum((_occupied(body) for body in bodies), start=literal(round(factor * row_bytes)))
        query = (
            select(key.label("job"), func.sum(of_row).label("size"))
            .select_from(table)
            .where(key.in_(list(references)))
            .group_by(key)
        )
        for row in connection.execute(query):
            sizes[row.job] += int(row.size)
    return sizes


def _occupied(body: ColumnElement[Any]) -> ColumnElement[int]:
    size = func.coalesce(stored_size(body), 0)
    return size + case((size > _PAGE_BYTES, _PAGE_BYTES // 2), else_=0)


def is_kept() -> ColumnElement[bool]:
    """Return the SQL condition that no limit deletes a job: it is live or tagged."""
    return schema.jobs.c.finished_at.is_(None) | exists().where(schema.tags.c.job_id == schema.jobs.c.id)


def artifact_bytes(connection: Connection) -> dict[str, int]:
    """Return the bytes of the artifacts that can go when a job is deleted, by job.

    Those that several jobs refer to count for the last of them to be deleted, and those of the farm itself for none.
    """
    refers, jobs, artifacts, holdings = schema.artifact_references.c, schema.jobs, schema.artifacts, schema.holdings.c
    rank = jobs.c.number + case((is_kept(), _KEPT), else_=0)
    of_farm = exists().where(holdings.digest == refers.digest, holdings.holder == FARM_HOLDER)
    last = (
        select(refers.digest, func.max(rank).label("rank"))
        .select_from(schema.artifact_references.join(jobs, jobs.c.id == refers.id))
        .where(refers.kind == JOB, ~of_farm)
        .group_by(refers.digest)
        .subquery()
    )
    total = select(last.c.rank, func.sum(artifacts.c.size_bytes).label("size"))
    sizes = total.select_from(last.join(artifacts, artifacts.c.digest == last.c.digest)).group_by(last.c.rank).subquery()
    query = select(jobs.c.id, sizes.c.size).select_from(jobs.join(sizes, jobs.c.number == sizes.c.rank % _KEPT))
    return {row.id: int(row.size) for row in connection.execute(query)}
