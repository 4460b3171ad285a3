"""Databases of tests, on the engine of the running test: SQLite, unless the test runs on each one.

A new one is a copy of one that was migrated before: the migrations take a tenth of a second each time.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import NoReturn

import psycopg
import pytest
from psycopg import sql

from etfarm.server.state import schema
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.databases import create_database
from etfarm.server.state.engine import Database
from etfarm.wire.errors import FarmError
from tests.support.postgres import QUICK, PostgresServer, postgres_server

TEMPLATE = "template_etfarm"
"""The database that etfarm has made, which nothing is connected to."""


class PostgresDatabases:
    """The databases of one server, each a copy of one that etfarm has made, which are emptied after each test."""

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self._names: dict[Path, str] = {}
        self._free: list[str] = []
        server.execute("CREATE DATABASE {}", TEMPLATE)
        database = create_database(Path("/nowhere/farm.sqlite"), DatabaseUrl.parse(server.url(TEMPLATE)))
        try:
            asyncio.run(database.open())
        finally:
            database.close()
        self._connection = psycopg.connect(server.url("postgres"), autocommit=True)

    def url(self, path: Path) -> DatabaseUrl:
        """Return the URL of the database that stands for a SQLite file."""
        if path not in self._names:
            self._names[path] = self._free.pop() if self._free else self._create(f"test_{len(self._names)}")
        return DatabaseUrl.parse(self.server.url(self._names[path]))

    def _create(self, name: str) -> str:
        create = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(TEMPLATE))
        self._connection.execute(create)
        return name

    def release(self) -> None:
        """Empty the databases of the test, for the next one."""
        for name in self._names.values():
            self._connection.execute("SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = %s", [name])
            with psycopg.connect(self.server.url(name)) as connection:
                # Without triggers, which keep the audit log.
                connection.execute("; ".join(["SET LOCAL session_replication_role TO replica", *_empty()]).encode())
            self._free.append(name)
        self._names.clear()

    def close(self) -> None:
        """Disconnect."""
        self._connection.close()


def _empty() -> Iterator[str]:
    """Yield the statements that leave a database as etfarm makes it."""
    for table in schema.metadata.tables.values():
        if table is not schema.farm:
            yield f"DELETE FROM {table.name}" + (" WHERE name <> 'default'" if table is schema.projects else "")
        if (counted := table.autoincrement_column) is not None and counted.name == "number":
            yield f"ALTER SEQUENCE {table.name}_number_seq RESTART"
    yield "UPDATE projects SET storage_limit_bytes = NULL"
    yield "DELETE FROM commits"


@asynccontextmanager
async def opened(database: Database) -> AsyncIterator[Database]:
    """Open a database for the time of a block."""
    try:
        await database.open()
        yield database
    finally:
        database.close()


class Refusal:
    """A guard that refuses every transaction that writes, with an error."""

    statement = "SELECT 1 = 0"

    def __init__(self, error: FarmError) -> None:
        self._error = error
        self.has_refused = threading.Event()

    def refuse(self) -> NoReturn:
        self.has_refused.set()
        raise self._error


_chosen: PostgresDatabases | None = None
"""What the running test has chosen; None for SQLite."""


def new_database(path: Path) -> Database:
    """Return the database of a path, not yet opened; the same path is the same database throughout a test."""
    if _chosen is not None:
        return create_database(path, _chosen.url(path))
    if not path.exists():
        path.write_bytes(_migrated())
    return create_database(path)


@cache
def _migrated() -> bytes:
    """Return a SQLite database that no test has written to."""

    async def migrate(path: Path) -> None:
        async with opened(create_database(path)):
            pass

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
        path = Path(folder) / "farm.sqlite"
        # In an event loop of its own: the caller may be in one.
        thread.submit(lambda: asyncio.run(migrate(path))).result()
        assert not path.with_name("farm.sqlite-wal").exists(), "the file is not the whole database"
        return path.read_bytes()


@pytest.fixture(scope="session")
def postgres_databases() -> Iterator[PostgresDatabases]:
    """Databases of a server for all tests of the session, whose data need not survive."""
    with postgres_server(QUICK) as server:
        databases = PostgresDatabases(server)
        yield databases
        databases.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def each_database(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once with each engine behind `new_database`, and yield the engine's name."""
    global _chosen
    if request.param == "sqlite":
        yield request.param
        return
    _chosen = request.getfixturevalue("postgres_databases")
    try:
        yield request.param
    finally:
        _chosen.release()
        _chosen = None


@pytest.fixture
def new_postgres(postgres_databases: PostgresDatabases) -> Iterator[Callable[[], DatabaseUrl]]:
    """Create databases without tables, which are dropped after the test."""
    server, names = postgres_databases.server, list[str]()

    def create() -> DatabaseUrl:
        names.append(f"new_{len(names)}")
        server.execute("CREATE DATABASE {}", names[-1])
        return DatabaseUrl.parse(server.url(names[-1]))

    yield create
    for name in names:
        server.execute("DROP DATABASE {} WITH (FORCE)", name)


sqlite_only = pytest.mark.parametrize("each_database", ["sqlite"], indirect=True)
"""Marks a test whose module runs on each engine, and which is about SQLite."""
