"""The database: snapshots, order, durability's pragma, and migrations that make the schema."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event, func, inspect, select, text
from sqlalchemy.exc import OperationalError

from etfarm.server.state import revisions, schema, sqlite_tables
from etfarm.server.state.engine import Database, DatabaseFull
from etfarm.server.state.sqlite import SqliteDatabase
from tests.support.databases import opened


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    """One that etfarm has made anew."""
    async with opened(SqliteDatabase(tmp_path / "farm.sqlite")) as created:
        yield created


NOW = "2025-01-02 03:04:05"
MIGRATIONS = Path(revisions.__file__).parent / "migrations"


def add(connection: Connection, digest: str = "a") -> None:
    connection.execute(text(f"INSERT INTO artifacts VALUES ('{digest}', 1, 'ann', '{NOW}')"))


def count(connection: Connection) -> int:
    return connection.execute(select(func.count()).select_from(schema.artifacts)).scalar_one()


def test_processes_that_open_a_new_file_at_the_same_time_agree(tmp_path: Path) -> None:
    """As `etfarm tokens init` beside a server that starts."""
    for attempt in range(20):
        path = tmp_path / f"{attempt}.sqlite"
        together = threading.Barrier(2)

        def open_new(path: Path = path, together: threading.Barrier = together) -> int:
            async def open_it() -> int:
                together.wait(60)
                async with opened(SqliteDatabase(path)) as database:
                    return await database.read(count)

            return asyncio.run(open_it())

        with ThreadPoolExecutor(2) as pool:
            assert [each.result(60) for each in [pool.submit(open_new), pool.submit(open_new)]] == [0, 0]


async def test_a_read_sees_every_write_that_has_returned(database: Database) -> None:
    for number in range(20):
        await database.write(lambda connection, number=number: add(connection, str(number)))
        assert await database.read(count) == number + 1


async def test_a_read_is_one_snapshot_whatever_is_written_meanwhile(database: Database) -> None:
    await database.write(add)
    loop = asyncio.get_running_loop()

    def twice(connection: Connection) -> tuple[int, int]:
        before = count(connection)
        asyncio.run_coroutine_threadsafe(database.write(lambda other: add(other, "b")), loop).result(10)
        return before, count(connection)

    assert await database.read(twice) == (1, 1)
    assert await database.read(count) == 2


async def test_a_write_that_fails_leaves_nothing(database: Database) -> None:
    def add_and_fail(connection: Connection) -> None:
        add(connection)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        await database.write(add_and_fail)
    await database.write(lambda connection: add(connection, "b"))
    assert await database.read(lambda connection: connection.execute(select(schema.artifacts.c.digest)).scalars().all()) == ["b"]


async def test_a_commit_that_fails_leaves_a_connection_that_writes_on(database: Database) -> None:
    def dangle(connection: Connection) -> None:
        connection.execute(text("PRAGMA defer_foreign_keys = ON"))
        connection.execute(text("INSERT INTO events VALUES ('nojob', 1, x'00')"))

    with pytest.raises(Exception, match="FOREIGN KEY"):
        await database.write(dangle)
    await database.write(add)
    assert await database.read(count) == 1
    assert await database.read(lambda connection: connection.execute(text("SELECT count(*) FROM events")).scalar_one()) == 0


async def test_a_write_that_ends_an_iterator_too_early_fails_alone(database: Database) -> None:
    async with asyncio.timeout(10):
        empty, written = await asyncio.gather(
            database.write(lambda connection: next(iter(()))), database.write(add), return_exceptions=True
        )
    assert isinstance(empty, RuntimeError) and written is None
    assert await database.read(count) == 1


async def test_all_work_after_the_close_is_refused(tmp_path: Path) -> None:
    async with opened(SqliteDatabase(tmp_path / "farm.sqlite")) as closed:
        pass
    for _ in range(2):
        async with asyncio.timeout(10):
            with pytest.raises(RuntimeError, match="after shutdown"):
                await closed.write(add)
            with pytest.raises(RuntimeError, match="after shutdown"):
                await closed.read(count)


async def test_a_reader_cannot_write(database: Database) -> None:
    with pytest.raises(OperationalError, match="readonly"):
        await database.read(add)


@pytest.mark.parametrize(("durable", "level"), [(True, 2), (False, 1)])
async def test_a_durable_write_waits_for_the_disk(database: Database, durable: bool, level: int) -> None:
    def synchronous(connection: Connection) -> int:
        return connection.execute(text("PRAGMA synchronous")).scalar_one()

    assert await database.write(synchronous, durable=not durable) != level
    assert await database.write(synchronous, durable=durable) == level
    assert await database.read(lambda connection: connection.execute(text("PRAGMA journal_mode")).scalar_one()) == "wal"


async def test_a_creation_that_is_cut_off_leaves_nothing_half_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "farm.sqlite"
    with monkeypatch.context() as broken:
        broken.setattr(sqlite_tables, "insert", fail)
        with pytest.raises(RuntimeError, match="cut"):
            async with opened(SqliteDatabase(path)):
                pass
    assert sqlite3.connect(path).execute("SELECT name FROM sqlite_master").fetchall() == []
    async with opened(SqliteDatabase(path)) as second:
        assert await second.read(count) == 0


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("cut")


async def test_a_new_database_has_what_the_migrations_make(database: Database, tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'migrated.sqlite'}")
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")

    def shape(connection: Connection) -> dict[str, object]:
        looked = inspect(connection)
        return {
            table: {
                "columns": [
                    (column["name"], str(column["type"]), column["nullable"], column["primary_key"])
                    for column in looked.get_columns(table)
                ],
                "indexes": sorted((index["name"], tuple(index["column_names"])) for index in looked.get_indexes(table)),
                "unique": sorted(tuple(unique["column_names"]) for unique in looked.get_unique_constraints(table)),
                "foreign": sorted(
                    (tuple(key["constrained_columns"]), key["referred_table"]) for key in looked.get_foreign_keys(table)
                ),
            }
            for table in looked.get_table_names()
        }

    def rest(connection: Connection) -> tuple[object, ...]:
        revision = connection.execute(text("SELECT version_num FROM alembic_version"))
        triggers = connection.execute(text("SELECT name, sql FROM sqlite_master WHERE type = 'trigger' ORDER BY name"))
        projects = connection.execute(text("SELECT name, created_by, storage_limit_bytes FROM projects"))
        # Of two that fit equally, SQLite takes the later one. Alembic creates those of other tables in the order of a set.
        ordered = connection.execute(
            text("SELECT name FROM sqlite_master WHERE type = 'index' AND tbl_name = 'jobs' AND sql IS NOT NULL ORDER BY rowid")
        )
        return revision.all(), triggers.all(), projects.all(), ordered.all()

    created = await database.read(shape)
    with engine.connect() as connection:
        assert created == shape(connection)
        assert await database.read(rest) == rest(connection)
    assert set(created) == {*schema.metadata.tables, "alembic_version"}
    engine.dispose()


class Held:
    """A writer that is kept busy until `release`, so that further writes wait for it."""

    def __init__(self) -> None:
        self._may_go_on = threading.Event()
        self.busy: asyncio.Task[None] | None = None
        self.commits = 0

    @classmethod
    async def begin(cls, database: Database) -> Held:
        held, is_busy = cls(), threading.Event()

        def keep(_: Connection) -> None:
            is_busy.set()
            assert held._may_go_on.wait(30)

        held.busy = asyncio.create_task(database.write(keep))
        assert await asyncio.to_thread(is_busy.wait, 30)
        return held

    async def together(self, *writes: Awaitable[object]) -> list[object]:
        """Return what writes that wait at the same time return or raise, and count their commits."""
        tasks = [asyncio.ensure_future(write) for write in writes]
        await asyncio.sleep(0)  # their first steps, which queue them

        def count(_: Connection) -> None:
            self.commits += 1

        event.listen(Engine, "commit", count)
        try:
            self._may_go_on.set()
            return await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            event.remove(Engine, "commit", count)
            assert self.busy is not None
            await self.busy


async def test_writes_that_wait_share_a_commit(database: Database) -> None:
    held = await Held.begin(database)
    writes = [database.write(partial(add, digest=str(number)), durable=number == 3) for number in range(20)]
    assert await held.together(*writes) == [None] * 20
    assert held.commits <= 10, "that of the writer which was busy, and theirs, which are several where they take long"
    assert await database.read(count) == 20


async def test_of_writes_that_share_a_commit_a_failed_one_leaves_nothing(database: Database) -> None:
    def fail(connection: Connection) -> None:
        add(connection, "c")
        raise RuntimeError("no")

    held = await Held.begin(database)
    ends = await held.together(
        database.write(partial(add, digest="a")), database.write(fail), database.write(partial(add, digest="a")),
        database.write(partial(add, digest="b")),
    )  # fmt: skip
    assert [type(end).__name__ for end in ends] == ["NoneType", "RuntimeError", "IntegrityError", "NoneType"]
    digests = select(schema.artifacts.c.digest).order_by(schema.artifacts.c.digest)
    assert await database.read(lambda connection: connection.execute(digests).scalars().all()) == ["a", "b"]


async def test_writes_that_sqlite_undoes_with_another_one_fail_with_its_error(database: Database) -> None:
    def fill(connection: Connection) -> None:
        """Fill the disk as SQLite meets it where it undoes the transaction itself."""
        add(connection, "b")
        driver = connection.connection.driver_connection
        assert driver is not None
        driver.execute("ROLLBACK")
        raise sqlite3.OperationalError("database or disk is full")

    held = await Held.begin(database)
    ends = await held.together(database.write(partial(add, digest="a")), database.write(fill))
    assert [type(end) for end in ends] == [DatabaseFull, DatabaseFull]
    assert await database.read(count) == 0
    await database.write(partial(add, digest="a"))
    assert await database.read(count) == 1


async def test_a_write_whose_caller_is_cancelled_while_it_waits_is_not_done(database: Database) -> None:
    held = await Held.begin(database)
    cancelled = asyncio.create_task(database.write(partial(add, digest="a")))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert await held.together(database.write(partial(add, digest="b"))) == [None]
    assert await database.read(lambda c: c.execute(select(schema.artifacts.c.digest)).scalars().all()) == ["b"]
