"""PostgreSQL as the database: what it has besides SQLite's behaviour, and what happens when its server is away."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NoReturn

import psycopg
import pytest
from sqlalchemy import Connection, insert, select, text
from sqlalchemy.exc import IntegrityError

from etfarm.server.cluster.member import Member
from etfarm.server.state import schema
from etfarm.server.state.database_url import BadDatabaseUrl, DatabaseUrl
from etfarm.server.state.databases import create_database, first_of
from etfarm.server.state.engine import Database, DatabaseUnavailable, Notification
from etfarm.server.state.postgres.connections import Connections, driver_of
from etfarm.server.state.postgres.failures import WritesLost
from etfarm.server.state.postgres.liveness import WhileAlive
from etfarm.server.state.revisions import HEAD
from etfarm.wire.errors import FarmError, error_for
from tests.support.databases import PostgresDatabases
from tests.support.postgres import PostgresServer, postgres_server
from tests.support.refusals import refuses

NOWHERE = Path("/nowhere/farm.sqlite")
WAIT_S = 60.0
SETTINGS = {"shared_buffers": "32MB", "max_wal_size": "256MB", "autovacuum": "off"}


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server of this module's own, which keeps what it confirms and can be stopped."""
    with postgres_server(SETTINGS) as running:
        running.execute("CREATE DATABASE {}", "etfarm")
        yield running


@pytest.fixture
def url(postgres_databases: PostgresDatabases, tmp_path: Path) -> Iterator[DatabaseUrl]:
    """A database of the session's server, made by etfarm and empty."""
    yield postgres_databases.url(tmp_path)
    postgres_databases.release()


@pytest.fixture
async def database(url: DatabaseUrl) -> AsyncIterator[Database]:
    async with opened(url) as created:
        yield created


class opened:
    """A database for the time of the context."""

    def __init__(self, url: DatabaseUrl, wait_s: float = WAIT_S) -> None:
        self.database = create_database(NOWHERE, url, wait_s)

    async def __aenter__(self) -> Database:
        try:
            await self.database.open()
        except FarmError:
            self.database.close()
            raise
        return self.database

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.database.close)


def add(connection: Connection, digest: str) -> None:
    values = {"digest": digest, "size_bytes": 1, "owner": "ann", "stored_at": "2025-01-02 03:04:05"}
    connection.execute(text("INSERT INTO artifacts VALUES (:digest, :size_bytes, :owner, :stored_at)"), values)


def digests(connection: Connection) -> list[str]:
    return sorted(connection.execute(select(schema.artifacts.c.digest)).scalars())


@pytest.mark.slow(reason="waits until a database that stands still is given up")
def test_an_answer_takes_as_long_as_the_server_is_alive(server: PostgresServer) -> None:
    connections = Connections(DatabaseUrl.parse(server.url("etfarm")), WAIT_S)
    connection = connections.connect(None)
    try:
        driver = driver_of(connection)
        driver.limit = WhileAlive(driver, connections.parameters, ask_s=0.2)
        driver.execute("SELECT pg_sleep(2)")
        server.freeze()
        with pytest.raises(psycopg.OperationalError, match="does not answer"):
            driver.execute("SELECT 1")
    finally:
        server.thaw()
        connections.discard(connection)
        connections.close()


async def test_the_tables_are_those_of_the_schema(database: Database) -> None:
    def differences(connection: Connection) -> tuple[list[object], str]:
        from alembic.autogenerate import compare_metadata
        from alembic.migration import MigrationContext

        ours = {"include_object": lambda _object, name, *_: name != "commits", "compare_type": True}
        context = MigrationContext.configure(connection, opts=ours)
        revision = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
        return [each for each in compare_metadata(context, schema.metadata) if "ix_" not in str(each)], revision

    assert await database.read(differences) == ([], HEAD)


async def test_every_text_is_compared_by_code_points(database: Database) -> None:
    def collations(connection: Connection) -> set[str]:
        query = (
            "SELECT collation_name FROM information_schema.columns WHERE table_schema = 'public' AND data_type LIKE 'character%' "
            "AND table_name <> 'alembic_version'"
        )
        return set(connection.execute(text(query)).scalars())

    assert await database.read(collations) == {"C"}
    for digest in ("Z", "a", "é", "~"):
        await database.write(lambda connection, digest=digest: add(connection, digest))
    in_order = select(schema.artifacts.c.digest).order_by(schema.artifacts.c.digest)
    assert await database.read(lambda c: list(c.execute(in_order).scalars())) == ["Z", "a", "~", "é"]


async def test_a_text_with_a_nul_is_stored_with_its_symbol_and_large_sizes_fit(database: Database) -> None:
    row = {"kind": "a\0b", "id": "x", "size_bytes": 1 << 60}
    await database.write(lambda c: c.execute(insert(schema.referrers), row) and None)
    table = schema.referrers.c
    read = await database.read(lambda c: tuple(c.execute(select(table.kind, table.size_bytes)).one()))
    assert read == ("a␀b", 1 << 60)


async def test_the_audit_log_is_append_only(database: Database) -> None:
    columns = [column.name for column in schema.audit.columns if column.name not in ("number", "at")]
    row = dict.fromkeys(columns, "x")
    now = text(
        f"INSERT INTO audit (at, {', '.join(columns)}) VALUES (timezone('utc', now()), {', '.join(f':{c}' for c in columns)})"
    )
    await database.write(lambda c: c.execute(now, row) and None)
    for change in ("UPDATE audit SET role = 'y'", "DELETE FROM audit", "TRUNCATE audit"):
        with pytest.raises(IntegrityError, match="append-only"):
            await database.write(lambda c, change=change: c.execute(text(change)) and None)
    assert await database.read(lambda c: c.execute(text("SELECT count(*) FROM audit")).scalar_one()) == 1


async def test_a_function_that_swallows_an_error_of_the_database_does_not_seem_to_have_written(database: Database) -> None:
    def swallow(connection: Connection) -> None:
        add(connection, "a")
        try:
            add(connection, "a")
        except IntegrityError:
            return

    with pytest.raises(RuntimeError, match="after an error"):
        await database.write(swallow)
    assert await database.read(digests) == []


async def test_writes_of_two_servers_follow_each_other(database: Database, url: DatabaseUrl) -> None:
    """Each reads the highest number and writes the next one, as on SQLite."""

    def count_up(connection: Connection) -> None:
        number = connection.execute(text("SELECT coalesce(max(size_bytes), 0) FROM artifacts")).scalar_one()
        values = {"digest": f"d{number + 1}", "size": number + 1}
        connection.execute(text("INSERT INTO artifacts VALUES (:digest, :size, 'ann', timezone('utc', now()))"), values)

    async with opened(url) as other:
        await asyncio.gather(*(each.write(count_up) for _ in range(20) for each in (database, other)))
        highest = text("SELECT max(size_bytes) FROM artifacts")
        assert await other.read(lambda c: c.execute(highest).scalar_one()) == 40


async def test_the_guard_refuses_a_transaction_as_a_whole(database: Database) -> None:
    class FENCED(FarmError):
        """A lease that is over."""

    class Guard:
        statement = "SELECT count(*) = 0 FROM artifacts WHERE digest = 'fence'"

        def refuse(self) -> NoReturn:
            raise error_for("FENCED", "fenced")

    database.guard = Guard()
    await database.write(lambda c: add(c, "a"))
    await database.write(lambda c: add(c, "fence"))
    with refuses("FENCED"):
        await database.write(lambda c: add(c, "b"))
    assert await database.read(digests) == ["a", "fence"]


async def test_listeners_hear_other_processes_once_it_is_committed(database: Database, url: DatabaseUrl) -> None:
    def fail(connection: Connection) -> None:
        other.notify(connection, "jobs", "of a failed write")
        raise RuntimeError("no")

    async with opened(url) as other, database.listen("jobs", "devices") as notifications, asyncio.timeout(WAIT_S):
        assert [await anext(notifications), await anext(notifications)] == [Notification("jobs"), Notification("devices")]
        await database.write(lambda c: database.notify(c, "jobs", "own"))
        with pytest.raises(RuntimeError):
            await other.write(fail)
        await other.write(lambda c: other.notify(c, "devices", "pi is gone"))
        assert await anext(notifications) == Notification("devices", "pi is gone")
        with pytest.raises(ValueError, match="7000"):
            await other.write(lambda c: other.notify(c, "jobs", "x" * 7001))


async def test_a_listener_is_asked_to_read_again_after_its_connection_was_lost(database: Database, url: DatabaseUrl) -> None:
    async with database.listen("jobs") as notifications, asyncio.timeout(WAIT_S):
        assert await anext(notifications) == Notification("jobs")
        await asyncio.to_thread(end_connections, url)
        assert await anext(notifications) == Notification("jobs")


@pytest.mark.slow(reason="waits until a listener tries its quiet connection, and for its answer")
async def test_a_listener_leaves_a_connection_that_stands_still(database: Database, url: DatabaseUrl) -> None:
    async with database.listen("jobs") as notifications, asyncio.timeout(60.0):
        assert await anext(notifications) == Notification("jobs")
        with psycopg.connect(url.text) as connection:
            query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'"
            (pid,) = connection.execute(query).fetchone() or (0,)
        os.kill(pid, signal.SIGSTOP)
        try:
            assert await anext(notifications) == Notification("jobs")
        finally:
            os.kill(pid, signal.SIGCONT)


def end_connections(url: DatabaseUrl) -> None:
    """End all other connections to a database, as an administrator would."""
    with psycopg.connect(url.text, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


@pytest.mark.parametrize("breaks", ["before", "in its commit", "after its commit"])
async def test_a_write_whose_connection_breaks_is_done_once(database: Database, url: DatabaseUrl, breaks: str) -> None:
    """A commit whose answer is lost is looked up."""
    runs = 0

    def write(connection: Connection) -> None:
        nonlocal runs
        runs += 1
        add(connection, f"d{runs}")
        driver = connection.connection.driver_connection
        assert driver is not None
        if runs == 1 and breaks == "before":
            end_connections(url)
        elif runs == 1:
            commit = driver.commit

            def lose_the_answer() -> None:
                if breaks == "after its commit":
                    commit()
                driver.close()
                raise psycopg.OperationalError("the connection is lost")

            driver.commit = lose_the_answer
        connection.execute(text("SELECT 1"))

    await database.write(write)
    runs_until_done = 1 if breaks == "after its commit" else 2
    assert (runs, await database.read(digests)) == (runs_until_done, [f"d{runs_until_done}"])


async def test_work_waits_for_a_server_that_restarts(server: PostgresServer) -> None:
    async with opened(DatabaseUrl.parse(server.url("etfarm"))) as database:
        await database.write(lambda c: add(c, "before"))
        server.stop()
        write = asyncio.create_task(database.write(lambda c: add(c, "meanwhile"), durable=True))
        read = asyncio.create_task(database.read(digests))
        done, _ = await asyncio.wait([write, read], timeout=0.3)
        assert not done
        server.start()
        async with asyncio.timeout(WAIT_S):
            await write
            assert "before" in await read
        assert await database.read(digests) == ["before", "meanwhile"]


@pytest.mark.remedy("DATABASE_UNAVAILABLE")
async def test_work_fails_when_the_server_is_away_for_too_long_and_goes_on_after(server: PostgresServer) -> None:
    async with opened(DatabaseUrl.parse(server.url("etfarm")), wait_s=0.5) as database:
        server.stop()
        try:
            ends = await asyncio.gather(
                *(database.write(lambda c: add(c, "lost")) for _ in range(3)), database.read(digests), return_exceptions=True
            )
        finally:
            server.start()
        assert [type(end) for end in ends] == [DatabaseUnavailable] * 4
        assert "0.5 s" in str(ends[0])
        async with asyncio.timeout(WAIT_S):
            await database.write(lambda c: add(c, "after"))
        assert "lost" not in await database.read(digests)


@pytest.mark.remedy("DATABASE_LOST_WRITES")
async def test_a_database_that_has_lost_confirmed_writes_ends_the_server(server: PostgresServer) -> None:
    errors: list[FarmError] = []
    async with opened(DatabaseUrl.parse(server.url("etfarm"))) as database:
        database.on_damaged = errors.append
        await database.write(lambda c: add(c, "confirmed"))
        with psycopg.connect(server.url("etfarm"), autocommit=True) as connection:
            # As a crash leaves it: without the last transaction.
            connection.execute("UPDATE commits SET number = number - 1")
            connection.execute("DELETE FROM artifacts WHERE digest = 'confirmed'")
        await asyncio.to_thread(end_connections, DatabaseUrl.parse(server.url("etfarm")))
        for _ in range(2):
            with pytest.raises(WritesLost):
                await database.write(lambda c: add(c, "more"))
    assert len(errors) == 1
    async with opened(DatabaseUrl.parse(server.url("etfarm"))) as database:  # it was started again
        await database.write(lambda c: add(c, "more"))


async def test_nothing_confirmed_as_durable_is_lost_by_a_crash(server: PostgresServer) -> None:
    async with opened(DatabaseUrl.parse(server.url("etfarm"))) as database:
        await database.write(lambda c: add(c, "durable"), durable=True)
        server.stop(signal.SIGQUIT)
        server.start()
        assert "durable" in await database.read(digests)
        await database.write(lambda c: add(c, "after the crash"))


async def test_a_full_server_is_waited_for(server: PostgresServer) -> None:
    url = server.url("etfarm")
    server.execute("ALTER DATABASE {} CONNECTION LIMIT 2", "etfarm")
    server.execute("CREATE ROLE {} LOGIN", "limited")
    server.execute("GRANT ALL ON ALL TABLES IN SCHEMA public TO {}", "limited", database="etfarm")
    limited = DatabaseUrl.parse(url.replace("postgres@", "limited@"))
    try:
        async with opened(limited) as database:
            with psycopg.connect(limited.text):
                read = asyncio.create_task(database.read(digests))
                assert not (await asyncio.wait([read], timeout=0.3))[0]
            async with asyncio.timeout(WAIT_S):
                await read
    finally:
        server.execute("ALTER DATABASE {} CONNECTION LIMIT -1", "etfarm")


@pytest.mark.remedy("DATABASE_UNUSABLE")
async def test_a_refused_login_names_what_lets_it_in(tmp_path: Path) -> None:
    right, wrong, readable = (tmp_path / name for name in ("right", "wrong", "readable"))
    for file, password, mode in ((right, "s3cret", 0o600), (wrong, "other", 0o600), (readable, "s3cret", 0o644)):
        file.write_text(f"*:*:*:*:{password}\n")
        file.chmod(mode)
    with postgres_server() as own:
        own.execute("CREATE ROLE {} LOGIN PASSWORD 's3cret'", "farm")
        own.execute("CREATE DATABASE {} OWNER farm TEMPLATE template0 ENCODING 'UTF8'", "etfarm")
        rules = own.data / "pg_hba.conf"
        rules.write_text("local all postgres trust\n")

        def refusal(passfile: Path) -> str:
            with psycopg.connect(own.url("postgres"), autocommit=True) as connection:
                connection.execute("SELECT pg_reload_conf()")
            with refuses("DATABASE_UNUSABLE") as refused:
                asyncio.run(login(passfile))
            return refused.value.remedy

        async def login(passfile: Path) -> None:
            url = own.url("etfarm").replace("postgres@", "farm@")
            async with opened(DatabaseUrl.parse(f"{url}&passfile={passfile}")):
                pass

        in_thread = asyncio.to_thread
        assert "Add a line for this machine and role to pg_hba.conf" in await in_thread(refusal, right)
        rules.write_text(rules.read_text() + "local etfarm farm scram-sha-256\n")
        assert "Correct the role's password in the password file" in await in_thread(refusal, wrong)
        assert "HOST:PORT:DATABASE:USER:PASSWORD for it, and chmod it 600" in await in_thread(refusal, readable)
        await login(right)


async def test_a_database_of_another_program_or_a_newer_etfarm_is_refused(server: PostgresServer) -> None:
    server.execute("CREATE DATABASE {}", "foreign")
    server.execute("CREATE TABLE customers (id int)", database="foreign")
    server.execute("CREATE DATABASE {} TEMPLATE template0 ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'", "latin")
    for name, pattern in (("foreign", "tables customers"), ("latin", "LATIN1"), ("missing", "does not exist")):
        with refuses("DATABASE_UNUSABLE", match=pattern):
            async with opened(DatabaseUrl.parse(server.url(name))):
                pass
    async with opened(DatabaseUrl.parse(server.url("etfarm"))) as database:
        await database.write(lambda c: c.execute(text("UPDATE alembic_version SET version_num = '9999'")) and None)
    try:
        with refuses("DATABASE_TOO_NEW", match="9999"):
            async with opened(DatabaseUrl.parse(server.url("etfarm"))):
                pass
    finally:
        server.execute(f"UPDATE alembic_version SET version_num = '{HEAD}'", database="etfarm")


def test_tokens_are_found_without_opening_the_database(server: PostgresServer) -> None:
    server.execute("CREATE DATABASE {}", "fresh")
    assert first_of(select(schema.tokens.c.id), NOWHERE, DatabaseUrl.parse(server.url("fresh")), WAIT_S) is None


async def test_close_does_not_wait_for_a_server_that_is_away(server: PostgresServer) -> None:
    database = create_database(NOWHERE, DatabaseUrl.parse(server.url("etfarm")), 600.0)
    await database.open()
    server.stop()
    try:
        writes = [asyncio.create_task(database.write(lambda c: add(c, "never"))) for _ in range(2)]
        await asyncio.wait(writes, timeout=0.2)
        async with asyncio.timeout(WAIT_S):
            await asyncio.to_thread(database.close)
            ends = await asyncio.gather(*writes, return_exceptions=True)
        assert [type(end) for end in ends] == [DatabaseUnavailable] * 2
    finally:
        server.start()
    assert not [each.name for each in threading.enumerate() if each.name.startswith("db-writer")]


@pytest.mark.parametrize(
    ("shown", "whole"),
    [
        ("postgresql://ann:***@db/etfarm", "postgresql://ann:s3cret@db/etfarm"),
        ("postgresql://ann:***@a:1,b:2/etfarm?sslmode=require", "postgresql://ann:s3%40cret@a:1,b:2/etfarm?sslmode=require"),
        ("postgresql:///etfarm?host=/run/pg&password=***", "postgresql:///etfarm?host=/run/pg&password=s3cret"),
        ("postgresql://ann@db/etfarm", "postgresql://ann@db/etfarm"),
    ],
)
def test_a_url_is_shown_without_its_password(shown: str, whole: str) -> None:
    url = DatabaseUrl.parse(whole)
    assert (str(url), url.has_password) == (shown, "***" in shown)
    assert "cret" not in repr(url)


@pytest.mark.parametrize(
    "bad",
    [
        "mysql://ann:s3cret@db/x", "ann:s3cret@db", "postgresql:ann:s3cret", "postgresql://[s3cret", "",
        "postgresql://ann:s3?cret@db/x", "postgresql://ann:s3#cret@db/x",
    ],
)  # fmt: skip
def test_a_text_that_is_no_url_is_refused_without_showing_it(bad: str) -> None:
    with pytest.raises(BadDatabaseUrl) as refused:
        DatabaseUrl.parse(bad)
    assert "s3cret" not in str(refused.value)


async def test_a_url_that_the_driver_refuses_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(BadDatabaseUrl) as refused:
        create_database(tmp_path / "farm.sqlite", DatabaseUrl.parse("postgresql://ann@db/x?s3cret=s3cret"))
    assert "s3cret" not in str(refused.value) and refused.value.__cause__ is None


async def test_a_server_refuses_to_join_by_such_a_url_and_does_not_log_it(capsys: pytest.CaptureFixture[str]) -> None:
    member = Member(DatabaseUrl.parse("postgresql://ann:100%zzs3cret@db/x"), "1", str, "", [HEAD])
    with pytest.raises(BadDatabaseUrl) as refused:
        async with member.joined("127.0.0.1:7433"):
            pass
    printed = capsys.readouterr()
    assert "s3cret" not in f"{refused.value}{printed.out}{printed.err}"
