"""The journal: jobs, changes of cells and attempts, each written here before it is announced."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Final

import structlog
from sqlalchemy import Connection, bindparam, func, select, update

from etfarm.server.access.scope import DEFAULT_PROJECT, Scope
from etfarm.server.jobs import model
from etfarm.server.jobs.records.farm_watch import FarmWatch
from etfarm.server.jobs.records.listing import LIST_BYTES, STATES, brief, listed_events, listed_job, state_of
from etfarm.server.jobs.records.quotas import Quotas
from etfarm.server.jobs.records.reports import ReportRecords, report_row
from etfarm.server.jobs.records.requests import Request, request_id_used
from etfarm.server.jobs.records.rows import find_id, job_not_found, job_row, resolve_job, state_name, to_utc, write_attempt
from etfarm.server.jobs.records.selection import ALL_JOBS, JobFilter, select_jobs
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.notices.outbox import Outbox
from etfarm.server.state import schema
from etfarm.server.state.bodies import ValueDamaged, seal, unseal
from etfarm.server.state.engine import Database
from etfarm.v1 import agent_pb2, job_pb2, report_pb2
from etfarm.v1.job_pb2 import Cell, Job, JobEvent
from etfarm.wire import status
from etfarm.wire.errors import FarmError, Kind, error_for

log = structlog.get_logger()


class StaleVersion(FarmError):
    """A change that was not written because the cell has changed in the meantime."""

    reason = "STALE_VERSION"
    kind = Kind.ABORTED


_CHANGE_CELL: Final = (
    update(schema.cells)
    .where(schema.cells.c.id == bindparam("cell"), schema.cells.c.version == bindparam("former"))
    .values(state=bindparam("new_state"), version=bindparam("new_version"), body=bindparam("new_body"))
)
_COUNT_EVENT: Final = (
    update(schema.jobs)
    .where(schema.jobs.c.id == bindparam("job"))
    .values(last_sequence=schema.jobs.c.last_sequence + 1)
    .returning(schema.jobs.c.last_sequence, STATES.label("states"))
)
_END_JOB: Final = (
    update(schema.jobs)
    .where(schema.jobs.c.id == bindparam("job"))
    .values(finished_at=bindparam("end"), last_sequence=schema.jobs.c.last_sequence + 1)
    .returning(schema.jobs.c.last_sequence)
)
_LAST_EVENT: Final = select(schema.jobs.c.last_sequence, STATES.label("states")).where(schema.jobs.c.id == bindparam("job"))
_ADD_EVENT: Final = schema.events.insert()
_ADD_REPORT: Final = schema.reports.insert()
_OF_REQUEST: Final = select(schema.jobs.c.id, schema.jobs.c.request_digest, schema.jobs.c.project).where(
    schema.jobs.c.owner == bindparam("of_owner"), schema.jobs.c.request_id == bindparam("request")
)
_ADD_JOB: Final = schema.jobs.insert().values(
    number=select(func.coalesce(func.max(schema.jobs.c.number), 0) + 1).scalar_subquery()
)
_ADD_CELLS: Final = schema.cells.insert()
_ADD_MODELS: Final = schema.job_models.insert()


class Journal:
    """Database access to jobs. Each change is announced right after its transaction.

    Args:
        outbox: gets the notices of jobs' ends, in the transactions that end them; without notices if None.
    """

    def __init__(
        self,
        database: Database,
        announcer: Announcer,
        now: Callable[[], datetime],
        quotas: Quotas | None = None,
        outbox: Outbox | None = None,
    ) -> None:
        self._outbox = outbox
        self._quotas = quotas or Quotas()
        self._database = database
        self._announcer = announcer
        self._now = now
        self.reports = ReportRecords(database)
        self.farm = FarmWatch(database, announcer)

    async def submit(self, job: Job, request: Request) -> tuple[Job, bool]:
        """Write a new job, or return the job that the owner already submitted with this request.

        Returns:
            The job, and whether it is new.

        Raises:
            REQUEST_ID_USED: the owner has sent the request's id with something else.
            QUOTA_EXCEEDED: the owner or the project exceeds a quota of live jobs.
        """
        written, event = await self._database.write(lambda connection: self.write_new(connection, job, request), durable=True)
        if event is not None:
            self.farm.add(written)
            self._announcer.announce(job.id, event)
        return written, event is not None

    def write_new(self, connection: Connection, job: Job, request: Request) -> tuple[Job, JobEvent | None]:
        """Write a new job in the caller's transaction; see `submit`. Return it and, if it is new, the event to announce."""
        if (known := _job_of(connection, job.owner, request)) is not None:
            return known, None
        self._quotas.check_job(connection, job)
        connection.execute(
            _ADD_JOB,
            {
                "id": job.id,
                "name": job.name,
                "owner": job.owner,
                "request_id": request.id,
                "request_digest": request.digest,
                "priority": job.spec.priority,
                "project": job.project or DEFAULT_PROJECT,
                "spec": seal(job.spec),
                "last_sequence": 1,
                "submitted_at": to_utc(job.create_time),
            },
        )
        connection.execute(
            _ADD_CELLS,
            [
                {
                    "id": cell.id,
                    "job_id": job.id,
                    "index": cell.index,
                    "state": state_name(cell),
                    "version": cell.version,
                    "body": seal(cell),
                }
                for cell in job.cells
            ],
        )
        models = {cell.candidate_name for cell in job.cells}
        connection.execute(_ADD_MODELS, [{"job_id": job.id, "model": name} for name in sorted(models)])
        if self._outbox is not None and job.spec.notify_urls:
            self._outbox.hold(connection, job)
        # Fill in what reading the job would, without reading it: its spec may have megabytes.
        job.state, job.project = model.job_state(job.cells), job.project or DEFAULT_PROJECT
        job.labels.update(job.spec.labels)
        job.spec.SetInParent()
        event = self._event(JobEvent(job=brief(job)), 1, job.state)
        _add_events(connection, job.id, [event])
        return job, event

    async def submitted(self, owner: str, request: Request) -> Job | None:
        """Return the job that the owner submitted with this request; None if it does not exist.

        Raises:
            REQUEST_ID_USED: the owner has sent the request's id with something else.
        """
        return await self._database.read(partial(_job_of, owner=owner, request=request))

    async def change(
        self, after: Cell, *, report: report_pb2.Report | None = None, result: agent_pb2.CandidateResult | None = None
    ) -> Cell:
        """Write a cell's new version with its report or result, and announce the change.

        Args:
            report: the cell's report, if this is its last change.
            result: the result of the cell's last attempt, if that has ended and is not written yet.

        Raises:
            StaleVersion: the journal does not have the previous version of the cell.
        """
        final = after.state in model.TERMINAL
        await self._write(
            after.job_id, lambda c: self.write_change(c, after, report, result), durable=final or result is not None
        )
        return after

    async def fail(self, job: Job, error: FarmError) -> None:
        """End a job's live cells with an error and without reports, which need what is damaged."""
        for cell in job.cells:
            if cell.state not in model.TERMINAL:
                after = model.advance(cell, model.FAILED, at=self._now())
                after.error.CopyFrom(status.to_proto(error))
                await self.change(after)

    async def change_together(self, changes: Sequence[tuple[Cell, agent_pb2.CandidateResult | None]]) -> None:
        """Write new versions of several live cells of a job with the results of their last attempts, all or none.

        Raises:
            StaleVersion: see `change`; nothing was written.
        """

        def write(connection: Connection) -> list[JobEvent]:
            return [event for after, result in changes for event in self.write_change(connection, after, None, result)]

        await self._write(changes[0][0].job_id, write, durable=any(result is not None for _, result in changes))

    async def _write(self, job_id: str, write: Callable[[Connection], list[JobEvent]], *, durable: bool) -> None:
        for event in await self._database.write(write, durable=durable):
            self._announcer.announce(job_id, event)
            if self._outbox is not None and event.WhichOneof("event") == "job":
                self._outbox.announce_released(job_id)

    def write_change(
        self,
        connection: Connection,
        after: Cell,
        report: report_pb2.Report | None,
        result: agent_pb2.CandidateResult | None,
    ) -> list[JobEvent]:
        """Write a cell's new version in the caller's transaction; see `change`. Return the events to announce."""
        values = {"new_state": state_name(after), "new_version": after.version, "new_body": seal(after)}
        before = {"cell": after.id, "former": after.version - 1}
        if connection.execute(_CHANGE_CELL, before | values).rowcount != 1:
            raise StaleVersion(f"Cell {after.id} is no longer at version {after.version - 1}.", cell=after.id)
        if after.attempts:
            write_attempt(connection, after, result)
        if report is not None:
            connection.execute(_ADD_REPORT, report_row(after, report))
        counted = connection.execute(_COUNT_EVENT, {"job": after.job_id}).one()
        state = state_of(counted.states)
        written = [self._event(JobEvent(cell=after), counted.last_sequence, state)]
        if after.state in model.TERMINAL and model.is_terminal(state):
            written.append(self._end_job(connection, after.job_id, state))
        _add_events(connection, after.job_id, written)
        return written

    def _end_job(self, connection: Connection, job_id: str, state: job_pb2.JobState.ValueType) -> JobEvent:
        """Write the end of a job whose cells are terminal, with its notices, and return its event, which is not written yet."""
        is_awaited = self._outbox is not None and self._outbox.awaits_end(connection, job_id)
        job = listed_job(connection, job_id, with_cells=is_awaited)
        assert job is not None, job_id
        job.state = state
        job.end_time.FromDatetime(self._now())
        sequence = connection.execute(_END_JOB, {"job": job_id, "end": to_utc(job.end_time)}).scalar_one()
        if self._outbox is not None and is_awaited:
            self._outbox.job_ended(connection, job)
        job.ClearField("cells")
        return self._event(JobEvent(job=job), sequence, state)

    def _event(self, event: JobEvent, sequence: int, state: job_pb2.JobState.ValueType) -> JobEvent:
        event.sequence = sequence
        event.time.FromDatetime(self._now())
        event.job_state = state
        return event

    async def get(self, key: str, scope: Scope) -> Job:
        """Return the job with an id, else tag, else unique prefix of an id (at least 4 characters), else name; or "latest".

        Args:
            scope: the projects that the caller sees; "latest" is the newest job of the active project.

        Raises:
            JOB_NOT_FOUND: the scope has no such job, or several, which the message lists if they share a name.
        """
        return await self._database.read(lambda connection: job_row(connection, resolve_job(connection, key, scope)))

    async def outline(self, key: str, scope: Scope) -> Job:
        """Return the job of `get` without its spec, which may be damaged; raise as it does."""
        return await self._database.read(lambda c: job_row(c, resolve_job(c, key, scope), with_spec=False))

    async def find(self, key: str, scope: Scope) -> str:
        """Return the id of the job that `get` returns; raise as it does."""
        # Most keys are ids, which take one statement.
        rows = await self._database.query(find_id(key, scope))
        return str(rows[0].id) if rows else await self._database.read(partial(resolve_job, key=key, scope=scope))

    async def list(
        self, size: int, before: int | None, scope: Scope, filter_: JobFilter = ALL_JOBS
    ) -> tuple[Sequence[Job], int | None]:
        """Return a page of a scope's jobs without specs, newest first, and the start of the next page.

        Large jobs and a filter with few matches shorten it.
        """

        def read(connection: Connection) -> tuple[Sequence[Job], int | None]:
            rows, following = select_jobs(connection, size, before, scope, filter_)
            jobs: list[Job] = []
            bytes_left = LIST_BYTES
            for row in rows:
                job = job_row(connection, row.id, with_spec=False)
                bytes_left -= job.ByteSize()
                if jobs and bytes_left < 0:
                    return jobs, row.number
                jobs.append(job)
            return jobs, following

        return await self._database.read(read)

    async def live(self) -> Sequence[Job]:
        """Return the jobs that are not terminal, oldest first; a server resumes them at its start.

        A job whose specification is damaged has none.
        """

        def read(connection: Connection) -> Sequence[Job]:
            query = select(schema.jobs.c.id).where(schema.jobs.c.finished_at.is_(None)).order_by(schema.jobs.c.number)
            return [_live_job(connection, job_id) for job_id in connection.execute(query).scalars().all()]

        return await self._database.read(read)

    async def watch(self, job_id: str, after: int) -> AsyncIterator[JobEvent]:
        """Yield the events after a sequence number, then new ones until the job is terminal.

        Raises:
            SEQUENCE_UNKNOWN: no event has the number `after` yet.
            JOB_NOT_FOUND: the job is deleted while its events are read.
        """
        with self._announcer.subscribe(job_id) as subscription:
            state, last, page = await self._database.read(partial(_beginning, job_id=job_id, after=after))
            if after > last:
                raise error_for(
                    "SEQUENCE_UNKNOWN",
                    f"`after` must be 0 to {last}, the number of the job's events, got {after}.",
                    "Watch from 0.",
                    last=last,
                )
            seen = after
            while seen < last:
                # A page may contain events after `last`, which happened in the meantime, including the end of the job.
                for event in page:
                    seen = event.sequence
                    state = _state_after(event, state)
                    yield event
                if seen < last and not (page := await self._database.read(partial(listed_events, job_id=job_id, after=seen))):
                    raise job_not_found(job_id)  # deleted in the meantime
            while not model.is_terminal(state):
                for event in await subscription.take():
                    if not event.HasField("sequence"):
                        yield event
                        continue
                    # Read the events again that the subscription of a slow watcher dropped.
                    while seen < event.sequence - 1:
                        for missed in await self._database.read(partial(listed_events, job_id=job_id, after=seen)):
                            seen = missed.sequence
                            state = _state_after(missed, state)
                            yield missed
                    if event.sequence > seen:
                        seen = event.sequence
                        state = _state_after(event, state)
                        yield event

    async def results_of(self, attempt_id: str) -> dict[str, agent_pb2.CandidateResult]:
        """Return an attempt's results by cell id, in the order of the job's cells. A missing result is an empty message."""
        query = (
            select(schema.attempts.c.cell_id, schema.attempts.c.result, schema.cells.c.job_id)
            .join(schema.cells, schema.cells.c.id == schema.attempts.c.cell_id)
            .where(schema.attempts.c.id == attempt_id)
            .order_by(schema.cells.c.index)
        )
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return {row.cell_id: unseal(agent_pb2.CandidateResult, row.result or b"", "a result", row.job_id) for row in rows}


def _job_of(connection: Connection, owner: str, request: Request) -> Job | None:
    row = connection.execute(_OF_REQUEST, {"of_owner": owner, "request": request.id}).one_or_none()
    if row is None:
        return None
    if row.request_digest is not None and not request.has_created(row.request_digest, row.project or DEFAULT_PROJECT):
        raise request_id_used(request.id, row.id)
    return job_row(connection, row.id)


def _live_job(connection: Connection, job_id: str) -> Job:
    try:
        return job_row(connection, job_id)
    except ValueDamaged as damaged:
        log.error("a stored value is damaged", job=job_id, what=damaged.metadata["what"])
        return job_row(connection, job_id, with_spec=False)


def _add_events(connection: Connection, job_id: str, events: Sequence[JobEvent]) -> None:
    rows = [{"job_id": job_id, "sequence": event.sequence, "body": seal(event)} for event in events]
    connection.execute(_ADD_EVENT, rows)


def _state_after(event: JobEvent, before: job_pb2.JobState.ValueType) -> job_pb2.JobState.ValueType:
    """Return the job's state for a watcher: the job's own event ends the job, not that of its last cell."""
    return event.job_state if event.WhichOneof("event") == "job" else before


def _beginning(connection: Connection, job_id: str, after: int) -> tuple[job_pb2.JobState.ValueType, int, Sequence[JobEvent]]:
    """Return a job's state, the number of its last event, and the first of its events after a number."""
    row = connection.execute(_LAST_EVENT, {"job": job_id}).one_or_none()
    if row is None:
        raise job_not_found(job_id)
    return state_of(row.states), row.last_sequence, listed_events(connection, job_id, after)
