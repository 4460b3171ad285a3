"""Deletion of terminal jobs with everything that was stored for them."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from sqlalchemy import ColumnElement, Connection, Table, delete, exists, select, tuple_

from etfarm.server.jobs.records.rows import job_not_found
from etfarm.server.jobs.records.tags import tags_of
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.wire.errors import error_for

_ROWS: Final = 1_000
"""Maximum number of rows that one transaction deletes, so that other writes do not wait long."""

_REPORTS: Final = 50
"""Maximum number of reports that one transaction deletes, since each may have megabytes."""


class JobDeletion:
    """Deletion of jobs in transactions of bounded size.

    The rows of a job go in an order in which it stays a terminal job until the last transaction: a deletion that the end of the
    server interrupts leaves the job without its log or some of its reports, and can be repeated.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def delete(self, job_id: str, *, with_tags: bool = False) -> None:
        """Delete a terminal job with its cells, attempts, events, log and reports.

        Args:
            with_tags: whether to delete the job's tags, too.

        Raises:
            JOB_NOT_FOUND: the job does not exist.
            JOB_LIVE: the job is not terminal.
            JOB_TAGGED: the job has tags, and `with_tags` is not set.
        """
        await self._database.write(lambda connection: _require_deletable(connection, job_id, with_tags=with_tags))
        for table, key, count in _PARTS:
            while await self._database.write(
                lambda connection, table=table, key=key, count=count: _delete_some(connection, table, key, job_id, count)  # type: ignore[misc]
            ):
                pass
        await self._database.write(lambda connection: _delete_rest(connection, job_id, with_tags=with_tags), durable=True)

    async def delete_log(self, job_id: str) -> None:
        """Delete the log of a terminal job."""
        lines = schema.log_lines
        while await self._database.write(lambda c: _delete_some(c, lines, lines.c.number, job_id, _ROWS)):
            pass


_PARTS: Final[tuple[tuple[Table, ColumnElement[int] | ColumnElement[str], int], ...]] = (
    (schema.log_lines, schema.log_lines.c.number, _ROWS),
    (schema.events, schema.events.c.sequence, _ROWS),
    (schema.reports, schema.reports.c.id, _REPORTS),
)
"""Tables with many rows of a job: each with its key within the job, and the number of rows to delete at a time."""


def _require_deletable(connection: Connection, job_id: str, *, with_tags: bool) -> None:
    row = connection.execute(select(schema.jobs.c.finished_at).where(schema.jobs.c.id == job_id)).one_or_none()
    if row is None:
        raise job_not_found(job_id)
    if row.finished_at is None:
        raise error_for(
            "JOB_LIVE", f"Job {job_id} is still live.", f"Cancel it first: `etfarm jobs cancel {job_id}`.", job=job_id
        )
    if not with_tags and (tags := tags_of(connection, job_id)):
        names = ", ".join(tags)
        remedy = "Remove them with `etfarm report tag NAME --remove`, or delete it with --force."
        raise error_for("JOB_TAGGED", f"Job {job_id} has the tags {names}.", remedy, job=job_id, tags=names)


def _delete_some(
    connection: Connection, table: Table, key: ColumnElement[int] | ColumnElement[str], job_id: str, count: int
) -> bool:
    """Delete some rows of a job; return whether there may be more."""
    some = select(key).where(table.c.job_id == job_id).order_by(key).limit(count)
    deleted = connection.execute(delete(table).where(table.c.job_id == job_id, key.in_(some))).rowcount
    return deleted == count


def _delete_rest(connection: Connection, job_id: str, *, with_tags: bool) -> None:
    _require_deletable(connection, job_id, with_tags=with_tags)
    cells = select(schema.cells.c.id).where(schema.cells.c.job_id == job_id)
    connection.execute(delete(schema.attempts).where(schema.attempts.c.cell_id.in_(cells)))
    for table in (schema.reports, schema.events, schema.log_lines, schema.tags, schema.job_models, schema.cells):
        connection.execute(delete(table).where(table.c.job_id == job_id))
    connection.execute(delete(schema.jobs).where(schema.jobs.c.id == job_id))


def find_expired(
    connection: Connection, before: datetime, after: tuple[datetime, str] | None, limit: int, *, with_tags: bool = False
) -> list[tuple[datetime, str]]:
    """Return (finished_at, id) of the next jobs that finished before a time, oldest first.

    Args:
        after: the last entry of the previous call.
        limit: maximum number of jobs.
        with_tags: whether to return jobs with tags, too.
    """
    jobs, tags = schema.jobs.c, schema.tags.c
    key = (jobs.finished_at, jobs.id)
    query = select(*key).where(jobs.finished_at < before)
    if not with_tags:
        query = query.where(~exists().where(tags.job_id == jobs.id))
    if after is not None:
        query = query.where(tuple_(*key) > after)
    return [(row.finished_at, row.id) for row in connection.execute(query.order_by(*key).limit(limit))]
