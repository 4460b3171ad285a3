"""The journal: every job, every change of a cell, every attempt is written here before anybody hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Final

from sqlalchemy import Connection, func, select, update
from sqlalchemy.dialects.sqlite import insert

from etfarm.server.access.scope import DEFAULT_PROJECT, Scope
from etfarm.server.jobs import model
from etfarm.server.jobs.records.listing import LIST_BYTES, listed_events, listed_job, state_of
from etfarm.server.jobs.records.quotas import Quotas
from etfarm.server.jobs.records.tags import LATEST, find_tag, tags_of
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.reports.latency.series import without_rows
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.v1 import agent_pb2, job_pb2, report_pb2
from etfarm.v1.job_pb2 import Cell, Job, JobEvent
from etfarm.wire.errors import FarmError, Kind, UserError

PAGE_BYTES: Final = 16 << 20
"""Of the reports of a page: a quarter of what a message may have, and one report is a few MiB at most."""


class JobNotFound(UserError):
    """No job has the id, and no single one the prefix."""

    reason = "JOB_NOT_FOUND"
    kind = Kind.NOT_FOUND


class ReportNotFound(UserError):
    """No report has the id."""

    reason = "REPORT_NOT_FOUND"
    kind = Kind.NOT_FOUND


class SequenceUnknown(UserError):
    """A watcher asks for events after one that has not happened."""

    reason = "SEQUENCE_UNKNOWN"
    kind = Kind.OUT_OF_RANGE


class StaleVersion(FarmError):
    """Somebody else changed the cell meanwhile; the change was not made."""

    reason = "STALE_VERSION"
    kind = Kind.ABORTED


class Journal:
    """Reads and writes jobs. `announcer` hears of each change right after its transaction."""

    def __init__(
        self, database: Database, announcer: Announcer, now: Callable[[], datetime], quotas: Quotas | None = None
    ) -> None:
        self._quotas = quotas or Quotas()
        self._database = database
        self._announcer = announcer
        self._now = now

    async def submit(self, job: Job, request_id: str) -> tuple[Job, bool]:
        """Writes a new job down, or finds the one that this owner submitted with the same request_id.

        Returns:
            The job and whether it is new.

        Raises:
            QuotaExceeded: its owner or project has too much under way.
        """

        def write(connection: Connection) -> tuple[Job, JobEvent | None]:
            known = select(schema.jobs.c.id).where(schema.jobs.c.owner == job.owner, schema.jobs.c.request_id == request_id)
            if (job_id := connection.execute(known).scalar()) is not None:
                return job_row(connection, job_id), None
            self._quotas.check_job(connection, job)
            number = (connection.execute(select(func.max(schema.jobs.c.number))).scalar() or 0) + 1
            connection.execute(
                schema.jobs.insert().values(
                    id=job.id, number=number, name=job.name, owner=job.owner, request_id=request_id, priority=job.spec.priority,
                    project=job.project or DEFAULT_PROJECT, spec=job.spec.SerializeToString(), last_sequence=0,
                    submitted_at=_utc(job.submitted_at),
                )
            )  # fmt: skip
            connection.execute(
                schema.cells.insert(),
                [
                    {"id": cell.id, "job_id": job.id, "index": cell.index, "state": _name(cell), "version": cell.version,
                     "body": cell.SerializeToString()}
                    for cell in job.cells
                ],
            )  # fmt: skip
            written = job_row(connection, job.id)
            return written, self._append(connection, job.id, JobEvent(job=_brief(written)), written.state)

        written, event = await self._database.write(write, durable=True)
        if event is not None:
            self._announcer.announce(job.id, event)
        return written, event is not None

    async def submitted(self, owner: str, request_id: str) -> Job | None:
        """The job that this owner submitted with the request_id."""
        query = select(schema.jobs.c.id).where(schema.jobs.c.owner == owner, schema.jobs.c.request_id == request_id)

        def read(connection: Connection) -> Job | None:
            job_id = connection.execute(query).scalar()
            return None if job_id is None else job_row(connection, job_id)

        return await self._database.read(read)

    async def change(
        self, after: Cell, *, report: report_pb2.Report | None = None, result: agent_pb2.CandidateResult | None = None
    ) -> Cell:
        """Writes a cell's new version down, with all that came with it, and tells the watchers.

        Args:
            report: of the cell, where this is its last change.
            result: of its last attempt, where that has ended.

        Raises:
            StaleVersion: the version before it is not what the journal has.
        """
        final = after.state in model.TERMINAL
        await self._write(after.job_id, lambda c: self._change(c, after, report, result), durable=final or result is not None)
        return after

    async def change_together(self, changes: Sequence[tuple[Cell, agent_pb2.CandidateResult | None]]) -> None:
        """Writes new versions of several live cells of one job down, with their last attempts' results: all or none.

        Raises:
            StaleVersion: as `change`; nothing was written.
        """

        def write(connection: Connection) -> list[JobEvent]:
            return [event for after, result in changes for event in self._change(connection, after, None, result)]

        await self._write(changes[0][0].job_id, write, durable=any(result is not None for _, result in changes))

    async def _write(self, job_id: str, write: Callable[[Connection], list[JobEvent]], *, durable: bool) -> None:
        for event in await self._database.write(write, durable=durable):
            self._announcer.announce(job_id, event)

    def _change(
        self,
        connection: Connection,
        after: Cell,
        report: report_pb2.Report | None,
        result: agent_pb2.CandidateResult | None,
    ) -> list[JobEvent]:
        before = (schema.cells.c.id == after.id) & (schema.cells.c.version == after.version - 1)
        values = {"state": _name(after), "version": after.version, "body": after.SerializeToString()}
        if connection.execute(update(schema.cells).where(before).values(values)).rowcount != 1:
            raise StaleVersion(f"Cell {after.id} is no longer at version {after.version - 1}.", cell=after.id)
        if after.attempts:
            _write_attempt(connection, after, result)
        if report is not None:
            connection.execute(schema.reports.insert().values(_report_row(after, report)))
        state = state_of(connection, after.job_id)
        written = [self._append(connection, after.job_id, JobEvent(cell=after), state)]
        if after.state in model.TERMINAL and model.is_terminal(state):
            job = job_row(connection, after.job_id, with_spec=False)
            job.finished_at.FromDatetime(self._now())
            row = {"finished_at": _utc(job.finished_at)}
            connection.execute(update(schema.jobs).where(schema.jobs.c.id == job.id).values(row))
            written.append(self._append(connection, job.id, JobEvent(job=_brief(job)), job.state))
        return written

    def _append(self, connection: Connection, job_id: str, event: JobEvent, state: job_pb2.JobState.ValueType) -> JobEvent:
        counted = update(schema.jobs).where(schema.jobs.c.id == job_id).values(last_sequence=schema.jobs.c.last_sequence + 1)
        event.sequence = connection.execute(counted.returning(schema.jobs.c.last_sequence)).scalar_one()
        event.at.FromDatetime(self._now())
        event.job_state = state
        connection.execute(schema.events.insert().values(job_id=job_id, sequence=event.sequence, body=event.SerializeToString()))
        return event

    async def get(self, key: str, scope: Scope) -> Job:
        """The job of an id, else of a tag, else of a unique prefix of an id (4 characters or more); or "latest".

        Args:
            scope: what the caller sees; there is no other job for it. "latest" is the newest of the active project.

        Raises:
            JobNotFound: there is none, or the prefix or the tag fits several.
        """
        return await self._database.read(lambda connection: job_row(connection, _resolved(connection, key, scope)))

    async def list(self, size: int, before: int | None, scope: Scope) -> tuple[Sequence[Job], int | None]:
        """A scope's jobs without specs, newest first, and where the next page begins; fewer than `size` where they are large."""

        def read(connection: Connection) -> tuple[Sequence[Job], int | None]:
            query = select(schema.jobs.c.id, schema.jobs.c.number).where(scope.clause(schema.jobs.c.project))
            query = query.order_by(schema.jobs.c.number.desc()).limit(size + 1)
            if before is not None:
                query = query.where(schema.jobs.c.number <= before)
            rows = connection.execute(query).all()
            jobs: list[Job] = []
            left = LIST_BYTES
            for row in rows[:size]:
                job = job_row(connection, row.id, with_spec=False)
                left -= job.ByteSize()
                if jobs and left < 0:
                    return jobs, row.number
                jobs.append(job)
            return jobs, rows[size].number if len(rows) > size else None

        return await self._database.read(read)

    async def live(self) -> Sequence[Job]:
        """The jobs that are not terminal, oldest first: what a server goes on with after its start."""

        def read(connection: Connection) -> Sequence[Job]:
            query = select(schema.jobs.c.id).where(schema.jobs.c.finished_at.is_(None)).order_by(schema.jobs.c.number)
            return [job_row(connection, job_id) for job_id in connection.execute(query).scalars()]

        return await self._database.read(read)

    async def watch(self, job_id: str, after: int) -> AsyncIterator[JobEvent]:
        """The events after a sequence, then those to come, until the job is terminal.

        Raises:
            SequenceUnknown: `after` has not happened yet.
        """
        with self._announcer.subscribe(job_id) as subscription:
            job, last = await self._database.read(partial(_job_and_last, job_id=job_id))
            if after > last:
                raise SequenceUnknown(f"The job has {last} events, {after} is none of them.", "Watch from 0.", last=last)
            seen = after
            while seen < last:
                # A page may hold more than `last`: what happened meanwhile, the end of the job included.
                for event in await self._database.read(partial(listed_events, job_id=job_id, after=seen)):
                    seen = event.sequence
                    job.state = _state_after(event, job.state)
                    yield event
            while not model.is_terminal(job.state):
                for event in await subscription.take():
                    if not event.HasField("sequence"):
                        yield event
                        continue
                    # What a slow watcher's subscription left out is read again.
                    while seen < event.sequence - 1:
                        for missed in await self._database.read(partial(listed_events, job_id=job_id, after=seen)):
                            seen = missed.sequence
                            job.state = _state_after(missed, job.state)
                            yield missed
                    if event.sequence > seen:
                        seen = event.sequence
                        job.state = _state_after(event, job.state)
                        yield event

    async def results_of(self, attempt_id: str) -> dict[str, agent_pb2.CandidateResult]:
        """What an attempt gave, by cell in the order of the job's cells; empty for a cell that got nothing."""
        query = (
            select(schema.attempts.c.cell_id, schema.attempts.c.result)
            .join(schema.cells, schema.cells.c.id == schema.attempts.c.cell_id)
            .where(schema.attempts.c.id == attempt_id)
            .order_by(schema.cells.c.index)
        )
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return {row.cell_id: agent_pb2.CandidateResult.FromString(row.result or b"") for row in rows}

    async def reports(self, job_id: str) -> Sequence[report_pb2.Report]:
        """The reports of a job in the order of its cells."""
        query = (
            select(schema.reports.c.body)
            .join(schema.cells, schema.cells.c.id == schema.reports.c.cell_id)
            .where(schema.reports.c.job_id == job_id)
            .order_by(schema.cells.c.index)
        )
        bodies = await self._database.read(lambda connection: connection.execute(query).scalars().all())
        return await asyncio.to_thread(lambda: [report_pb2.Report.FromString(body) for body in bodies])

    async def reports_page(
        self, job_id: str, *, start: int, most_bytes: int = PAGE_BYTES, cell_id: str = ""
    ) -> tuple[Sequence[report_pb2.Report], int | None]:
        """Reports of a job from the cell of index `start` on, and where the next page begins.

        Args:
            most_bytes: of their serialized bodies together, which one alone may exceed.
            cell_id: the only one that is wanted; all when empty.
        """
        cells, reports = schema.cells.c, schema.reports.c
        terms = [reports.job_id == job_id, cells.index >= start, *([reports.cell_id == cell_id] if cell_id else [])]
        joined = schema.reports.join(schema.cells, cells.id == reports.cell_id)
        sizes = select(reports.id, cells.index.label("place"), func.length(reports.body).label("size")).select_from(joined)
        query = sizes.where(*terms).order_by(cells.index)

        def read(connection: Connection) -> tuple[Sequence[bytes], int | None]:
            bodies: list[bytes] = []
            left = most_bytes
            for row in connection.execute(query).all():
                if bodies and row.size > left:
                    return bodies, row.place
                left -= row.size
                bodies.append(connection.execute(select(reports.body).where(reports.id == row.id)).scalar_one())
            return bodies, None

        bodies, following = await self._database.read(read)
        return await asyncio.to_thread(lambda: [report_pb2.Report.FromString(body) for body in bodies]), following

    async def report(self, report_id: str, scope: Scope) -> report_pb2.Report:
        """One report of a job that the caller sees.

        Raises:
            ReportNotFound: there is none of this id in the scope.
        """
        jobs = schema.jobs.c
        of_scope = select(schema.reports.c.body).join(schema.jobs, jobs.id == schema.reports.c.job_id)
        query = of_scope.where(schema.reports.c.id == report_id, scope.clause(jobs.project))
        body = await self._database.read(lambda connection: connection.execute(query).scalar())
        if body is None:
            raise ReportNotFound(f"There is no report {report_id!r}.", "The reports of a job have their ids.", report=report_id)
        return await asyncio.to_thread(report_pb2.Report.FromString, body)

    async def replace_reports(self, job: Job, reports: Sequence[report_pb2.Report]) -> None:
        """Puts newer versions of a terminal job's reports in place of those of the same ids: all or none."""
        cells = {cell.id: cell for cell in job.cells}

        def write(connection: Connection) -> None:
            for report in reports:
                row = _report_row(cells[report.cell], report)
                connection.execute(update(schema.reports).where(schema.reports.c.id == report.id).values(row))

        await self._database.write(write, durable=True)


def job_row(connection: Connection, job_id: str, *, with_spec: bool = True) -> Job:
    """The job as the database has it; without the spec, long texts are cut as well.

    Raises:
        JobNotFound: it has none of this id.
    """
    job = _whole_job(connection, job_id) if with_spec else listed_job(connection, job_id)
    if job is None:
        raise job_not_found(job_id)
    return job


def _whole_job(connection: Connection, job_id: str) -> Job | None:
    row = connection.execute(select(schema.jobs).where(schema.jobs.c.id == job_id)).one_or_none()
    if row is None:
        return None
    bodies = select(schema.cells.c.body).where(schema.cells.c.job_id == job_id).order_by(schema.cells.c.index)
    job = Job(id=row.id, name=row.name, owner=row.owner, project=row.project, tags=tags_of(connection, row.id))
    job.spec.ParseFromString(row.spec)
    job.labels.update(job.spec.labels)
    job.cells.extend(Cell.FromString(body) for body in connection.execute(bodies).scalars())
    job.state = model.job_state(job.cells)
    job.submitted_at.FromDatetime(row.submitted_at)
    if row.finished_at is not None:
        job.finished_at.FromDatetime(row.finished_at)
    return job


def job_not_found(key: str, what: str = "There is no job") -> JobNotFound:
    """Return the error for a job that is not there, or not for the caller: one cannot be told from the other."""
    return JobNotFound(f"{what} {key!r}.", "See `etfarm jobs list`.", job=key)


def _resolved(connection: Connection, key: str, scope: Scope) -> str:
    jobs = schema.jobs.c
    visible = select(jobs.id).where(scope.clause(jobs.project))
    if key == LATEST:
        in_active = visible.where(jobs.project == scope.active) if scope.active else visible
        matching: Sequence[str] = connection.execute(in_active.order_by(jobs.number.desc()).limit(1)).scalars().all()
    else:
        exact: str | None = connection.execute(visible.where(jobs.id == key)).scalar()
        if exact is not None:
            return exact
        if (tag := find_tag(connection, key, scope)) is not None:
            return tag.job_id
        prefix = visible.where(jobs.id.startswith(key, autoescape=True)).limit(2)
        matching = connection.execute(prefix).scalars().all() if len(key) >= 4 else []
    if len(matching) != 1:
        raise job_not_found(key, "Several jobs begin with" if matching else "There is no job")
    return matching[0]


def _state_after(event: JobEvent, before: job_pb2.JobState.ValueType) -> job_pb2.JobState.ValueType:
    """What a watcher knows of the job's state: only a job's own event is the last one, not its last cell's."""
    return event.job_state if event.WhichOneof("event") == "job" else before


def _job_and_last(connection: Connection, job_id: str) -> tuple[Job, int]:
    last: int = connection.execute(select(schema.jobs.c.last_sequence).where(schema.jobs.c.id == job_id)).scalar_one()
    return job_row(connection, job_id, with_spec=False), last


def _brief(job: Job) -> Job:
    brief = Job()
    brief.CopyFrom(job)
    brief.ClearField("spec")
    brief.ClearField("cells")
    return brief


def _write_attempt(connection: Connection, cell: Cell, result: agent_pb2.CandidateResult | None) -> None:
    attempt = cell.attempts[-1]
    known = {"id": attempt.id, "cell_id": cell.id, "device_id": attempt.device_id, "started_at": _utc(attempt.started_at)}
    news: dict[str, object] = {
        "finished_at": _utc(attempt.finished_at) if attempt.HasField("finished_at") else None,
        "error": attempt.error.SerializeToString() if attempt.HasField("error") else None,
    }
    if result is not None:
        news["result"] = result.SerializeToString()
    row = insert(schema.attempts).values(known | news)
    connection.execute(row.on_conflict_do_update(index_elements=["id", "cell_id"], set_=news))


def _report_row(cell: Cell, report: report_pb2.Report) -> dict[str, object]:
    body = report.SerializeToString()
    return {
        "id": report.id, "job_id": cell.job_id, "cell_id": cell.id, "model_name": report.model.name,
        "model_digest": report.model.digest, "recipe": report.recipe if report.HasField("recipe") else None,
        "method": report.method if report.HasField("method") else None,
        "threads": report.threads if report.HasField("threads") else None,
        "recipe_digest": report.recipe_digest, "device_id": report.device.id,
        "p50_ns": report.latency.p50_ns if report.latency.HasField("p50_ns") else None,
        "created_at": report.created_at.ToDatetime(UTC), "body": body,
        "slim": without_rows(report_pb2.Report.FromString(body)).SerializeToString(),
    }  # fmt: skip


def _name(cell: Cell) -> str:
    return job_pb2.CellState.Name(cell.state).removeprefix("CELL_STATE_")


def _utc(stamp: object) -> datetime:
    return stamp.ToDatetime(UTC)  # type: ignore[attr-defined,no-any-return]
