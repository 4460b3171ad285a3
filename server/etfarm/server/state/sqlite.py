"""The default database: a SQLite file in WAL mode, with one writer and one reader thread."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

import structlog
from sqlalchemy import Connection, Engine, Select, create_engine, event
from sqlalchemy.exc import DatabaseError
from sqlalchemy.pool import NullPool

from etfarm.server.state import damage, revisions, sqlite_tables
from etfarm.server.state.copies import farm_moved
from etfarm.server.state.engine import Database, DatabaseFull, Notification
from etfarm.server.state.lane import SHARE_S, Lane, Outcome, Work
from etfarm.wire.errors import FarmError

log = structlog.get_logger()

T = TypeVar("T")

MOVED: Final = ".moved"
"""Suffix of what `etfarm migrate` has moved elsewhere, and leaves as the way back."""
LOGS: Final = ("-journal", "-wal", "-shm")
"""Suffixes of the files beside a database."""
_CACHE_KIB: Final = 256
"""Size of a connection's page cache. SQLite's default, eight times as much, is hardly faster, since the pages are in the system's
cache; it fills while a farm grows, and at once when a sweep reads all rows.
"""
_STATEMENTS: Final = 48
"""Number of prepared statements that a connection keeps, of about 7 kB each. The texts of each sweep differ by the number of rows
that they name, so that Python's default of 128 would keep the statements of several past sweeps besides those of jobs.
"""
_SHARED: Final = 100
"""Maximum number of writes that share a transaction."""


class SqliteDatabase(Database):
    """A SQLite file, which one process at a time uses."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._damage: FarmError | None = None
        self._engine = _create_engine(path)
        self._writer = Lane(_SqliteTransactor(self._engine, path, self._on_begin), "db-writer", most=_SHARED)
        self._reader = Lane(_SqliteTransactor(self._engine, path, None), "db-reader")

    @property
    def is_shared(self) -> bool:
        return False

    async def open(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writer.thread, self._open)

    def _open(self) -> None:
        require_unmoved(self._path)
        try:
            with _alone(self._path.parent), _translated(self._path):
                damage.check(self._path, revisions.HEAD, revisions.known_revisions())
                self._migrate()
        except DatabaseFull as error:
            raise DatabaseFull(error.message, "Free disk where its --data is, and start it again. Nothing is lost.") from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            what = "The server's disk has no space for the conversion of its database."
            raise DatabaseFull(what, "Free disk where its --data is, and start it again. Nothing is lost.") from error

    def _migrate(self) -> None:
        with self._engine.connect() as connection:
            revision = revisions.revision_of(connection)
        if revision != revisions.HEAD:
            with self._engine.begin() as connection:
                if revision is None:
                    sqlite_tables.create(connection)
                else:
                    revisions.upgrade(connection, self._path.parent, revision)

    def _on_begin(self, connection: Connection) -> None:
        if self.guard is not None and not connection.exec_driver_sql(self.guard.statement).scalar_one():
            self.guard.refuse()

    async def _write(self, do: Callable[[Connection], T], *, durable: bool) -> T:
        if self._damage is not None:
            # Further writes could increase the damage.
            raise self._damage
        return await self._run(self._writer.run(do, durable=durable))

    async def _read(self, do: Callable[[Connection], T], *, is_single: bool) -> T:
        return await self._run(self._reader.run(do))

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except damage.DatabaseDamaged as error:
            if self._damage is None:
                self._damage = error
                log.error("the database is damaged", path=str(self._path), why=error.metadata["why"])
                self.on_damaged(error)
            raise

    def notify(self, connection: Connection, channel: str, payload: str) -> None:
        """Do nothing: there are no other processes."""

    def is_backed_up(self, connection: Connection) -> bool:
        """Return False: with SQLite, a backup holds the lock of the data folder."""
        return False

    @asynccontextmanager
    async def listen(self, *channels: str) -> AsyncIterator[AsyncIterator[Notification]]:
        yield _only_beginnings(channels)

    def close(self) -> None:
        self._writer.close()
        self._reader.close()
        self._engine.dispose()


async def _only_beginnings(channels: Sequence[str]) -> AsyncIterator[Notification]:
    for channel in channels:
        yield Notification(channel)
    await asyncio.Event().wait()


class _SqliteTransactor:
    """A connection, which opens with the first transaction.

    Args:
        on_begin: called with the connection at the start of each transaction; None for a connection that refuses to write.
    """

    def __init__(self, engine: Engine, path: Path, on_begin: Callable[[Connection], None] | None) -> None:
        self._engine = engine
        self._path = path
        self._on_begin = on_begin
        self._connection: Connection | None = None
        self._is_durable: bool | None = None
        """Whether the connection's commits wait for the disk; None before the first."""

    def transact(self, batch: Sequence[Work]) -> list[Outcome]:
        with _translated(self._path):
            connection, driver = self._connect(durable=any(work.durable for work in batch))
            began_s, outcomes = time.monotonic(), list[Outcome]()
            with _transaction(connection, driver):
                if self._on_begin is not None:
                    self._on_begin(connection)
                if len(batch) == 1:
                    return [Outcome(batch[0].do(connection))]
                for work in batch:
                    outcomes.append(self._attempt(work, connection, driver))
                    if time.monotonic() - began_s > SHARE_S:
                        break
            return outcomes

    def _attempt(self, work: Work, connection: Connection, driver: sqlite3.Connection) -> Outcome:
        """Run one of several functions; undo what it has written if it fails."""
        driver.execute("SAVEPOINT work")
        try:
            with _translated(self._path):
                outcome = Outcome(work.do(connection))
        except Exception as error:
            if not driver.in_transaction:
                raise  # SQLite has undone the whole transaction
            driver.execute("ROLLBACK TO work")
            outcome = Outcome(error=error)
        driver.execute("RELEASE work")
        return outcome

    def _connect(self, *, durable: bool) -> tuple[Connection, sqlite3.Connection]:
        """Return the connection, as SQLAlchemy's and as the driver's. Call it outside of transactions, which ignore pragmas."""
        if self._connection is None:
            self._connection = self._engine.connect()
            self._driver.execute(f"PRAGMA query_only={'ON' if self._on_begin is None else 'OFF'}")
        if self._is_durable != durable:
            self._driver.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            self._is_durable = durable
        return self._connection, self._driver

    @property
    def _driver(self) -> sqlite3.Connection:
        assert self._connection is not None
        driver = self._connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        return driver

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


@contextmanager
def _transaction(connection: Connection, driver: sqlite3.Connection) -> Iterator[None]:
    """Run the block in a transaction, and leave none open, whatever happens."""
    try:
        with connection.begin():
            yield
    finally:
        # SQLAlchemy rolls back after a block that fails, but not after a commit that does.
        if driver.in_transaction:
            driver.rollback()


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Translate SQLite's errors about the file and its disk into etfarm's errors."""
    try:
        yield
    except (DatabaseError, sqlite3.Error) as error:
        original = error.orig if isinstance(error, DatabaseError) else error
        if "disk is full" in str(error):
            what = "The server's disk is full."
            raise DatabaseFull(what, "Free disk where its --data is; it goes on by itself.") from error
        if (known := damage.error_of(path, original)) is not None and not _is_read_only_error(original):
            raise known from error
        raise


def _is_read_only_error(error: BaseException | None) -> bool:
    """Return whether a read-only transaction tried to write, which is a bug and no problem of the file."""
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_READONLY


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes from opening a database of the folder: `etfarm tokens init` may run beside a server that starts.

    SQLite itself refuses the second of two that change a new file to WAL.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _create_engine(path: Path) -> Engine:
    connect = {"check_same_thread": False, "cached_statements": _STATEMENTS}
    engine = create_engine(f"sqlite:///{path}", poolclass=NullPool, connect_args=connect)
    event.listen(engine, "connect", _configure)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return engine


@contextmanager
def connected(path: Path) -> Iterator[Connection]:
    """Connect to a file that a server has opened before, for a command that works on it alone."""
    engine = _create_engine(path)
    try:
        with _translated(path), engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def merge_log(path: Path) -> None:
    """Merge the write-ahead log of a file into it, so that the file is the whole database.

    Raises:
        DATABASE_UNUSABLE: another program uses the file.
    """
    with _translated(path), closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")


def require_unmoved(path: Path) -> None:
    """Refuse to begin with an empty farm where `etfarm migrate` has moved one to PostgreSQL.

    Raises:
        FARM_MOVED: the file is the former one.
    """
    moved = path.with_name(path.name + MOVED)
    if moved.exists() and not path.exists():
        raise farm_moved(path.parent, "a PostgreSQL database", f"rename {moved.name} to {path.name}")


def _configure(connection: object, _record: object) -> None:
    # Python's sqlite3 starts a transaction only at the first INSERT: several SELECTs would not share a snapshot, and an
    # interrupted migration would remain half done.
    connection.isolation_level = None  # type: ignore[attr-defined]
    cursor = connection.cursor()  # type: ignore[attr-defined]
    for pragma in (
        "journal_mode=WAL", "foreign_keys=ON", "busy_timeout=10000", "trusted_schema=OFF", "cell_size_check=ON",
        f"cache_size=-{_CACHE_KIB}",
    ):  # fmt: skip
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def is_new(path: Path) -> bool:
    """Return whether a database would begin empty: there is no file, nor one that `etfarm migrate` has moved."""
    names = (path.name, f"{path.name}-wal", f"{path.name}{MOVED}")
    return not any(each.exists() and each.stat().st_size for each in map(path.with_name, names))


def first_of(path: Path, query: Select[tuple[str]]) -> str | None:
    """Return the answer of a query, without opening the file as a database; None without rows."""
    if not path.is_file():
        return None
    with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as connection:
        try:
            row = connection.execute(str(query.compile(compile_kwargs={"literal_binds": True}))).fetchone()
        except sqlite3.DatabaseError:  # the file predates the table, or is damaged, which opening the database detects
            return None
    return None if row is None else str(row[0])
