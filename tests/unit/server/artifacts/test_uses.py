"""Uses of artifacts: a mark never makes an artifact look longer unused than an earlier one."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import select

from etfarm.server.artifacts.uses import Uses
from etfarm.server.state import schema
from tests.support.databases import new_database

USED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


async def test_a_use_by_a_clock_that_is_behind_does_not_replace_a_later_one(tmp_path: Path) -> None:
    database = new_database(tmp_path / "farm.sqlite")
    await database.open()
    try:
        stored = []
        for clock_s in (USED.timestamp(), 1000.0, USED.timestamp() + 3600):
            uses = Uses(database, lambda clock_s=clock_s: clock_s)  # type: ignore[misc]
            uses.mark("a" * 64)
            await uses.write()
            stored.append(await database.read(lambda connection: connection.execute(select(schema.uses.c.used_at)).scalar_one()))
        assert [at.timestamp() - USED.timestamp() for at in stored] == [0, 0, 3600]
    finally:
        database.close()
