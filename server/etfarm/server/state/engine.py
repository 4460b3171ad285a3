"""The database: SQLite in WAL mode with one writer and one reader thread, so that the event loop never waits for a disk."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.exc import DatabaseError
from sqlalchemy.pool import NullPool

from etfarm.server.state import damage
from etfarm.server.state.damage import DatabaseTooNew
from etfarm.server.state.lane import Lane
from etfarm.wire.errors import FarmError, Kind

__all__ = ["HEAD", "Database", "DatabaseFull", "DatabaseTooNew", "known_revisions", "retry_when_full"]

log = structlog.get_logger()

T = TypeVar("T")

HEAD = "0017"
"""The newest migration, to which `Database.open` upgrades older databases."""


_RETRY_S = 1.0
"""Pause between attempts to write to a full disk."""

_SHARED = 100
"""Maximum number of writes that share a transaction."""


class DatabaseFull(FarmError):
    """A disk without enough space for a change."""

    reason = "DISK_FULL"
    kind = Kind.RESOURCE_EXHAUSTED


class Database:
    """A SQLite database. Work is passed as functions of a connection, each of which runs in its own transaction."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._damage: FarmError | None = None
        self.on_damaged: damage.OnDamaged = lambda error: None
        """Called on the event loop if the file turns out to be damaged, with the error that the server should exit with."""
        self._engine = create_engine(f"sqlite:///{path}", poolclass=NullPool, connect_args={"check_same_thread": False})
        event.listen(self._engine, "connect", _configure)
        event.listen(self._engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
        self._writer = Lane(self._engine, "db-writer", partial(_translated, path), most=_SHARED)
        self._reader = Lane(self._engine, "db-reader", partial(_translated, path), query_only=True)

    async def open(self) -> None:
        """Check the file, then create or migrate the tables.

        Raises:
            DatabaseUnusable, DatabaseDamaged, DatabaseForeign, DatabaseTooNew: the file cannot be used.
            DatabaseFull: the disk has no space for the tables. The file is unchanged.
        """
        await asyncio.get_running_loop().run_in_executor(self._writer.thread, self._open)

    def _open(self) -> None:
        damage.check(self._path, HEAD, known_revisions())
        try:
            with _translated(self._path):
                _migrate(self._engine, self._path.parent)
        except DatabaseFull as error:
            raise DatabaseFull(error.message, "Free disk where its --data is, and start it again. Nothing is lost.") from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            what = "The server's disk has no space for the conversion of its database."
            raise DatabaseFull(what, "Free disk where its --data is, and start it again. Nothing is lost.") from error

    async def write(self, do: Callable[[Connection], T], *, durable: bool = False) -> T:
        """Run `do` in a transaction, in order with all other writes, and return its result.

        Writes that wait for others share a transaction: then the disk is waited for once. A failed one leaves nothing.

        Args:
            durable: whether to wait for the disk, so that the change survives a power failure (about 8 ms instead of 0.2 ms).
        """
        if self._damage is not None:
            # Further writes could increase the damage.
            raise self._damage
        return await self._run(self._writer.run(do, durable=durable))

    async def read(self, do: Callable[[Connection], T]) -> T:
        """Run `do` on a snapshot that includes every completed write, and return its result."""
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

    def close(self) -> None:
        """Stop both threads after their queued work."""
        self._writer.close()
        self._reader.close()
        self._engine.dispose()


async def retry_when_full(work: Callable[[], Awaitable[T]]) -> T:
    """Await `work`, and repeat it while the disk is full; for data that must not be lost. To stop, cancel the task."""
    while True:
        try:
            return await work()
        except FarmError as error:
            if error.reason != DatabaseFull.reason:
                raise
            log.warning("the disk is full, trying again", error=error.message, seconds=_RETRY_S)
        await asyncio.sleep(_RETRY_S)


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


def known_revisions() -> list[str]:
    """Return the revisions of databases that this version can open."""
    return [path.name.partition("_")[0] for path in (Path(__file__).parent / "migrations" / "versions").glob("[0-9]*.py")]


def _configure(connection: object, _record: object) -> None:
    # Python's sqlite3 starts a transaction only at the first INSERT: several SELECTs would not share a snapshot, and an
    # interrupted migration would remain half done.
    connection.isolation_level = None  # type: ignore[attr-defined]
    cursor = connection.cursor()  # type: ignore[attr-defined]
    for pragma in ("journal_mode=WAL", "foreign_keys=ON", "busy_timeout=10000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _migrate(engine: Engine, data: Path) -> None:
    with engine.connect() as connection:
        revision = None
        if inspect(connection).has_table("alembic_version"):
            revision = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    if revision == HEAD:
        return
    if revision is not None:
        log.info(
            "converting the database for this version of etfarm; older versions cannot open it afterwards",
            revision=revision,
            to=HEAD,
        )
    # Imported only if there is something to migrate: the import costs 10 MB and 0.2 s.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        config.attributes["data"] = data
        command.upgrade(config, "head")
    if revision is not None:
        log.info("the database is converted", revision=HEAD)
