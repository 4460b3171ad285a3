"""Holdings: which project, agent or server part may read which stored artifact."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from datetime import UTC, datetime

from sqlalchemy import Connection, delete, select
from sqlalchemy.dialects.sqlite import insert

from etfarm.server.state import schema
from etfarm.server.state.engine import Database

_BATCH = 500
"""Digests per statement; SQLite bounds the parameters of one."""


class Holdings:
    """The `holdings` table. A digest is no secret; a holding is what lets its holder read the artifact."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def held(self, digests: Iterable[str], holders: Collection[str]) -> set[str]:
        """Return those of `digests` that at least one of `holders` holds."""
        table = schema.holdings

        def read(connection: Connection) -> set[str]:
            rows: set[str] = set()
            for batch in _batches(digests):
                query = select(table.c.digest).where(table.c.digest.in_(batch), table.c.holder.in_(sorted(holders)))
                rows.update(connection.execute(query).scalars())
            return rows

        return await self._database.read(read)

    async def add(self, holder: str, digests: Iterable[str], owner: str) -> None:
        """Give `holder` the artifacts; those that it holds already stay as they are."""
        if rows := list(digests):
            await self._database.write(lambda connection: insert_holdings(connection, holder, rows, owner))


def insert_holdings(connection: Connection, holder: str, digests: Iterable[str], owner: str) -> None:
    """Insert holdings within a transaction of the caller's."""
    held_at = datetime.now(UTC)
    rows = [{"holder": holder, "digest": digest, "owner": owner, "held_at": held_at} for digest in dict.fromkeys(digests)]
    if rows:
        connection.execute(insert(schema.holdings).on_conflict_do_nothing(), rows)


def delete_artifacts(connection: Connection, digests: Iterable[str]) -> None:
    """Delete artifacts' rows and every holding of them within a transaction of the caller's."""
    for batch in _batches(digests):
        for table in (schema.holdings, schema.artifacts):
            connection.execute(delete(table).where(table.c.digest.in_(batch)))


def _batches(digests: Iterable[str]) -> Iterator[list[str]]:
    rows = list(dict.fromkeys(digests))
    for start in range(0, len(rows), _BATCH):
        yield rows[start : start + _BATCH]
