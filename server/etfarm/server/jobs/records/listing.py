"""Jobs for lists and watchers, shortened so that they always fit into a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import Connection, func, select

from etfarm.server.jobs import model
from etfarm.server.jobs.records.tags import tags_of
from etfarm.server.state import schema
from etfarm.server.state.cut import fit, shorten
from etfarm.server.state.varint import encode_varint, read_varint
from etfarm.v1 import common_pb2, job_pb2
from etfarm.v1.job_pb2 import Cell, Job, JobEvent

LIST_BYTES: Final = 4 << 20
"""Maximum size of a page of jobs, unless a single job is larger: serializing a page blocks the event loop."""

JOB_BYTES: Final = 32 << 20
"""Maximum size of one job with its spec: half of a message's maximum."""

_CELLS_BYTES: Final = 4 << 20
"""Maximum total size of a job's cells in a list."""

_EVENT_BYTES: Final = 1 << 20
_EVENTS_BYTES: Final = 8 << 20
_EVENTS: Final = 500

_NAME: Final = 1_000
LABELS_BYTES: Final = 64 << 10
"""Size of the beginning of a spec, which contains its labels."""


def listed_job(connection: Connection, job_id: str) -> Job | None:
    """Return a job without its spec and with long texts shortened; None if the job does not exist."""
    jobs = schema.jobs.c
    columns = [jobs.id, jobs.owner, jobs.project, jobs.submitted_at, jobs.finished_at]
    beginnings = [func.substr(jobs.name, 1, _NAME + 1).label("name"), func.substr(jobs.spec, 1, LABELS_BYTES).label("spec")]
    row = connection.execute(select(*columns, *beginnings).where(jobs.id == job_id)).one_or_none()
    if row is None:
        return None
    job = Job(id=row.id, name=shorten(row.name or "", _NAME), owner=row.owner, project=row.project)
    job.tags.extend(tags_of(connection, row.id))
    job.labels.update(labels_of(row.spec or b""))
    job.cells.extend(_listed_cells(connection, job_id))
    job.state = model.job_state(job.cells)
    job.create_time.FromDatetime(row.submitted_at)
    if row.finished_at is not None:
        job.end_time.FromDatetime(row.finished_at)
    return job


def _listed_cells(connection: Connection, job_id: str) -> Sequence[Cell]:
    cells = schema.cells.c
    of_job = cells.job_id == job_id
    count, total = connection.execute(select(func.count(), func.sum(func.length(cells.body))).where(of_job)).one()
    most = _CELLS_BYTES if (total or 0) <= _CELLS_BYTES else _CELLS_BYTES // count
    listed = []
    for body in connection.execute(select(cells.body).where(of_job).order_by(cells.index)).scalars():
        cell = Cell.FromString(body)
        if len(body) > most:
            fit(cell, most)
        listed.append(cell)
    return listed


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
            entry = job_pb2.JobSpec.FromString(b"\x12" + encode_varint(size) + spec[at : at + size])
            labels.update(entry.labels)
        at += size
    return labels


def listed_events(connection: Connection, job_id: str, after: int) -> Sequence[JobEvent]:
    """Return the next events of a job, limited to what one response should hold in memory; empty if there are no more."""
    table = schema.events
    query = select(table.c.body).where(table.c.job_id == job_id, table.c.sequence > after).order_by(table.c.sequence)
    events: list[JobEvent] = []
    bytes_left = _EVENTS_BYTES
    for body in connection.execute(query.limit(_EVENTS)).scalars():
        event = JobEvent.FromString(body)
        if len(body) > _EVENT_BYTES:
            fit(event, _EVENT_BYTES)
        events.append(event)
        bytes_left -= len(body)
        if bytes_left < 0:
            break
    return events


def state_of(connection: Connection, job_id: str) -> job_pb2.JobState.ValueType:
    """Return a job's state, derived from the states of its cells."""
    names = connection.execute(select(schema.cells.c.state).where(schema.cells.c.job_id == job_id).distinct()).scalars()
    return model.job_state(Cell(state=common_pb2.CellState.Value(f"CELL_STATE_{name}")) for name in names)
