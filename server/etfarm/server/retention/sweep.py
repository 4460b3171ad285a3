"""Retention: the regular deletion of what the server's limits no longer keep, in small steps that no measurement runs beside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, Final

import structlog
from sqlalchemy import ColumnElement, Connection, Table, and_, delete, exists, func, select

from etfarm.server.jobs.records.deletion import JobDeletion, find_expired
from etfarm.server.retention.clock import ClockImplausible, RetentionClock
from etfarm.server.retention.collection import ArtifactCollection
from etfarm.server.retention.limits import MIN_AUDIT_DAYS, Limit, Limits
from etfarm.server.retention.occupancy import JOB, artifact_bytes, is_kept
from etfarm.server.retention.references import CACHES, References
from etfarm.server.state import schema
from etfarm.server.state.backup_lock import BackupRunning
from etfarm.server.state.engine import Database
from etfarm.wire.errors import EtfarmError

log = structlog.get_logger()

INTERVAL_S: Final = 3600.0
"""Interval between two sweeps of a server."""

_FIRST_S: Final = 60.0
"""Time from the start of a server to its first sweep, so that resumed jobs go first."""

_BATCH: Final = 200
_AUDIT_ROWS: Final = 1_000


@dataclass(frozen=True)
class Swept:
    """What one limit deleted, or would delete."""

    name: str
    limit: Limit
    count: int
    size_bytes: int
    kept_count: int | None = None
    """Number of jobs that count for a limit of the size and are never deleted: those that are live or tagged."""
    kept_bytes: int | None = None
    """Their size."""


class Retention:
    """The limits of a server, and their application.

    Args:
        clock: the time by which ages count.
    """

    def __init__(
        self,
        database: Database,
        references: References,
        collection: ArtifactCollection,
        limits: Limits,
        clock: RetentionClock,
    ) -> None:
        self.limits = limits
        self._database = database
        self._references = references
        self._collection = collection
        self._jobs = JobDeletion(database)
        self._clock = clock
        self._turn = asyncio.Lock()

    async def tend(self) -> None:
        """Apply the limits now and then, until the task is cancelled."""
        await self._clock.load(self._database)
        await asyncio.sleep(_FIRST_S)
        while True:
            limits = self.limits
            try:
                try:
                    await self._clock.save(self._database)
                except ClockImplausible as error:
                    log.warning("nothing is deleted by its age", why=error.message, remedy=error.remedy)
                    limits = limits.without_ages()
                for swept in await self.sweep(limits):
                    if swept.count:
                        log.info("retention deleted", what=swept.name, count=swept.count, size_bytes=swept.size_bytes)
            except BackupRunning:
                log.info("retention waits for the end of a backup")
            except EtfarmError as error:
                log.warning("retention could not be applied; it is tried again", why=error.message)
            except Exception:
                log.exception("retention could not be applied; it is tried again")
            await asyncio.sleep(INTERVAL_S)

    async def sweep(self, limits: Limits, *, dry_run: bool = False) -> list[Swept]:
        """Delete what the limits no longer keep; return what was deleted for each of them.

        Args:
            dry_run: only count. What the deletion of jobs would make deletable is not counted.

        Raises:
            BackupRunning: a backup reads the store. Jobs and logs are deleted nevertheless.
            ClockImplausible: something is to be deleted by its age, and the server's clock is in doubt.
        """
        at = self._clock.time(dry_run=dry_run) if limits.has_ages else self._clock.now()
        steps = {"jobs": self._sweep_jobs, "logs": self._sweep_logs, "cache": self._sweep_cache}
        steps |= {"artifacts": self._sweep_artifacts, "audit": self._sweep_audit}
        results = []
        async with self._turn:
            await self._references.update()
            for field in fields(limits):
                limit: Limit = getattr(limits, field.name)
                count, size_bytes = (0, 0) if limit == Limit() else await steps[field.name](limit, at, dry_run)
                kept: tuple[int | None, int | None] = (None, None)
                if field.name == "jobs" and limit.size_bytes is not None:
                    kept = await self._database.read(_kept_jobs)
                results.append(Swept(field.name, limit, count, size_bytes, *kept))
        return results

    async def _sweep_jobs(self, limit: Limit, at: datetime, dry_run: bool) -> tuple[int, int]:
        sizes = await self._database.read(_occupied_by_jobs)
        chosen = await self._over_limit(limit, at, sizes)
        return await self._each(chosen, sizes, self._jobs.delete, dry_run)

    async def _sweep_logs(self, limit: Limit, at: datetime, dry_run: bool) -> tuple[int, int]:
        sizes = await self._database.read(lambda connection: _sizes_of_jobs(connection, schema.referrers.c.log_bytes))
        chosen = [job_id for job_id in await self._over_limit(limit, at, sizes, with_tags=True) if sizes.get(job_id)]
        return await self._each(chosen, sizes, self._delete_log, dry_run)

    async def _delete_log(self, job_id: str) -> None:
        await self._jobs.delete_log(job_id)
        of_job = and_(schema.referrers.c.kind == JOB, schema.referrers.c.id == job_id)
        await self._database.write(lambda c: c.execute(schema.referrers.update().where(of_job).values(log_bytes=0)))

    async def _each(
        self, chosen: Sequence[str], sizes: dict[str, int], do: Callable[[str], Any], dry_run: bool
    ) -> tuple[int, int]:
        count = size_bytes = 0
        for job_id in chosen:
            if not dry_run:
                try:
                    async with self._references.gate():
                        await do(job_id)
                except EtfarmError as error:  # tagged or deleted in the meantime
                    if error.reason not in ("JOB_TAGGED", "JOB_NOT_FOUND"):
                        raise
                    continue
            count, size_bytes = count + 1, size_bytes + sizes.get(job_id, 0)
        return count, size_bytes

    async def _over_limit(self, limit: Limit, at: datetime, sizes: dict[str, int], *, with_tags: bool = False) -> list[str]:
        """Return the jobs beyond a limit, oldest first."""
        before = at if limit.age_s is None else at - timedelta(seconds=limit.age_s)
        total, chosen = sum(sizes.values()), list[str]()
        after: tuple[datetime, str] | None = None
        newest = at if limit.size_bytes is not None else before
        while True:
            batch = await self._database.read(
                lambda connection, after=after: find_expired(connection, newest, after, _BATCH, with_tags=with_tags)  # type: ignore[misc]
            )
            for finished_at, job_id in batch:
                too_old = limit.age_s is not None and finished_at < before
                if not too_old and not (limit.size_bytes is not None and total > limit.size_bytes):
                    return chosen
                chosen.append(job_id)
                total -= sizes.get(job_id, 0)
            if len(batch) < _BATCH:
                return chosen
            after = batch[-1]

    async def _sweep_cache(self, limit: Limit, at: datetime, dry_run: bool) -> tuple[int, int]:
        entries = await self._database.read(_cache_entries)
        total, oldest = sum(size for _, _, _, size in entries), at - timedelta(seconds=limit.age_s or 0)
        chosen: list[tuple[str, str, int]] = []
        for used_at, kind, key, size_bytes in entries:
            if not (limit.age_s is not None and used_at < oldest) and not (
                limit.size_bytes is not None and total > limit.size_bytes
            ):
                break
            chosen.append((kind, key, size_bytes))
            total -= size_bytes
        count = len(chosen)
        size_bytes = sum(size for _, _, size in chosen)
        if not dry_run:
            for start in range(0, count, _BATCH):
                batch = [(kind, key) for kind, key, _ in chosen[start : start + _BATCH]]
                async with self._references.gate():
                    digests = await self._database.write(lambda connection, batch=batch: _delete_entries(connection, batch))  # type: ignore[misc]
                self._collection.note_losses()
                await self._collection.collect(only=digests)
        return count, size_bytes

    async def _sweep_artifacts(self, limit: Limit, at: datetime, dry_run: bool) -> tuple[int, int]:
        count = size_bytes = 0
        if limit.age_s is not None:
            old = await self._collection.collect(unused_s=limit.age_s, dry_run=dry_run, release=True)
            count, size_bytes = old.count, old.size_bytes
        if limit.size_bytes is not None:
            more = await self._collection.collect(limit.size_bytes, dry_run=dry_run)
            if dry_run:  # the two sets overlap: the least recently used go first in both
                return max(count, more.count), max(size_bytes, more.size_bytes)
            count, size_bytes = count + more.count, size_bytes + more.size_bytes
        return count, size_bytes

    async def _sweep_audit(self, limit: Limit, at: datetime, dry_run: bool) -> tuple[int, int]:
        table = schema.audit
        oldest = at - timedelta(seconds=max(limit.age_s or 0, MIN_AUDIT_DAYS * 24 * 3600))
        size = func.sum(func.length(table.c.principal) + func.length(table.c.subject) + func.length(table.c.detail))
        query = select(func.count(), func.coalesce(size, 0)).where(table.c.at < oldest)
        count, size_bytes = await self._database.read(lambda connection: connection.execute(query).one())
        some = select(table.c.number).where(table.c.at < oldest).order_by(table.c.number).limit(_AUDIT_ROWS)
        deleted = 0 if dry_run or not count else _AUDIT_ROWS
        while deleted == _AUDIT_ROWS:
            async with self._references.gate():
                deleted = await self._database.write(lambda c: c.execute(delete(table).where(table.c.number.in_(some))).rowcount)
        return int(count), int(size_bytes)


def _sizes_of_jobs(connection: Connection, column: ColumnElement[int]) -> dict[str, int]:
    referrers = schema.referrers.c
    rows = connection.execute(select(referrers.id, column.label("size")).where(referrers.kind == JOB, column > 0))
    return {row.id: row.size for row in rows}


def _occupied_by_jobs(connection: Connection) -> dict[str, int]:
    """Return what each job occupies: its rows, its log, and the artifacts that go with it."""
    referrers = schema.referrers.c
    sizes = _sizes_of_jobs(connection, referrers.size_bytes + func.coalesce(referrers.log_bytes, 0))
    for job_id, size_bytes in artifact_bytes(connection).items():
        sizes[job_id] = sizes.get(job_id, 0) + size_bytes
    return sizes


def _kept_jobs(connection: Connection) -> tuple[int, int]:
    """Return the number and the size of the jobs that no limit deletes."""
    sizes = _occupied_by_jobs(connection)
    kept = connection.execute(select(schema.jobs.c.id).where(is_kept())).scalars().all()
    return len(kept), sum(sizes.get(job_id, 0) for job_id in kept)


_TIMES: Final = {"compilation": "compiled_at", "stages": "made_at", "analysis": "made_at"}


def _cache_entries(connection: Connection) -> list[tuple[datetime, str, str, int]]:
    """Return (time of the last use, kind, key, size) of the cached results that no job names, least recently used first.

    The size is that of their files, without those that a job refers to.
    """
    refers, artifacts, uses = schema.artifact_references, schema.artifacts, schema.uses
    other = refers.alias("of_jobs")
    of_job = exists().where(other.c.digest == refers.c.digest, other.c.kind == JOB)
    sizes: dict[tuple[str, str], int] = {}
    joined = refers.join(artifacts, artifacts.c.digest == refers.c.digest)
    query = select(refers.c.kind, refers.c.id, func.sum(artifacts.c.size_bytes).label("size")).select_from(joined)
    query = query.where(refers.c.kind.in_(list(CACHES)), ~of_job).group_by(refers.c.kind, refers.c.id)
    for row in connection.execute(query):
        sizes[row.kind, row.id] = row.size
    entries: list[tuple[datetime, str, str, int]] = []
    for kind, table in CACHES.items():
        made_at = table.c[_TIMES[kind]]
        used = table.outerjoin(uses, and_(uses.c.kind == kind, uses.c.id == table.c.key))
        query = select(table.c.key, func.coalesce(uses.c.used_at, made_at).label("used_at"), made_at.label("made_at"))
        # A job names its compilation by its key, which is a digest, too.
        is_named = exists().where(refers.c.digest == table.c.key, refers.c.kind == JOB)
        rows = connection.execute(query.select_from(used).where(~is_named))
        entries += [(max(row.used_at, row.made_at), kind, row.key, sizes.get((kind, row.key), 0)) for row in rows]
    return sorted(entries)


def _delete_entries(connection: Connection, batch: Sequence[tuple[str, str]]) -> set[str]:
    """Delete cached results; return the digests that they referred to."""
    refers = schema.artifact_references.c
    digests: set[str] = set()
    for kind, key in batch:
        digests.update(connection.execute(select(refers.digest).where(refers.kind == kind, refers.id == key)).scalars())
        table: Table = CACHES[kind]
        connection.execute(delete(table).where(table.c.key == key))
        if kind == "compilation":
            connection.execute(delete(schema.project_compilations).where(schema.project_compilations.c.key == key))
    return digests
