"""Jobs for lists and watchers, shortened so that they always fit into a message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import structlog
from google.protobuf.message import DecodeError
from sqlalchemy import Connection, bindparam, func, select

from etfarm.server.jobs import model
from etfarm.server.jobs.records.tags import tags_of
from etfarm.server.state import schema
from etfarm.server.state.bodies import ValueDamaged, unseal
from etfarm.server.state.cut import fit, shorten
from etfarm.server.state.varint import encode_varint, read_varint
from etfarm.v1 import common_pb2, job_pb2
from etfarm.v1.job_pb2 import Cell, Job, JobEvent
from etfarm.wire import status

log = structlog.get_logger()

LIST_BYTES: Final = 4 << 20
"""Maximum size of a page of jobs, unless a single job is larger: serializing a page blocks the event loop."""

JOB_BYTES: Final = 32 << 20
"""Maximum size of one job with its spec: half of a message's maximum."""

_CELLS_BYTES: Final = 4 << 20
"""Maximum total size of a job's cells in a list."""

_EVENT_BYTES: Final = 1 << 20
_EVENTS_BYTES: Final = 1 << 20
"""Maximum size of the events that are in memory for a watcher, but for one event: watchers may stop reading for ever."""
_EVENTS: Final = 500

_NAME: Final = 1_000
LABELS_BYTES: Final = 64 << 10
"""Size of the beginning of a spec, which contains its labels."""


# Statements of each change of a cell: SQLAlchemy takes several times longer to build them than to execute them.
_JOB: Final = select(
    schema.jobs.c.id, schema.jobs.c.owner, schema.jobs.c.project, schema.jobs.c.submitted_at, schema.jobs.c.finished_at,
    func.substr(schema.jobs.c.name, 1, _NAME + 1).label("name"), func.substr(schema.jobs.c.spec, 1, LABELS_BYTES).label("spec"),
).where(schema.jobs.c.id == bindparam("job"))  # fmt: skip
_SIZES: Final = select(func.count(), func.sum(func.length(schema.cells.c.body))).where(schema.cells.c.job_id == bindparam("job"))
_CELLS: Final = (
    select(
        schema.cells.c.id, schema.cells.c.index.label("place"), schema.cells.c.state, schema.cells.c.version, schema.cells.c.body
    )
    .where(schema.cells.c.job_id == bindparam("job"))
    .order_by(schema.cells.c.index)
)
_DISTINCT: Final = select(schema.cells.c.state).where(schema.cells.c.job_id == bindparam("job")).distinct().subquery()
STATES: Final = select(func.aggregate_strings(_DISTINCT.c.state, ",")).scalar_subquery()
"""The states of the cells of the job `job`, for `state_of`."""
_EVENTS_AFTER: Final = (
    select(schema.events.c.body)
    .where(schema.events.c.job_id == bindparam("job"), schema.events.c.sequence > bindparam("after"))
    .order_by(schema.events.c.sequence)
    .limit(_EVENTS)
)


def listed_job(connection: Connection, job_id: str, *, with_cells: bool = True) -> Job | None:
    """Return a job without its spec and with long texts shortened; None if the job does not exist.

    Without its cells, the job has no state.
    """
    row = connection.execute(_JOB, {"job": job_id}).one_or_none()
    if row is None:
        return None
    job = Job(
        id=row.id, name=shorten(row.name or "", _NAME), owner=row.owner, project=row.project, tags=tags_of(connection, row.id),
        create_time=row.submitted_at, end_time=row.finished_at,
    )  # fmt: skip
    job.labels.update(labels_of(row.spec or b""))
    if with_cells:
        job.cells.extend(_listed_cells(connection, job_id))
        job.state = model.job_state(job.cells)
    return job


def list_job(job: Job) -> Job:
    """Return a copy of a new job, which has no tags yet, in the form that `listed_job` reads it."""
    listed = brief(job)
    listed.name = shorten(job.name, _NAME)
    sizes = [cell.ByteSize() for cell in job.cells]
    most = _CELLS_BYTES if sum(sizes) <= _CELLS_BYTES else _CELLS_BYTES // len(sizes)
    for cell, size_bytes in zip(job.cells, sizes, strict=True):
        listed.cells.add().CopyFrom(cell)
        if size_bytes > most:
            fit(listed.cells[-1], most)
    return listed


def brief(job: Job) -> Job:
    """Return a copy of a job without its spec and cells, which may be too large to copy first."""
    copy = Job()
    for field, value in job.ListFields():
        if field.name in ("spec", "cells"):
            continue
        if field.is_repeated or field.message_type is not None:
            getattr(copy, field.name).MergeFrom(value)
        else:
            setattr(copy, field.name, value)
    return copy


def _listed_cells(connection: Connection, job_id: str) -> Sequence[Cell]:
    count, total = connection.execute(_SIZES, {"job": job_id}).one()
    most = _CELLS_BYTES if (total or 0) <= _CELLS_BYTES else _CELLS_BYTES // count
    listed = []
    for cell in read_cells(connection, job_id):
        if cell.ByteSize() > most:
            fit(cell, most)
        listed.append(cell)
    return listed


def read_cells(connection: Connection, job_id: str) -> Iterator[Cell]:
    """Yield a job's cells. One that is damaged has its state, and the damage as its error."""
    for row in connection.execute(_CELLS, {"job": job_id}):
        try:
            yield unseal(Cell, row.body, "a cell", job_id)
        except ValueDamaged as damaged:
            log.error("a stored value is damaged", job=job_id, cell=row.id, what=damaged.metadata["what"])
            state = common_pb2.CellState.Value(f"CELL_STATE_{row.state}")
            cell = Cell(id=row.id, job_id=job_id, index=row.place, state=state, version=row.version)
            cell.error.CopyFrom(status.to_proto(damaged))
            yield cell


def labels_of(spec: bytes) -> dict[str, str]:
    """Return the labels of a serialized JobSpec, possibly truncated, without decoding the fields after them."""
    number = job_pb2.JobSpec.DESCRIPTOR.fields_by_name["labels"].number
    labels: dict[str, str] = {}
    at, end = 0, len(spec)
    while at < end:
        tag, at = read_varint(spec, at, end)
        if tag & 7 != 2:
            break  # only texts and messages precede the labels
        size, at = read_varint(spec, at, end)
        if tag >> 3 > number or at == end or at + size > end:
            break
        if tag >> 3 == number:
            try:
                entry = job_pb2.JobSpec.FromString(b"\x12" + encode_varint(size) + spec[at : at + size])
            except DecodeError:
                break  # damage, which is reported where the whole value is read
            labels.update(entry.labels)
        at += size
    return labels


def listed_events(connection: Connection, job_id: str, after: int) -> Sequence[JobEvent]:
    """Return the next events of a job, limited to what one response should hold in memory; empty if there are no more."""
    events: list[JobEvent] = []
    bytes_left = _EVENTS_BYTES
    for body in connection.execute(_EVENTS_AFTER, {"job": job_id, "after": after}).scalars():
        event = unseal(JobEvent, body, "an event", job_id)
        if len(body) > _EVENT_BYTES:
            fit(event, _EVENT_BYTES)
        events.append(event)
        bytes_left -= len(body)
        if bytes_left < 0:
            break
    return events


def state_of(states: str | None) -> job_pb2.JobState.ValueType:
    """Return a job's state, derived from the states of its cells as `STATES` has them."""
    names = states.split(",") if states else []
    return model.job_state(Cell(state=common_pb2.CellState.Value(f"CELL_STATE_{name}")) for name in names)
