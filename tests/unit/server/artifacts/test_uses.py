"""Uses of artifacts: a mark never makes an artifact look longer unused than an earlier one."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import select

from etfarm.server.artifacts.uses import GRANULARITY_S, Uses
from etfarm.server.state import schema
from etfarm.server.state.engine import Database

USED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


async def test_a_use_by_a_clock_that_is_behind_does_not_replace_a_later_one(database: Database) -> None:
    stored = []
    for clock_s in (USED.timestamp(), 1000.0, USED.timestamp() + 3600):
        uses = Uses(database, lambda clock_s=clock_s: clock_s)  # type: ignore[misc]
        uses.mark("a" * 64)
        await uses.write()
        stored.append(await database.read(lambda connection: connection.execute(select(schema.uses.c.used_at)).scalar_one()))
    assert [at.timestamp() - USED.timestamp() for at in stored] == [0, 0, 3600]


async def test_marks_are_kept_until_the_table_has_them_and_for_those_who_read_it_before(database: Database) -> None:
    clock_s = 1e9
    uses = Uses(database, lambda: clock_s)
    once, again = "a" * 64, "b" * 64
    uses.mark(once)
    uses.mark(again)
    await uses.write()
    assert uses.is_marked_since(once, clock_s), "a collection may have read the table before"
    clock_s += GRANULARITY_S
    uses.mark(again)  # not written: the table has one that is recent enough
    clock_s += 1.0
    await uses.write()
    assert (uses.marked_at_s(once), uses.marked_at_s(again)) == (0.0, clock_s - 1.0)
    clock_s += GRANULARITY_S
    await uses.write()
    assert uses.marked_at_s(again) == 0.0, "it was the last use, which the table has now"
    used = select(schema.uses.c.used_at).where(schema.uses.c.id == again)
    assert await database.read(lambda c: c.execute(used).scalar_one().timestamp()) == clock_s - GRANULARITY_S - 1.0
