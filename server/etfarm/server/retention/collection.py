"""Deletion of artifacts that nothing refers to, least recently used first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import structlog
from sqlalchemy import ColumnElement, Connection, and_, exists, func, select, tuple_

from etfarm.server.access.scope import FARM_HOLDER, agent_holder
from etfarm.server.artifacts.digests import require_digest
from etfarm.server.artifacts.errors import artifact_not_found
from etfarm.server.artifacts.store import Store
from etfarm.server.artifacts.uses import ARTIFACT, GRANULARITY_S, LEASE_S
from etfarm.server.retention.references import References, is_needed_by, is_referred_to
from etfarm.server.state import schema
from etfarm.server.state.backup_lock import BackupLock, BackupRunning
from etfarm.server.state.engine import Database
from etfarm.wire.errors import EtfarmError, error_for

log = structlog.get_logger()

_BATCH: Final = 100
"""Number of artifacts that are deleted at a time."""

_NAMED: Final = 5
"""Maximum number of referrers that an error names."""


@dataclass(frozen=True)
class Collected:
    """What a collection deleted, or would delete."""

    count: int = 0
    size_bytes: int = 0
    kept_bytes: int = 0
    released_bytes: int = 0


@dataclass(frozen=True)
class _Unused:
    digest: str
    size_bytes: int
    used_at: datetime


class ArtifactCollection:
    """Deletion of artifacts from the store, safe beside uploads, submissions and running jobs.

    An artifact goes only if no job, report or cached result refers to it, neither the farm itself nor a result that an agent has
    not delivered holds it, no live session or attempt uses it, and nobody has asked for it within the lease.

    Args:
        in_use: returns the digests that live sessions and attempts use.
        lease_s: the time for which an artifact is kept after its last use.
    """

    def __init__(
        self,
        store: Store,
        database: Database,
        references: References,
        in_use: Callable[[], Collection[str]],
        backups: BackupLock,
        *,
        lease_s: float = LEASE_S,
    ) -> None:
        self._store = store
        self._database = database
        self._references = references
        self._in_use = in_use
        self._backups = backups
        self._lease_s = lease_s
        self._turn = asyncio.Lock()

    def note_losses(self) -> None:
        """Note that projects may have lost cached results, which must be given to them again."""
        self._store.holdings.losses += 1

    async def collect(
        self,
        keep_bytes: int | None = None,
        *,
        free_bytes: int | None = None,
        unused_s: float = 0.0,
        only: Collection[str] | None = None,
        dry_run: bool = False,
        release: bool = False,
    ) -> Collected:
        """Delete what nothing refers to, until the store has at most `keep_bytes`; everything without `keep_bytes`.

        Args:
            free_bytes: delete no more than it takes to free so many bytes.
            unused_s: minimum number of seconds since the last use, if longer than the lease.
            only: the artifacts to consider; all if None.
            dry_run: only count.
            release: also end the holdings of projects that no longer need an artifact which stays.

        Raises:
            BackupRunning: a backup reads the store.
        """
        async with self._turn:
            self._backups.require_none()  # before the references are read, which may wait for measurements
            # Marks of this server count as they are; those of an earlier one may be older than they are by the granularity.
            cutoff_s = self._store.uses.clock() - max(self._lease_s, unused_s)
            await self._references.update()
            await self._store.uses.write()
            total = await self._database.read(_total_bytes)
            if free_bytes is not None:
                keep_bytes = max(keep_bytes or 0, total - free_bytes)
            deleted = await self._delete_unused(cutoff_s, total, keep_bytes, only, dry_run=dry_run)
            count, size_bytes = len(deleted), sum(deleted.values())
            released = await self._release(cutoff_s, set(deleted), dry_run=dry_run) if release else 0
        if count and not dry_run:
            log.info("artifacts that nothing refers to are deleted", count=count, size_bytes=size_bytes)
        return Collected(count, size_bytes, total - size_bytes, released)

    async def _delete_unused(
        self, cutoff_s: float, total: int, keep_bytes: int | None, only: Collection[str] | None, *, dry_run: bool
    ) -> dict[str, int]:
        deleted: dict[str, int] = {}
        after: tuple[datetime, str] | None = None
        while keep_bytes is None or total > keep_bytes:
            # For each batch alone: between two of them, a backup may begin.
            async with self._references.gate():
                with self._backups.deleting():
                    batch = await self._find(cutoff_s, after)
                    chosen = self._choose(batch, total, keep_bytes, only)
                    removed = chosen if dry_run else await self._store.remove(chosen, unused_since_s=cutoff_s)
            if not batch:
                break
            after = batch[-1].used_at, batch[-1].digest
            sizes = {digest: chosen[digest] for digest in removed}
            deleted |= sizes
            total -= sum(sizes.values())
        return deleted

    def _choose(
        self, batch: Sequence[_Unused], total: int, keep_bytes: int | None, only: Collection[str] | None
    ) -> dict[str, int]:
        """Return the sizes of those that are to be deleted, up to `keep_bytes`."""
        chosen: dict[str, int] = {}
        in_use = self._in_use()
        for each in batch:
            if keep_bytes is not None and total <= keep_bytes:
                break
            if each.digest not in in_use and (only is None or each.digest in only):
                chosen[each.digest] = each.size_bytes
                total -= each.size_bytes
        return chosen

    async def _find(self, cutoff_s: float, after: tuple[datetime, str] | None) -> Sequence[_Unused]:
        """Return the least recently used artifacts that nothing refers to."""

        # A write, in order with others: what was written before is seen.
        def find(connection: Connection) -> Sequence[_Unused]:
            self._require_no_backup(connection)
            return _find_unused(connection, self._cutoff(cutoff_s), after)

        return await self._database.write(find)

    def _require_no_backup(self, connection: Connection) -> None:
        if self._database.is_backed_up(connection):
            raise BackupRunning("A backup of the farm is running, which needs every stored artifact.")

    def _cutoff(self, cutoff_s: float) -> datetime:
        granularity_s = min(GRANULARITY_S, self._lease_s)
        return datetime.fromtimestamp(cutoff_s - granularity_s, UTC)

    async def _release(self, cutoff_s: float, deleted: Collection[str], *, dry_run: bool) -> int:
        async with self._references.gate():
            rows = await self._database.read(lambda connection: _find_unneeded(connection, self._cutoff(cutoff_s)))
            in_use = self._in_use()
            chosen = [
                (holder, digest, size_bytes)
                for holder, digest, size_bytes in rows
                if digest not in deleted and digest not in in_use and not self._store.uses.is_marked_since(digest, cutoff_s)
            ]
            if not dry_run:
                await self._store.holdings.release([(holder, digest) for holder, digest, _ in chosen])
        return sum(size_bytes for _, _, size_bytes in chosen)

    async def delete(self, digest: str, *, force: bool = False) -> None:
        """Delete one artifact.

        Args:
            force: whether to delete it even if it was used within the lease.

        Raises:
            ARTIFACT_NOT_FOUND: the store does not have it.
            ARTIFACT_IN_USE: something refers to it, or it was used within the lease.
            BackupRunning: a backup reads the store.
        """
        require_digest(digest)
        async with self._turn:
            self._backups.require_none()
            now_s = self._store.uses.clock()
            await self._references.update()
            await self._store.uses.write()
            with self._backups.deleting():

                def find(connection: Connection) -> tuple[datetime, set[str]] | None:
                    self._require_no_backup(connection)
                    return _facts_of(connection, digest)

                facts = await self._database.write(find)
                if facts is None:
                    raise artifact_not_found(digest)
                used_at, holders = facts
                referrers = [f"{kind} {key}" for kind, key in await self._references.of(digest, _NAMED)]
                referrers += ["the farm itself"] if FARM_HOLDER in holders else []
                referrers += ["a result that an agent has not delivered"] if any(map(_is_agent, holders)) else []
                referrers += ["a live session or attempt"] if digest in self._in_use() else []
                if referrers:
                    raise _in_use(digest, referrers)
                used_s = now_s - max(used_at.timestamp(), self._store.uses.marked_at_s(digest))
                if not force and used_s < self._lease_s:
                    raise error_for(
                        "ARTIFACT_IN_USE",
                        f"Artifact {digest[:12]} was used {max(0, used_s) / 60:.0f} minutes ago; a job may be about to name it.",
                        f"Try again {self._lease_s / 60:.0f} minutes after its last use, or use --force.", digest=digest,
                    )  # fmt: skip
                if not await self._store.remove([digest], unused_since_s=now_s if force else now_s - self._lease_s):
                    raise _in_use(digest, ["an upload, or a request of this moment"])


def _total_bytes(connection: Connection) -> int:
    return int(connection.execute(select(func.coalesce(func.sum(schema.artifacts.c.size_bytes), 0))).scalar_one())


def _is_agent(holder: str) -> bool:
    return holder.startswith(agent_holder(""))


def _used_at() -> ColumnElement[datetime]:
    return func.coalesce(schema.uses.c.used_at, schema.artifacts.c.stored_at)


def _find_unused(connection: Connection, cutoff: datetime, after: tuple[datetime, str] | None) -> Sequence[_Unused]:
    artifacts, uses, holdings = schema.artifacts, schema.uses, schema.holdings.c
    joined = artifacts.outerjoin(uses, and_(uses.c.kind == ARTIFACT, uses.c.id == artifacts.c.digest))
    is_kept = exists().where(
        holdings.digest == artifacts.c.digest, (holdings.holder == FARM_HOLDER) | holdings.holder.startswith(agent_holder(""))
    )
    query = select(artifacts.c.digest, artifacts.c.size_bytes, _used_at().label("used_at")).select_from(joined)
    query = query.where(artifacts.c.stored_at < cutoff, _used_at() < cutoff, ~is_referred_to(artifacts.c.digest), ~is_kept)
    if after is not None:
        query = query.where(tuple_(_used_at(), artifacts.c.digest) > after)
    query = query.order_by(_used_at(), artifacts.c.digest).limit(_BATCH)
    return [_Unused(row.digest, row.size_bytes, row.used_at) for row in connection.execute(query)]


def _find_unneeded(connection: Connection, cutoff: datetime) -> list[tuple[str, str, int]]:
    """Return (holder, digest, size) of the holdings of projects that no longer need their artifact."""
    holdings, artifacts, uses = schema.holdings, schema.artifacts, schema.uses
    joined = holdings.join(artifacts, artifacts.c.digest == holdings.c.digest)
    joined = joined.outerjoin(uses, and_(uses.c.kind == ARTIFACT, uses.c.id == artifacts.c.digest))
    query = select(holdings.c.holder, holdings.c.digest, artifacts.c.size_bytes).select_from(joined)
    query = query.where(
        holdings.c.holder != FARM_HOLDER, ~holdings.c.holder.contains(":"), holdings.c.held_at < cutoff, _used_at() < cutoff,
        ~is_needed_by(holdings.c.holder, holdings.c.digest),
    )  # fmt: skip
    return [(row.holder, row.digest, row.size_bytes) for row in connection.execute(query)]


def _facts_of(connection: Connection, digest: str) -> tuple[datetime, set[str]] | None:
    """Return when an artifact was last used, and its holders; None if it is not stored."""
    artifacts, uses, holdings = schema.artifacts, schema.uses, schema.holdings
    joined = artifacts.outerjoin(uses, and_(uses.c.kind == ARTIFACT, uses.c.id == artifacts.c.digest))
    row = connection.execute(
        select(_used_at().label("used_at"), artifacts.c.stored_at).select_from(joined).where(artifacts.c.digest == digest)
    ).one_or_none()
    if row is None:
        return None
    holders = connection.execute(select(holdings.c.holder).where(holdings.c.digest == digest)).scalars()
    return max(row.used_at, row.stored_at), set(holders)


def _in_use(digest: str, referrers: Sequence[str]) -> EtfarmError:
    """Return the error for an artifact that something refers to."""
    names = ", ".join(referrers)
    return error_for(
        "ARTIFACT_IN_USE",
        f"Artifact {digest[:12]} is used by {names}.",
        "Delete that first: `etfarm jobs delete`; cached results go with `etfarm retention`.", digest=digest, referrers=names,
    )  # fmt: skip
