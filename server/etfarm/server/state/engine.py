"""The database: SQLite in WAL mode, one thread that writes and one that reads, so that the event loop never waits for a disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from etfarm.wire.errors import FarmError, Kind

T = TypeVar("T")

HEAD = "0006"
"""The newest migration; `Database.open` brings an older database up to it."""


class DatabaseFull(FarmError):
    """No room on the disk for a change."""

    reason = "DISK_FULL"
    kind = Kind.RESOURCE_EXHAUSTED


class DatabaseTooNew(FarmError):
    """A newer etfarm wrote this database."""

    reason = "DATABASE_TOO_NEW"


class Database:
    """A SQLite file. Work is given as functions of a connection; each runs in one transaction of its own."""

    def __init__(self, path: Path) -> None:
        self._engine = create_engine(f"sqlite:///{path}", poolclass=NullPool, connect_args={"check_same_thread": False})
        event.listen(self._engine, "connect", _configure)
        event.listen(self._engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
        self._writer = _Lane(self._engine, "db-writer")
        self._reader = _Lane(self._engine, "db-reader")

    async def open(self) -> None:
        """Creates or migrates the tables.

        Raises:
            DatabaseTooNew: its revision is none that this version knows.
        """
        await asyncio.get_running_loop().run_in_executor(self._writer.thread, _migrate, self._engine)

    async def write(self, do: Callable[[Connection], T], *, durable: bool = False) -> T:
        """`do` in a transaction, in order with all other writes.

        Args:
            durable: wait for the disk, so that a power cut cannot take it back (about 8 ms instead of 0.2).
        """
        return await self._writer.run(do, f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")

    async def read(self, do: Callable[[Connection], T]) -> T:
        """`do` on a snapshot that sees every write that has returned."""
        return await self._reader.run(do, "PRAGMA query_only=ON")

    def close(self) -> None:
        """Ends both threads after the work that they were given."""
        self._writer.close()
        self._reader.close()
        self._engine.dispose()


class _Lane:
    """One thread with one connection."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._engine = engine
        self._connection: Connection | None = None

    async def run(self, do: Callable[[Connection], T], pragma: str) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, self._transaction, do, pragma)

    def _transaction(self, do: Callable[[Connection], T], pragma: str) -> T:
        if self._connection is None:
            self._connection = self._engine.connect()
        # Outside of a transaction: SQLite ignores it within one.
        self._connection.connection.driver_connection.execute(pragma)  # type: ignore[union-attr]
        try:
            with self._connection.begin():
                return do(self._connection)
        except OperationalError as error:
            if "disk is full" not in str(error):
                raise
            raise DatabaseFull("The server's disk is full.", "Free disk where its --data is; it goes on by itself.") from error

    def close(self) -> None:
        self.thread.submit(self._disconnect).result()
        self.thread.shutdown()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _configure(connection: object, _record: object) -> None:
    # Python's sqlite3 would begin a transaction only at the first INSERT: several SELECTs would be no snapshot, and a
    # migration that is cut off would stay half made.
    connection.isolation_level = None  # type: ignore[attr-defined]
    cursor = connection.cursor()  # type: ignore[attr-defined]
    for pragma in ("journal_mode=WAL", "foreign_keys=ON", "busy_timeout=10000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _migrate(engine: Engine) -> None:
    with engine.connect() as connection:
        revision = None
        if inspect(connection).has_table("alembic_version"):
            revision = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    if revision == HEAD:
        return
    if revision is not None and revision > HEAD:
        raise DatabaseTooNew(
            f"The database has revision {revision}, this etfarm knows {HEAD} at most.", "Update etfarm, or choose another --data."
        )
    # Imported only when there is something to migrate: it costs 10 MB and 0.2 s.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
