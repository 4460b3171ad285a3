"""The choice of the database: a SQLite file, unless a URL names a PostgreSQL server."""

from __future__ import annotations

from pathlib import Path

from etfarm.server.state.engine import Database
from etfarm.server.state.sqlite import SqliteDatabase


def create_database(path: Path) -> Database:
    """Return a database, not yet opened.

    Args:
        path: the SQLite file, in the data folder.
    """
    return SqliteDatabase(path)
