"""The database: snapshots, order, durability's pragma, and migrations that make the schema."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event, func, inspect, select, text
from sqlalchemy.exc import OperationalError

from etfarm.server.access.projects import Projects
from etfarm.server.access.scope import EVERYTHING, Scope
from etfarm.server.artifacts.blobs import ARTIFACTS
from etfarm.server.artifacts.store import Store
from etfarm.server.devices.records import DeviceRecords
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.jobs.records.rows import JobNotFound
from etfarm.server.jobs.records.selection import JobFilter, select_jobs
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.state import schema, sqlite_tables
from etfarm.server.state.engine import Database, DatabaseFull, DatabaseTooNew
from etfarm.server.state.revisions import HEAD
from etfarm.server.state.sqlite import SqliteDatabase
from etfarm.v1 import job_pb2, report_pb2
from etfarm.v1.common_pb2 import RunnerKind
from etfarm.v1.device_pb2 import Device, DeviceRunner
from etfarm.v1.job_pb2 import Cell
from etfarm.wire import digest
from etfarm.wire.release_0_1.messages import message_class
from etfarm.wire.series import decode_samples, decode_trace_times, encode_samples
from tests.support.old_database import MIGRATIONS, NOW, database_of_0006


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    created = SqliteDatabase(tmp_path / "farm.sqlite")
    await created.open()
    yield created
    created.close()


def add(connection: Connection, digest: str = "a") -> None:
    connection.execute(text(f"INSERT INTO artifacts VALUES ('{digest}', 1, 'ann', '{NOW}')"))


def count(connection: Connection) -> int:
    return connection.execute(select(func.count()).select_from(schema.artifacts)).scalar_one()


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
    def fail(connection: Connection) -> None:
        add(connection)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        await database.write(fail)
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
    closed = SqliteDatabase(tmp_path / "farm.sqlite")
    await closed.open()
    closed.close()
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


async def test_foreign_keys_hold(database: Database) -> None:
    with pytest.raises(Exception, match="FOREIGN KEY"):
        await database.write(lambda c: c.execute(text("INSERT INTO events VALUES ('nojob', 1, x'00')")))


async def test_it_opens_again_with_what_was_written(database: Database, tmp_path: Path) -> None:
    await database.write(add)
    again = SqliteDatabase(tmp_path / "farm.sqlite")
    await again.open()
    assert await again.read(count) == 1
    again.close()


async def test_a_database_of_a_newer_etfarm_is_refused(database: Database, tmp_path: Path) -> None:
    await database.write(lambda connection: connection.execute(text("UPDATE alembic_version SET version_num = '9999'")))
    again = SqliteDatabase(tmp_path / "farm.sqlite")
    with pytest.raises(DatabaseTooNew, match=f"9999.*{HEAD}") as refused:
        await again.open()
    assert refused.value.remedy
    again.close()


def revisions() -> list[str]:
    return sorted(path.name.partition("_")[0] for path in MIGRATIONS.glob("versions/[0-9]*.py"))


@pytest.mark.parametrize("revision", revisions()[:-1])
async def test_a_database_of_an_older_etfarm_is_brought_up_with_all_that_it_has(tmp_path: Path, revision: str) -> None:
    path = tmp_path / "farm.sqlite"
    engine = create_engine(f"sqlite:///{path}")
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
        add(connection)
        connection.execute(text(f"INSERT INTO compilations VALUES ('key', x'01', '{NOW}')"))
    engine.dispose()
    database = SqliteDatabase(path)
    await database.open()

    def kept(connection: Connection) -> tuple[object, ...]:
        version = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
        return count(connection), version, connection.execute(select(schema.compilations.c.body)).scalar()

    assert await database.read(kept) == (1, HEAD, b"\x01")
    tables = await database.read(lambda connection: set(inspect(connection).get_table_names()))
    assert set(schema.metadata.tables) <= tables
    database.close()


async def test_jobs_of_an_older_etfarm_are_found_by_their_models(tmp_path: Path) -> None:
    path = tmp_path / "farm.sqlite"
    engine = create_engine(f"sqlite:///{path}")
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    bodies = [Cell(candidate_name="resnet8"), Cell(candidate_name="ds_cnn"), Cell(candidate_name="resnet8")]
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0009")
        connection.execute(
            text(
                "INSERT INTO jobs (id, number, name, owner, request_id, priority, spec, submitted_at, last_sequence) "
                f"VALUES ('j', 1, '', 'ann', 'r', 0, x'', '{NOW}', 1)"
            )
        )
        for number, body in enumerate([*(cell.SerializeToString() for cell in bodies), b"\xff damaged"]):
            insert = text(f"INSERT INTO cells VALUES ('c{number}', 'j', {number}, 'SUCCEEDED', 1, :body)")
            connection.execute(insert, {"body": body})
    engine.dispose()
    database = SqliteDatabase(path)
    await database.open()

    def listed(connection: Connection) -> list[int]:
        chosen = (JobFilter(model=model) for model in ("resnet8", "ds_cnn", "resnet"))
        return [len(select_jobs(connection, 10, None, EVERYTHING, each)[0]) for each in chosen]

    assert await database.read(listed) == [1, 1, 0]
    await database.write(lambda connection: connection.execute(text("DELETE FROM cells")) and None)
    await database.write(lambda connection: connection.execute(text("DELETE FROM jobs")) and None)
    assert await database.read(listed) == [0, 0, 0], "a deleted job leaves nothing"
    database.close()


async def test_reports_of_an_older_etfarm_become_thin_and_are_found_by_what_they_are_of(tmp_path: Path) -> None:
    path = tmp_path / "farm.sqlite"
    engine = create_engine(f"sqlite:///{path}")
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    old_report = message_class("Report")
    whole = old_report(id="r1", recipe="xnnpack_fp32", method="forward", threads=4)
    whole.model.name, whole.model.digest = "net", "a" * 64
    whole.latency.p50_ns = 1000
    whole.latency.samples_ns.extend([1000] * 9)
    whole.samples.digest, whole.samples.size_bytes = digest.of_bytes(encode_samples([1000] * 9)), 72
    whole.profile.iterations = 2
    whole.profile.times_ns.extend([30, 40])
    whole.operators.add(name="add", times_ns=[10, 20])
    bare = old_report(id="r2")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0003")
        connection.execute(text(f"INSERT INTO jobs VALUES ('j', 1, '', 'ann', 'r', 0, x'', '{NOW}', '{NOW}', 0)"))
        for report in (whole, bare):
            connection.execute(text(f"INSERT INTO cells VALUES ('c-{report.id}', 'j', 0, 'SUCCEEDED', 1, x'')"))
            connection.execute(
                text(f"INSERT INTO reports VALUES (:id, 'j', :cell, 'net', '', 'board', NULL, '{NOW}', :body)"),
                {"id": report.id, "cell": f"c-{report.id}", "body": report.SerializeToString()},
            )
    engine.dispose()
    database = SqliteDatabase(path)
    await database.open()
    table = schema.reports.c
    result = select(table.id, table.model_digest, table.recipe, table.method, table.threads, table.body).order_by(table.id)
    rows = await database.read(lambda connection: [tuple(row) for row in connection.execute(result)])
    assert [row[:5] for row in rows] == [("r1", "a" * 64, "xnnpack_fp32", "forward", 4), ("r2", "", None, None, None)]
    thin, empty = (report_pb2.Report.FromString(row[5]) for row in rows)
    assert empty == report_pb2.Report(id="r2")
    assert (thin.id, thin.recipe, thin.model.name, thin.latency.p50_ns) == ("r1", "xnnpack_fp32", "net", 1000)
    assert thin.samples.digest == whole.samples.digest
    store = Store(tmp_path / ARTIFACTS, database)
    assert decode_samples(store.path(thin.samples.digest).read_bytes()) == [1000] * 9
    assert decode_trace_times(store.path(thin.trace_times.digest).read_bytes(), 2) == [[30, 40], [10, 20]]
    await store.require([thin.samples.digest, thin.trace_times.digest], "default")
    store.close()
    columns = await database.read(lambda connection: {column["name"] for column in inspect(connection).get_columns("reports")})
    assert columns == {column.name for column in schema.reports.columns}
    database.close()


async def test_a_creation_that_is_cut_off_leaves_nothing_half_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "farm.sqlite"
    with monkeypatch.context() as broken:
        broken.setattr(sqlite_tables, "insert", fail)
        first = SqliteDatabase(path)
        with pytest.raises(RuntimeError, match="cut"):
            await first.open()
        first.close()
    assert sqlite3.connect(path).execute("SELECT name FROM sqlite_master").fetchall() == []
    second = SqliteDatabase(path)
    await second.open()
    assert await second.read(count) == 0
    second.close()


async def test_a_migration_that_is_cut_off_leaves_nothing_half_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from alembic import op

    path = database_of_0006(tmp_path, 3)
    with monkeypatch.context() as broken:
        broken.setattr(op, "create_index", fail)
        database = SqliteDatabase(path)
        with pytest.raises(RuntimeError, match="cut"):
            await database.open()
        database.close()
    assert revision_of(path) == "0006"
    await assert_converts(path, 3)


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("cut")


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path

from sqlalchemy import Engine, event

from etfarm.server.state.sqlite import SqliteDatabase

path, beginning, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
seen = 0


@event.listens_for(Engine, "before_cursor_execute")
def end(connection, cursor, statement, *_):
    global seen
    seen += " ".join(statement.split()).startswith(beginning)
    if seen == number:
        os.kill(os.getpid(), signal.SIGKILL)


asyncio.run(SqliteDatabase(path).open())
"""


def revision_of(path: Path) -> str:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        ((revision,),) = connection.execute("SELECT version_num FROM alembic_version")
    return str(revision)


async def assert_converts(path: Path, reports: int) -> None:
    """The database opens, and all its reports have their series."""
    database = SqliteDatabase(path)
    await database.open()
    bodies = await database.read(lambda connection: connection.execute(select(schema.reports.c.body)).scalars().all())
    store = Store(path.parent / ARTIFACTS, database)
    loaded = [report_pb2.Report.FromString(body) for body in bodies]
    assert sorted(report.id for report in loaded) == sorted(f"r{number}" for number in range(reports))
    for report in loaded:
        number = int(report.id[1:])
        assert decode_samples(store.path(report.samples.digest).read_bytes()) == [1000 + number] * 5
        assert decode_trace_times(store.path(report.trace_times.digest).read_bytes(), 1) == [[2000 + number]]
    store.close()
    database.close()
    assert revision_of(path) == HEAD


@pytest.mark.parametrize(
    ("statement", "number"), [("UPDATE reports SET body", 2), ("DROP TABLE reports", 1), ("UPDATE alembic_version", 1)]
)
async def test_a_conversion_that_is_killed_is_done_whole_at_the_next_start(tmp_path: Path, statement: str, number: int) -> None:
    path = database_of_0006(tmp_path, 3)
    command_line = [sys.executable, "-c", KILLED, str(path), statement, str(number)]
    killed = await asyncio.to_thread(subprocess.run, command_line, capture_output=True, text=True, check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert revision_of(path) == "0006"
    await assert_converts(path, 3)


async def test_a_conversion_without_space_changes_nothing(tmp_path: Path) -> None:
    path = database_of_0006(tmp_path, 3)
    blobs = tmp_path / ARTIFACTS / "blobs"
    blobs.mkdir(parents=True)
    times = digest.of_bytes(encode_samples([2001]))
    (blobs / f"{times}.part").symlink_to("/dev/full")
    database = SqliteDatabase(path)
    with pytest.raises(DatabaseFull, match="no space for the conversion") as refused:
        await database.open()
    database.close()
    assert "start it again" in refused.value.remedy
    assert revision_of(path) == "0006"
    assert not list(blobs.glob("*.part"))
    await assert_converts(path, 3)


async def test_a_new_database_has_what_the_migrations_make(database: Database, tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'migrated.sqlite'}")
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, HEAD)

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
        triggers = connection.execute(text("SELECT name, sql FROM sqlite_master WHERE type = 'trigger' ORDER BY name"))
        projects = connection.execute(text("SELECT name, created_by, storage_limit_bytes FROM projects"))
        # Of two that fit equally, SQLite takes the later one. Alembic creates those of other tables in the order of a set.
        ordered = connection.execute(
            text("SELECT name FROM sqlite_master WHERE type = 'index' AND tbl_name = 'jobs' AND sql IS NOT NULL ORDER BY rowid")
        )
        return triggers.all(), projects.all(), ordered.all()

    created = await database.read(shape)
    with engine.connect() as connection:
        assert created == shape(connection)
        assert await database.read(rest) == rest(connection)
    assert set(created) == {*schema.metadata.tables, "alembic_version"}
    engine.dispose()


async def test_head_is_the_newest_migration(database: Database) -> None:
    revision = await database.read(
        lambda connection: connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    )
    assert revision == HEAD


async def test_all_that_an_older_etfarm_has_belongs_to_the_project_default(tmp_path: Path) -> None:
    path = tmp_path / "farm.sqlite"
    engine = create_engine(f"sqlite:///{path}")
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    cell = job_pb2.Cell(id="c", job_id="abcdef01", compilation_key="timed", numerics_compilation_key="separate")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0005")
        connection.execute(text(f"INSERT INTO jobs VALUES ('abcdef01', 1, '', 'ann', 'r', 0, x'', '{NOW}', '{NOW}', 0)"))
        insert = text("INSERT INTO cells VALUES ('c', 'abcdef01', 0, 'SUCCEEDED', 1, :body)")
        connection.execute(insert, {"body": cell.SerializeToString()})
        connection.execute(text(f"INSERT INTO tags VALUES ('base', 'ann', 'abcdef01', '{NOW}')"))
        for digest in ("model", "bundle"):
            connection.execute(text(f"INSERT INTO artifacts VALUES ('{digest}', 7, 'ann', '{NOW}')"))
        connection.execute(text(f"INSERT INTO bundles VALUES ('bundle', 'aarch64', x'', '{NOW}')"))
    engine.dispose()
    database = SqliteDatabase(path)
    await database.open()
    try:
        journal = Journal(database, Announcer(), lambda: datetime.now(UTC))
        default, other = Scope(frozenset({"default"}), "default"), Scope(frozenset({"vision"}), "vision")
        for key in ("abcdef01", "abcd", "base", "latest"):
            job = await journal.get(key, default)
            assert (job.id, job.project, list(job.tags)) == ("abcdef01", "default", ["base"])
            with pytest.raises(JobNotFound):
                await journal.get(key, other)
        holdings, compilations = schema.holdings.c, schema.project_compilations.c
        held = await database.read(lambda connection: connection.execute(select(holdings.holder, holdings.digest)).all())
        assert {tuple(row) for row in held} == {("default", "model"), ("default", "bundle"), ("farm", "bundle")}
        known = await database.read(lambda connection: connection.execute(select(compilations.project, compilations.key)).all())
        assert {tuple(row) for row in known} == {("default", "timed"), ("default", "separate")}
        projects = Projects(database, lambda: datetime.now(UTC))
        await projects.load()
        project = await projects.get("default")
        assert (project.members, project.created_by, project.storage_bytes) == ((), "farm", 14)
        assert abs((datetime.now(UTC) - project.created_at).total_seconds()) < 86_400
    finally:
        database.close()


def _field(number: int, value: bytes) -> bytes:
    """Return a length-delimited field of an encoded message, with fewer than 128 bytes."""
    return bytes([number << 3 | 2, len(value)]) + value


async def test_the_runners_of_an_older_etfarms_devices_keep_their_kinds(tmp_path: Path) -> None:
    path = tmp_path / "farm.sqlite"
    engine = create_engine(f"sqlite:///{path}")
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    described = Device(id="pi", cores=4, memory_bytes=1 << 33, own_runners=[DeviceRunner()]).SerializeToString()
    runners = [_field(1, kind) + _field(3, b"XnnpackBackend") for kind in (b"python", b"own", b"of a later version")]
    body = described + b"".join(_field(15, runner) for runner in runners)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0006")
        connection.execute(text(f"INSERT INTO devices VALUES ('pi', :body, '{NOW}')"), {"body": body})
    engine.dispose()
    database = SqliteDatabase(path)
    await database.open()
    try:
        ((device,), _) = await DeviceRecords(database).load()
    finally:
        database.close()
    nothing = DeviceRunner()
    python, own, later = (
        DeviceRunner(kind=kind, backends=["XnnpackBackend"])
        for kind in (RunnerKind.RUNNER_KIND_PYTHON, RunnerKind.RUNNER_KIND_OWN, RunnerKind.RUNNER_KIND_UNSPECIFIED)
    )
    assert list(device.own_runners) == [nothing, python, own, later]
    assert (device.id, device.cores, device.memory_bytes) == ("pi", 4, 1 << 33)


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
