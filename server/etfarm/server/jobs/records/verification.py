"""A check of all stored values of jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import accumulate
from typing import Any, Final

from google.protobuf.message import Message
from sqlalchemy import ColumnElement, Connection, FromClause, Row, func, select, tuple_

from etfarm.server.state import schema
from etfarm.server.state.bodies import ValueDamaged, unseal
from etfarm.server.state.engine import Database
from etfarm.v1 import agent_pb2, job_pb2, report_pb2

_ROWS: Final = 100
"""Maximum number of rows that are read at a time."""
PAGE_BYTES: Final = 16 << 20
"""Maximum size of their values together; one value may be larger."""

_CELLS: Final = schema.cells.c
_Source = tuple[str, type[Message], FromClause, tuple[ColumnElement[Any], ...], ColumnElement[str], ColumnElement[Any]]
_SOURCES: Final[tuple[_Source, ...]] = (
    ("the specification", job_pb2.JobSpec, schema.jobs, (schema.jobs.c.id,), schema.jobs.c.id, schema.jobs.c.spec),
    ("a cell", job_pb2.Cell, schema.cells, (_CELLS.id,), _CELLS.job_id, _CELLS.body),
    (
        "an event", job_pb2.JobEvent, schema.events, (schema.events.c.job_id, schema.events.c.sequence), schema.events.c.job_id,
        schema.events.c.body,
    ),
    ("a report", report_pb2.Report, schema.reports, (schema.reports.c.id,), schema.reports.c.job_id, schema.reports.c.body),
    (
        "a result", agent_pb2.CandidateResult, schema.attempts.join(schema.cells, _CELLS.id == schema.attempts.c.cell_id),
        (schema.attempts.c.id, schema.attempts.c.cell_id), _CELLS.job_id, schema.attempts.c.result,
    ),
)  # fmt: skip
"""What it is, its message, its table, the key of its rows, and the columns of the job's id and of the value."""


async def find_damaged(database: Database) -> AsyncIterator[list[str]]:
    """Read the values of all jobs, some at a time. Yield the damaged ones of each part, as `a report of job ab12`."""
    for what, kind, table, key, job, body in _SOURCES:
        query = select(*(column.label(f"key{index}") for index, column in enumerate(key)), job.label("job"), body.label("body"))
        query = query.select_from(table).order_by(*key)
        lengths = select(func.length(body)).select_from(table).order_by(*key).limit(_ROWS)
        after: tuple[Any, ...] | None = None
        while True:
            page, page_lengths = query, lengths
            if after is not None:
                page, page_lengths = (query.where(is_later := tuple_(*key) > tuple_(*after)), lengths.where(is_later))

            def read(
                connection: Connection, page: Any = page, page_lengths: Any = page_lengths, kind: type[Message] = kind
            ) -> tuple[list[str], Row[Any] | None]:
                ends = accumulate(length or 0 for length in connection.execute(page_lengths).scalars())
                count = sum(end <= PAGE_BYTES for end in ends)
                rows = connection.execute(page.limit(max(count, 1))).all()
                return [row.job for row in rows if not _is_whole(kind, row.body or b"")], rows[-1] if rows else None

            damaged, last = await database.read(read)
            if last is None:
                break
            yield [f"{what} of job {each}" for each in damaged]
            after = tuple(last[: len(key)])


def _is_whole(kind: type[Message], body: bytes) -> bool:
    """Return whether a value can be read."""
    try:
        unseal(kind, body, "", "")
    except ValueDamaged:
        return False
    return True
