"""Two servers of a farm, as members: which one leads after the database was away for both, and which one writes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text

from etfarm.server.cluster import lease
from etfarm.server.cluster.lease import LATE_S, Fence, Session
from etfarm.server.cluster.member import Member
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.databases import create_database
from tests.support.postgres import QUICK, PostgresServer, postgres_server
from tests.support.refusals import refuses

WAIT_S = 60.0
NEVER_S = 600.0
EXPIRE = "UPDATE etfarm_cluster.lease SET expires_at = clock_timestamp() - make_interval(secs => %s)"


@pytest.fixture
def postgres(monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresServer]:
    """A database that a test stops and starts, for leases that expire soon."""
    monkeypatch.setattr(lease, "LEASE_S", 0.5)
    monkeypatch.setattr(lease, "RENEWAL_S", 0.1)
    monkeypatch.setattr(lease, "LATE_S", NEVER_S)
    with postgres_server(QUICK) as running:
        yield running


@asynccontextmanager
async def joined(postgres: PostgresServer, address: str) -> AsyncIterator[Member]:
    server = Member(DatabaseUrl.parse(postgres.url("postgres")), "1", str, "", [])
    async with server.joined(address):
        server.apply()
        yield server


@asynccontextmanager
async def connected(postgres: PostgresServer) -> AsyncIterator[Session]:
    async with await psycopg.AsyncConnection.connect(postgres.url("postgres"), autocommit=True) as session:
        yield session


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)


async def test_a_leader_goes_on_after_its_database_was_away(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "SPARE_S", NEVER_S)
    async with joined(postgres, "a:1") as leader, asyncio.timeout(WAIT_S):
        token = (await leader.elected()).token
        async with joined(postgres, "b:1") as other:
            await until(lambda: leader.has_others() and other.leadership.can_forward)
            leaderless_s = other.measure_leaderless_s()
            postgres.stop(signal.SIGQUIT)
            await until(lambda: not other.leadership.can_forward)
            await asyncio.sleep(lease.LEASE_S)
            postgres.start()  # in this thread, with which it would end
            await until(lambda: other.leadership.can_forward)
            async with connected(postgres) as session:
                while (row := await lease.read(session)).remaining_s <= 0:  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(0.01)
            assert (row.token, row.holder) == (token, leader.id)
            assert leader.is_leading and not other.is_leading
            assert other.measure_leaderless_s() == leaderless_s, "what it forwards to the leader was interrupted"


async def test_another_server_leads_if_the_leader_has_died_while_the_database_was_away(postgres: PostgresServer) -> None:
    async with joined(postgres, "a:1") as leader, asyncio.timeout(WAIT_S):
        token = (await leader.elected()).token
        async with joined(postgres, "b:1") as other:
            await until(lambda: other.leadership.can_forward)
            postgres.stop(signal.SIGQUIT)
            await until(lambda: not other.leadership.can_forward)
            leader.lost.set()  # it renews nothing more, as if its process had ended
            postgres.start()
            assert (await other.elected()).token == token + 1


async def test_an_expired_lease_is_renewed_until_another_server_takes_it(postgres: PostgresServer) -> None:
    async with connected(postgres) as session:
        await lease.create_tables(session)
        first = await lease.take(session, "a", "a:1", "1", "")
        assert first is not None
        await session.execute(EXPIRE, [LATE_S / 2])
        assert await lease.renew(session, first.token, "", late_s=LATE_S)
        assert (await lease.read(session)).leader() == first
        await session.execute(EXPIRE, [LATE_S])
        assert not await lease.renew(session, first.token, "", late_s=LATE_S), "it has expired long ago"
        second = await lease.take(session, "b", "b:1", "1", "")
        assert second is not None
        await session.execute(EXPIRE, [LATE_S / 2])
        assert not await lease.renew(session, first.token, "", late_s=LATE_S), "another server has taken it"
        assert await lease.renew(session, second.token, "", late_s=LATE_S)


async def test_a_server_that_has_given_up_writes_nothing_though_the_lease_is_still_its_own(postgres: PostgresServer) -> None:
    async with connected(postgres) as session:
        await lease.create_tables(session)
        leader = await lease.take(session, "a", "a:1", "1", "")
    assert leader is not None
    database = create_database(Path("/nowhere/farm.sqlite"), DatabaseUrl.parse(postgres.url("postgres")))
    database.guard = fence = Fence(leader.token)
    insert = text("INSERT INTO artifacts VALUES (:digest, 1, 'ann', now())")
    try:
        await database.open()
        await database.write(lambda c: c.execute(insert, {"digest": "before"}))
        fence.close()
        with refuses("FENCED"):
            await database.write(lambda c: c.execute(insert, {"digest": "after"}))
        assert [row.digest for row in await database.query(text("SELECT digest FROM artifacts"))] == ["before"]
    finally:
        await asyncio.to_thread(database.close)
