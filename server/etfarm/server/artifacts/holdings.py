"""Holdings: which project, agent or part of the server may read which artifact, and how much storage each holder uses."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Final

from sqlalchemy import ColumnElement, Connection, and_, bindparam, delete, exists, func, or_, select, true, tuple_

from etfarm.server.access.scope import agent_holder
from etfarm.server.artifacts.uses import ARTIFACT
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.server.state.sql import among, insert

_BATCH = 500
"""Number of digests per statement, since SQLite limits the number of parameters."""

_READ_BATCH = 5_000
"""Number of digests per read. They are passed as one parameter, since separate parameters take longer than the rows."""

_AGENTS = agent_holder("")
_NONE: Final[Mapping[str, datetime]] = MappingProxyType({})
"""Prefix of agents' holders."""

_TAKEN = "taken:"
"""Prefix of an agent's holder after a result was accepted: its bytes no longer count, and need not be uploaded again."""


# Built once: SQLAlchemy takes several times longer to build them than to execute them.
_HELD: Final = select(schema.holdings.c.digest).where(
    among(schema.holdings.c.digest, "digests"), among(schema.holdings.c.holder, "holders")
)
_SIZES: Final = select(schema.artifacts.c.digest, schema.artifacts.c.size_bytes).where(
    among(schema.artifacts.c.digest, "digests")
)
_HELD_BY_AGENTS: Final = select(schema.holdings).where(
    among(schema.holdings.c.digest, "digests"), schema.holdings.c.holder.startswith(_AGENTS)
)
_NOT_HELD: Final = select(schema.artifacts.c.digest, schema.artifacts.c.size_bytes).where(
    among(schema.artifacts.c.digest, "digests"),
    ~exists().where(schema.holdings.c.holder == bindparam("of_holder"), schema.holdings.c.digest == schema.artifacts.c.digest),
)
_ADD_ARTIFACTS: Final = insert(schema.artifacts).on_conflict_do_nothing()
_ADD_HOLDINGS: Final = insert(schema.holdings)


@dataclass(frozen=True)
class Holding:
    """One artifact of one holder."""

    holder: str
    digest: str
    size_bytes: int
    owner: str
    held_at: datetime


class Holdings:
    """The `holdings` table. Digests are not secret: a holding is what permits its holder to read the artifact."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.losses = 0
        """How often projects may have lost holdings or cached results since the start of this server."""
        self._used: dict[str, int] = {}
        """Cached number of bytes by holder, since a sum over a large project takes too long for every upload."""

    async def held(self, digests: Iterable[str], holders: Collection[str]) -> set[str]:
        """Return those of `digests` that at least one of `holders` holds."""
        allowed_holders = {*holders, *(f"{_TAKEN}{holder}" for holder in holders if holder.startswith(_AGENTS))}

        wanted, rows = list(dict.fromkeys(digests)), set[str]()
        for start in range(0, len(wanted), _READ_BATCH):
            some = {"digests": json.dumps(wanted[start : start + _READ_BATCH]), "holders": json.dumps(sorted(allowed_holders))}
            # One read per batch, so that other reads can run in between.
            rows.update(row.digest for row in await self._database.query(_HELD, some))
        return rows

    async def add(
        self,
        holder: str,
        digests: Iterable[str],
        owner: str,
        sizes: dict[str, int] | None = None,
        also: Callable[[Connection], object] | None = None,
    ) -> None:
        """Add holdings of the artifacts for `holder`; existing ones stay unchanged.

        Args:
            sizes: sizes, by digest, of artifacts that may not have a row yet; missing rows are inserted.
            also: writes something else in the same transaction.
        """
        wanted = list(dict.fromkeys(digests))
        if not wanted and also is None:
            return
        # An agent's holdings prove its results, so they must be durable. For other holders, the later write of a job syncs the
        # disk.
        durable = holder.startswith(_AGENTS)

        def write(connection: Connection) -> int:
            if also is not None:
                also(connection)
            return _insert(connection, holder, wanted, owner, sizes or {})

        try:
            added = await self._database.write(write, durable=durable)
        except BaseException:
            # It is unknown whether the write took effect, so the sum has to be computed again.
            self._used.pop(holder, None)
            raise
        if holder in self._used:
            self._used[holder] += added

    async def used_bytes(self, holder: str) -> int:
        """Return the total size of a holder's artifacts."""
        if holder not in self._used:
            table, artifacts = schema.holdings, schema.artifacts
            joined = table.join(artifacts, artifacts.c.digest == table.c.digest)
            query = select(func.coalesce(func.sum(artifacts.c.size_bytes), 0)).select_from(joined).where(table.c.holder == holder)
            # Run as a write, in order with other writes, so that each is counted exactly once.
            self._used[holder] = await self._database.write(lambda connection: int(connection.execute(query).scalar_one()))
        return self._used[holder]

    async def totals(self) -> tuple[int, int]:
        """Return the number of stored artifacts, and their bytes."""
        query = select(func.count(), func.coalesce(func.sum(schema.artifacts.c.size_bytes), 0))
        count, size_bytes = await self._database.read(lambda connection: connection.execute(query).one())
        return int(count), int(size_bytes)

    async def sizes(self, digests: Sequence[str]) -> dict[str, int]:
        """Return the sizes of those of `digests` that the table of artifacts has."""
        sizes = dict[str, int]()
        for start in range(0, len(digests), _READ_BATCH):
            some = {"digests": json.dumps(digests[start : start + _READ_BATCH])}
            sizes |= {row.digest: row.size_bytes for row in await self._database.query(_SIZES, some)}
        return sizes

    async def require_lead(self, digests: Sequence[str]) -> set[str]:
        """Return those of `digests` that the table of artifacts has at this moment, if this server may write.

        Raises:
            FENCED: another server leads the farm, so that nothing may be deleted from what the servers share.
        """
        some = {"digests": json.dumps(list(digests))}
        # A write, which checks the lease.
        return await self._database.write(lambda connection: set(connection.execute(_SIZES, some).scalars()))

    async def all_sizes(self) -> AsyncIterator[tuple[str, int]]:
        """Yield the digest and the size of every artifact in the order of digests."""
        table, after = schema.artifacts, ""
        while True:
            query = select(table.c.digest, table.c.size_bytes).where(table.c.digest > after).order_by(table.c.digest)
            rows = await self._database.read(lambda connection, query=query: connection.execute(query.limit(_BATCH)).all())  # type: ignore[misc]
            for row in rows:
                yield row.digest, row.size_bytes
            if len(rows) < _BATCH:
                return
            after = rows[-1].digest

    async def take(self, project: str, digests: Iterable[str], owner: str) -> None:
        """Let a project hold the stored artifacts of a result that it has accepted; they no longer count against their agents."""
        wanted, table, added = list(digests), schema.holdings, 0

        def write(connection: Connection) -> dict[str, int]:
            nonlocal added
            added = _insert(connection, project, wanted, owner, {})
            rows = []
            for batch in _batches(wanted):
                of_agents = connection.execute(_HELD_BY_AGENTS, {"digests": json.dumps(batch)}).mappings()
                rows += [{**row, "holder": f"{_TAKEN}{row['holder']}"} for row in of_agents]
            if not rows:
                return {}
            connection.execute(insert(table).on_conflict_do_nothing(), rows)
            return _delete(connection, wanted, table.c.holder.startswith(_AGENTS))

        if wanted:
            await self._delete(write)
            if project in self._used:
                self._used[project] += added

    async def agents(self) -> list[str]:
        """Return the holders that are agents with uploads which no result has named."""
        column = schema.holdings.c.holder
        query = select(column).where(column.startswith(_AGENTS)).distinct()
        return list(await self._database.read(lambda connection: connection.execute(query).scalars().all()))

    async def expire_agents(self, before: datetime, idle: Mapping[str, datetime] = _NONE) -> list[str]:
        """Delete agents' holdings that are older than `before`; return the artifacts that have no holder any more.

        Args:
            idle: a later time for some of the agents, by holder.
        """
        table = schema.holdings
        is_expired = and_(_is_agent_holding(), table.c.held_at < before)
        for holder, since in idle.items():
            is_expired = or_(is_expired, and_(table.c.holder == holder, table.c.held_at < since))
        orphans: list[str] = []

        def write(connection: Connection) -> dict[str, int]:
            digests = list(dict.fromkeys(connection.execute(select(table.c.digest).where(is_expired)).scalars()))
            freed = _delete(connection, digests, is_expired)
            for batch in _batches(digests):
                kept = set(connection.execute(select(table.c.digest).where(table.c.digest.in_(batch))).scalars())
                orphans.extend(digest for digest in batch if digest not in kept)
            return freed

        await self._delete(write)
        return orphans

    async def forget(self, digests: Sequence[str]) -> None:
        """Delete the rows of artifacts and all their holdings."""
        self.losses += 1

        def write(connection: Connection) -> dict[str, int]:
            freed = _delete(connection, digests, true())
            for batch in _batches(digests):
                connection.execute(delete(schema.artifacts).where(schema.artifacts.c.digest.in_(batch)))
                connection.execute(delete(schema.uses).where(schema.uses.c.kind == ARTIFACT, schema.uses.c.id.in_(batch)))
            return freed

        await self._delete(write)

    async def release(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Delete the holdings (holder, digest) of projects that no longer need artifacts which stay."""
        table = schema.holdings
        self.losses += 1

        def write(connection: Connection) -> dict[str, int]:
            freed: Counter[str] = Counter()
            for holder, digest in pairs:
                freed.update(_delete(connection, [digest], table.c.holder == holder))
            return dict(freed)

        await self._delete(write)

    async def page(self, holders: Collection[str] | None, after: tuple[datetime, str, str] | None, size: int) -> list[Holding]:
        """Return holdings, newest first.

        Args:
            holders: holders to list; None for all projects.
            after: (held_at, digest, holder) of the last entry of the previous page.
        """
        table, artifacts = schema.holdings, schema.artifacts
        columns = (table.c.holder, table.c.digest, artifacts.c.size_bytes, table.c.owner, table.c.held_at)
        query = select(*columns).select_from(table.join(artifacts, artifacts.c.digest == table.c.digest))
        query = query.where(~_is_agent_holding() if holders is None else table.c.holder.in_(sorted(holders)))
        key = (table.c.held_at, table.c.digest, table.c.holder)
        if after is not None:
            query = query.where(tuple_(*key) < after)
        query = query.order_by(*(column.desc() for column in key)).limit(size)
        return await self._database.read(lambda connection: [Holding(*row) for row in connection.execute(query)])

    async def _delete(self, write: Callable[[Connection], dict[str, int]]) -> None:
        """Run a deletion that returns the freed bytes by holder."""
        try:
            freed = await self._database.write(write)
        except BaseException:
            self._used.clear()
            raise
        for holder, size_bytes in freed.items():
            if holder in self._used:
                self._used[holder] -= size_bytes


def _is_agent_holding() -> ColumnElement[bool]:
    column = schema.holdings.c.holder
    return column.startswith(_AGENTS) | column.startswith(f"{_TAKEN}{_AGENTS}")


def _delete(connection: Connection, digests: Sequence[str], which: ColumnElement[bool]) -> dict[str, int]:
    """Delete the holdings of `digests` that match `which`; return the freed bytes by holder."""
    table, artifacts = schema.holdings, schema.artifacts
    freed: Counter[str] = Counter()
    for batch in _batches(digests):
        condition = and_(table.c.digest.in_(batch), which)
        joined = table.join(artifacts, artifacts.c.digest == table.c.digest)
        for holder, size_bytes in connection.execute(
            select(table.c.holder, artifacts.c.size_bytes).select_from(joined).where(condition)
        ):
            freed[holder] += size_bytes
        connection.execute(delete(table).where(condition))
    return dict(freed)


def _insert(connection: Connection, holder: str, digests: Sequence[str], owner: str, sizes: dict[str, int]) -> int:
    """Insert the missing holdings; return their total size."""
    at, added = datetime.now(UTC), 0
    for batch in _batches(digests):
        rows = [
            {"digest": digest, "size_bytes": sizes[digest], "owner": owner, "stored_at": at}
            for digest in batch
            if digest in sizes
        ]
        if rows:
            connection.execute(_ADD_ARTIFACTS, rows)
        new = connection.execute(_NOT_HELD, {"digests": json.dumps(batch), "of_holder": holder}).all()
        if new:
            connection.execute(
                _ADD_HOLDINGS, [{"holder": holder, "digest": row.digest, "owner": owner, "held_at": at} for row in new]
            )
        added += sum(row.size_bytes for row in new)
    return added


def _batches(digests: Iterable[str]) -> Iterator[list[str]]:
    rows = list(dict.fromkeys(digests))
    for start in range(0, len(rows), _BATCH):
        yield rows[start : start + _BATCH]
