"""A check of all stored values of jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, FromClause, select, tuple_

from etfarm.server.state import schema
from etfarm.server.state.bodies import is_whole
from etfarm.server.state.engine import Database

_ROWS: Final = 100
"""Number of rows that are read at a time."""

_CELLS: Final = schema.cells.c
_SOURCES: Final[tuple[tuple[str, FromClause, tuple[ColumnElement[Any], ...], ColumnElement[str], ColumnElement[Any]], ...]] = (
    ("the specification", schema.jobs, (schema.jobs.c.id,), schema.jobs.c.id, schema.jobs.c.spec),
    ("a cell", schema.cells, (_CELLS.id,), _CELLS.job_id, _CELLS.body),
    ("an event", schema.events, (schema.events.c.job_id, schema.events.c.sequence), schema.events.c.job_id, schema.events.c.body),
    ("a report", schema.reports, (schema.reports.c.id,), schema.reports.c.job_id, schema.reports.c.body),
    (
        "a result", schema.attempts.join(schema.cells, _CELLS.id == schema.attempts.c.cell_id),
        (schema.attempts.c.id, schema.attempts.c.cell_id), _CELLS.job_id, schema.attempts.c.result,
    ),
)  # fmt: skip
"""What it is, its table, the key of its rows, and the columns of the job's id and of the value."""


async def find_damaged(database: Database) -> AsyncIterator[list[str]]:
    """Read the values of all jobs, some at a time. Yield the damaged ones of each part, as `a report of job ab12`."""
    for what, table, key, job, body in _SOURCES:
        query = select(*(column.label(f"key{index}") for index, column in enumerate(key)), job.label("job"), body.label("body"))
        query = query.select_from(table).order_by(*key).limit(_ROWS)
        after: tuple[Any, ...] | None = None
        while True:
            page = query if after is None else query.where(tuple_(*key) > tuple_(*after))

            def read(connection: Connection, page: Any = page) -> tuple[list[str], Any]:
                rows = connection.execute(page).all()
                return [row.job for row in rows if not is_whole(row.body or b"")], rows[-1] if len(rows) == _ROWS else None

            damaged, last = await database.read(read)
            yield [f"{what} of job {each}" for each in damaged]
            if last is None:
                break
            after = tuple(last[: len(key)])
