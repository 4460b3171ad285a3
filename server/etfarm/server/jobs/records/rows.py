"""Database rows of jobs, cells and attempts: reading and writing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import Connection, Executable, select

from etfarm.server.access.scope import Scope
from etfarm.server.jobs import model
from etfarm.server.jobs.records.listing import listed_job, read_cells
from etfarm.server.jobs.records.tags import LATEST, find_tag, tags_of
from etfarm.server.state import schema
from etfarm.server.state.bodies import seal, unseal
from etfarm.server.state.sql import Insert, insert
from etfarm.v1 import agent_pb2, common_pb2, job_pb2
from etfarm.v1.job_pb2 import Cell, Job
from etfarm.wire.errors import EtfarmError, error_for

_LISTED_JOBS: Final = 5
"""Maximum number of jobs that an ambiguous name lists."""


def job_not_found(key: str, what: str = "There is no job") -> EtfarmError:
    """Return the error for a job that does not exist or that the caller may not see, which must be indistinguishable."""
    return error_for("JOB_NOT_FOUND", f"{what} {key!r}.", "See `etfarm jobs list`.", job=key)


def job_row(connection: Connection, job_id: str, *, with_spec: bool = True) -> Job:
    """Return the job from the database. Without the spec, long texts are shortened as well.

    Raises:
        JOB_NOT_FOUND: no job has the id.
    """
    job = _whole_job(connection, job_id) if with_spec else listed_job(connection, job_id)
    if job is None:
        raise job_not_found(job_id)
    return job


def _whole_job(connection: Connection, job_id: str) -> Job | None:
    row = connection.execute(select(schema.jobs).where(schema.jobs.c.id == job_id)).one_or_none()
    if row is None:
        return None
    job = Job(
        id=row.id, name=row.name, owner=row.owner, project=row.project, tags=tags_of(connection, row.id),
        create_time=row.submitted_at, end_time=row.finished_at,
    )  # fmt: skip
    job.spec.CopyFrom(unseal(job_pb2.JobSpec, row.spec, "the specification", job_id))
    job.labels.update(job.spec.labels)
    job.cells.extend(read_cells(connection, job_id))
    job.state = model.job_state(job.cells)
    return job


def find_id(key: str, scope: Scope) -> Executable:
    """Return the query for the id of a scope's job whose id is `key`."""
    return select(schema.jobs.c.id).where(scope.clause(schema.jobs.c.project), schema.jobs.c.id == key)


def resolve_job(connection: Connection, key: str, scope: Scope) -> str:
    """Return the id of the job that a key refers to; see `Journal.get`.

    Raises:
        JOB_NOT_FOUND: the scope has no such job, or several.
    """
    jobs = schema.jobs.c
    visible = select(jobs.id).where(scope.clause(jobs.project))
    if key == LATEST:
        in_active = visible.where(jobs.project == scope.active) if scope.active else visible
        matching: Sequence[str] = connection.execute(in_active.order_by(jobs.number.desc()).limit(1)).scalars().all()
    else:
        exact: str | None = connection.execute(find_id(key, scope)).scalar()
        if exact is not None:
            return exact
        if (tag := find_tag(connection, key, scope)) is not None:
            return tag.job_id
        prefix = visible.where(jobs.id.startswith(key, autoescape=True)).limit(2)
        matching = connection.execute(prefix).scalars().all() if len(key) >= 4 else []
        if len(matching) == 1:
            return matching[0]
        named = visible.where(jobs.name == key).order_by(jobs.number.desc()).limit(_LISTED_JOBS + 1)
        if with_name := connection.execute(named).scalars().all():
            matching = list(dict.fromkeys([*with_name, *matching]))
            if len(matching) > 1:
                raise _several_named(key, matching)
    if len(matching) != 1:
        raise job_not_found(key, "Several jobs begin with" if matching else "There is no job")
    return matching[0]


def _several_named(name: str, ids: Sequence[str]) -> EtfarmError:
    more = ", ..." if len(ids) > _LISTED_JOBS else ""
    return error_for(
        "JOB_NOT_FOUND",
        f"Several jobs have the name {name!r} or an id that begins with it: {', '.join(ids[:_LISTED_JOBS])}{more}.",
        "Give an id, the newest of these is first; or tag one: `etfarm report tag ID NAME`.",
        job=name,
    )


def _upsert_of_attempts(*changes: str) -> Insert:
    row = insert(schema.attempts)
    return row.on_conflict_do_update(index_elements=["id", "cell_id"], set_={name: row.excluded[name] for name in changes})


_ATTEMPT: Final = _upsert_of_attempts("finished_at", "error")
_ATTEMPT_WITH_RESULT: Final = _upsert_of_attempts("finished_at", "error", "result")


def write_attempt(connection: Connection, cell: Cell, result: agent_pb2.CandidateResult | None) -> None:
    """Write the cell's last attempt, with its result if that has arrived."""
    attempt = cell.attempts[-1]
    known = {"id": attempt.id, "cell_id": cell.id, "device_id": attempt.device_id, "started_at": to_utc(attempt.start_time)}
    changes: dict[str, object] = {
        "finished_at": to_utc(attempt.end_time) if attempt.HasField("end_time") else None,
        "error": attempt.error.SerializeToString() if attempt.HasField("error") else None,
    }
    if result is None:
        connection.execute(_ATTEMPT, known | changes)
    else:
        connection.execute(_ATTEMPT_WITH_RESULT, known | changes | {"result": seal(result)})


def state_name(cell: Cell) -> str:
    """Return the name of the cell's state as stored in the database."""
    return common_pb2.CellState.Name(cell.state).removeprefix("CELL_STATE_")


def to_utc(stamp: object) -> datetime:
    """Return a protobuf timestamp as a datetime in UTC."""
    return stamp.ToDatetime(UTC)  # type: ignore[attr-defined,no-any-return]
