"""The check of a PostgreSQL database at the start, and the creation or migration of its tables."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, Select, inspect, text

from etfarm.server.state import copies, revisions, schema
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.postgres import tables
from etfarm.server.state.postgres.connections import Connections, driver_of
from etfarm.wire.errors import EtfarmError, error_for

_OLDEST: Final = 14
"""The oldest major version of PostgreSQL."""


def open_tables(connection: Connection, url: DatabaseUrl, data: Path) -> None:
    """Create the tables, or migrate those of an older etfarm, in the transaction of the connection.

    Raises:
        DATABASE_UNUSABLE: it is not the database of etfarm, or not one that can be.
        DATABASE_TOO_NEW, DATABASE_TOO_OLD: a newer etfarm has written it, or one of before 0.3.0.
        COPY_UNFINISHED, FARM_MOVED: the farm is not, or no longer, there.
    """
    _check_server(connection, url)
    present = set(inspect(connection).get_table_names())
    if not present:
        tables.create(connection)
        return
    if "alembic_version" not in present:
        raise _foreign(url, f"it has the tables {', '.join(sorted(present)[:5])}")
    copies.require_current(connection, url)
    revision = str(connection.execute(text("SELECT version_num FROM alembic_version")).scalar())
    if revision not in revisions.known_revisions():
        revisions.require_known(revision)
        raise _foreign(url, f"its revision is {revision[:40]!r}")
    revisions.upgrade(connection, data, revision)
    if missing := sorted(schema.metadata.tables.keys() - set(inspect(connection).get_table_names())):
        raise _foreign(url, f"it has no table {missing[0]!r}")


def _check_server(connection: Connection, url: DatabaseUrl) -> None:
    info = driver_of(connection).info
    if info.server_version < _OLDEST * 10_000:
        raise error_for(
            "DATABASE_UNUSABLE",
            f"The database {url} has PostgreSQL {info.server_version // 10_000}.",
            f"Use version {_OLDEST} or later.",
            url=url,
        )
    if (encoding := info.parameter_status("server_encoding")) != "UTF8":
        raise error_for(
            "DATABASE_UNUSABLE",
            f"The database {url} has the encoding {encoding}.",
            "Create it with: CREATE DATABASE name TEMPLATE template0 ENCODING 'UTF8'.", url=url,
        )  # fmt: skip


def _foreign(url: DatabaseUrl, why: str) -> EtfarmError:
    return error_for("DATABASE_UNUSABLE", f"{url} is not a database of etfarm: {why}.", "Choose another --database.", url=url)


def is_new(url: DatabaseUrl, wait_s: float) -> bool:
    """Return whether a database has no tables of etfarm."""
    connections = Connections(url, wait_s)
    connection = connections.connect(time.monotonic() + wait_s)
    try:
        return "alembic_version" not in inspect(connection).get_table_names()
    finally:
        connections.discard(connection)
        connections.close()


def first_of(url: DatabaseUrl, query: Select[tuple[str]], wait_s: float) -> str | None:
    """Return the answer of a query of one table, without opening the database; None without rows."""
    connections = Connections(url, wait_s)
    connection = connections.connect(time.monotonic() + wait_s)
    try:
        tables = inspect(connection).get_table_names()
        if any(str(table) not in tables for table in query.get_final_froms()):
            return None
        row = connection.execute(query).first()
        return None if row is None else str(row[0])
    finally:
        connections.discard(connection)
        connections.close()
