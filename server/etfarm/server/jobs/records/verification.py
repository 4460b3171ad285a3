"""A check of all stored values."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import accumulate
from typing import Any, Final

from google.protobuf.message import Message
from sqlalchemy import ColumnElement, Connection, FromClause, Row, func, select, tuple_

from etfarm.server.state import schema
from etfarm.server.state.bodies import ValueDamaged, unseal
from etfarm.server.state.engine import Database
from etfarm.v1 import agent_pb2, compile_pb2, device_pb2, job_pb2, report_pb2

_ROWS: Final = 100
"""Maximum number of rows that are read at a time."""
PAGE_BYTES: Final = 16 << 20
"""Maximum size of their values together; one value may be larger."""

_CELLS: Final = schema.cells.c
_EVENTS: Final = schema.events.c
_REPORTS: Final = schema.reports.c
_Source = tuple[str, type[Message], FromClause, tuple[ColumnElement[Any], ...], ColumnElement[str], ColumnElement[Any]]
_SOURCES: Final[tuple[_Source, ...]] = (
    ("the specification of job {}", job_pb2.JobSpec, schema.jobs, (schema.jobs.c.id,), schema.jobs.c.id, schema.jobs.c.spec),
    ("a cell of job {}", job_pb2.Cell, schema.cells, (_CELLS.id,), _CELLS.job_id, _CELLS.body),
    ("an event of job {}", job_pb2.JobEvent, schema.events, (_EVENTS.job_id, _EVENTS.sequence), _EVENTS.job_id, _EVENTS.body),
    ("a report of job {}", report_pb2.Report, schema.reports, (_REPORTS.id,), _REPORTS.job_id, _REPORTS.body),
    (
        "a result of job {}", agent_pb2.CandidateResult,
        schema.attempts.join(schema.cells, _CELLS.id == schema.attempts.c.cell_id),
        (schema.attempts.c.id, schema.attempts.c.cell_id), _CELLS.job_id, schema.attempts.c.result,
    ),
    *(
        (what, kind, table, tuple(table.c[name] for name in key), table.c[key[0]], table.c.body)
        for what, kind, table, *key in (
            ("the device {}", device_pb2.Device, schema.devices, "id"),
            ("the settings of device {}", device_pb2.DeviceSettings, schema.device_settings, "device_id"),
            ("a reading of device {}", device_pb2.DeviceTelemetry, schema.device_telemetry, "device_id", "minute"),
            ("a health event of device {}", device_pb2.HealthEvent, schema.health_events, "device_id", "number"),
            ("the reservation {}", device_pb2.Reservation, schema.reservations, "id"),
            ("the bundle {}", agent_pb2.RunnerBundle, schema.bundles, "digest"),
            ("the compilation {}", compile_pb2.Compilation, schema.compilations, "key"),
            ("the shared stages {}", compile_pb2.Compilation, schema.stage_results, "key"),
            ("the analysis {}", report_pb2.Report, schema.analyses, "key"),
        )
    ),
)  # fmt: skip
"""How people name it with an id, its message, its table, the key of its rows, and the columns of the id and of the value."""


async def find_damaged(database: Database) -> AsyncIterator[list[str]]:
    """Read all values, some at a time. Yield the damaged ones of each part, as `a report of job ab12` or `the device pi-1`."""
    for what, kind, table, key, named, body in _SOURCES:
        query = select(
            *(column.label(f"key{index}") for index, column in enumerate(key)), named.label("named"), body.label("body")
        )
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
                return [row.named for row in rows if not _is_whole(kind, row.body or b"")], rows[-1] if rows else None

            damaged, last = await database.read(read)
            if last is None:
                break
            yield [what.format(each) for each in damaged]
            after = tuple(last[: len(key)])


def _is_whole(kind: type[Message], body: bytes) -> bool:
    """Return whether a value can be read."""
    try:
        unseal(kind, body, "", "")
    except ValueDamaged:
        return False
    return True
