"""The choice of the database: a SQLite file, unless a URL names a PostgreSQL database."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sqlalchemy import Table

from etfarm.server.extras import require_extra
from etfarm.server.state import sqlite
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.engine import Database
from etfarm.server.state.sqlite import SqliteDatabase

WAIT_S: Final = 30.0
"""Default time for which work waits for a PostgreSQL server that is away."""


def create_database(path: Path, url: DatabaseUrl | None = None, wait_s: float = WAIT_S) -> Database:
    """Return a database, not yet opened.

    Args:
        path: the SQLite file, in the data folder.
        url: the PostgreSQL database to use instead.
        wait_s: how long work waits for the PostgreSQL server if that is away.

    Raises:
        ExtraMissing: the driver of PostgreSQL is not installed.
    """
    if url is None:
        return SqliteDatabase(path)
    _require_driver()
    from etfarm.server.state.postgres.database import PostgresDatabase

    return PostgresDatabase(url, path.parent, wait_s)


def has_rows(table: Table, path: Path, url: DatabaseUrl | None, wait_s: float) -> bool:
    """Return whether a table has rows, without opening the database. One that is new or damaged has none.

    Raises:
        ExtraMissing: the driver of PostgreSQL is not installed.
        DatabaseUnusable, DatabaseUnavailable: the PostgreSQL server refuses the connection, or cannot be reached.
    """
    if url is None:
        return sqlite.has_rows(path, table.name)
    _require_driver()
    from etfarm.server.state.postgres import opening

    return opening.has_rows(url, table.name, wait_s)


def _require_driver() -> None:
    require_extra("A PostgreSQL database", "scale", "psycopg")
