"""The choice of the database: a SQLite file, unless a URL names a PostgreSQL database."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, Select

from etfarm.server.extras import require_extra
from etfarm.server.state import identity, sqlite
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.engine import Database
from etfarm.server.state.identity import Identity
from etfarm.server.state.sqlite import SqliteDatabase

WAIT_S: Final = 30.0
"""Default time for which work waits for a PostgreSQL server that is unavailable."""


def create_database(path: Path, url: DatabaseUrl | None = None, wait_s: float = WAIT_S) -> Database:
    """Return a database, not yet opened.

    Args:
        path: the SQLite file, in the data folder.
        url: the PostgreSQL database to use instead.
        wait_s: how long work waits for the PostgreSQL server if that is unavailable.

    Raises:
        ExtraMissing: the driver of PostgreSQL is not installed.
    """
    if url is None:
        return SqliteDatabase(path)
    require_driver()
    from etfarm.server.state.postgres.database import PostgresDatabase

    return PostgresDatabase(url, path.parent, wait_s)


def connected(path: Path, url: DatabaseUrl | None, wait_s: float = WAIT_S) -> AbstractContextManager[Connection]:
    """Connect to a database that has its tables, for a command that works on it alone. A transaction is one snapshot.

    Raises:
        ExtraMissing: the driver of PostgreSQL is not installed.
        DATABASE_UNUSABLE, DatabaseUnavailable: the PostgreSQL server refuses the connection, or cannot be reached.
    """
    if url is None:
        return sqlite.connected(path)
    require_driver()
    from etfarm.server.state.postgres import single

    return single.connected(url, wait_s)


def backing_up(url: DatabaseUrl | None, wait_s: float = WAIT_S) -> AbstractContextManager[None]:
    """Keep the servers of a PostgreSQL database from deleting artifacts; for SQLite, the lock of the data folder does.

    Raises:
        BackupRunning: another backup is running, or a server deletes artifacts at this moment.
        ExtraMissing: the driver of PostgreSQL is not installed.
        DATABASE_UNUSABLE, DatabaseUnavailable: the PostgreSQL server refuses the connection, or cannot be reached.
    """
    if url is None:
        return nullcontext()
    require_driver()
    from etfarm.server.state.postgres import backups

    return backups.backing_up(url, wait_s)


def is_new(path: Path, url: DatabaseUrl | None, wait_s: float) -> bool:
    """Return whether a database has nothing of a farm, without opening it.

    Raises:
        ExtraMissing: the driver of PostgreSQL is not installed.
        DATABASE_UNUSABLE, DatabaseUnavailable: the PostgreSQL server refuses the connection, or cannot be reached.
    """
    if url is None:
        return sqlite.is_new(path)
    require_driver()
    from etfarm.server.state.postgres import opening

    return opening.is_new(url, wait_s)


def first_of(query: Select[tuple[str]], path: Path, url: DatabaseUrl | None, wait_s: float) -> str | None:
    """Return the answer of a query of one table, without opening the database; None without rows, or if it is new or damaged.

    Raises:
        ExtraMissing: the driver of PostgreSQL is not installed.
        DATABASE_UNUSABLE, DatabaseUnavailable: the PostgreSQL server refuses the connection, or cannot be reached.
    """
    if url is None:
        return sqlite.first_of(path, query)
    require_driver()
    from etfarm.server.state.postgres import opening

    return opening.first_of(url, query, wait_s)


def identity_of(path: Path, url: DatabaseUrl | None, wait_s: float) -> Identity | None:
    """Return the identity of a farm, without opening its database; None if it is new or damaged.

    Raises:
        ExtraMissing: the driver of PostgreSQL is not installed.
        DatabaseUnusable, DatabaseUnavailable: the PostgreSQL server refuses the connection, or cannot be reached.
    """
    farm_id, since = (first_of(query, path, url, wait_s) for query in (identity.FARM_ID, identity.SINCE))
    return None if farm_id is None or since is None else Identity.of(farm_id, since)


def require_driver() -> None:
    """Refuse a PostgreSQL database without its driver.

    Raises:
        ExtraMissing: it is not installed.
    """
    require_extra("A PostgreSQL database", "scale", "psycopg")
