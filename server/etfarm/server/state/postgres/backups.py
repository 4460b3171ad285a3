"""Exclusion of a backup and of the deletion of artifacts, between the machines whose servers share a database."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import psycopg
from sqlalchemy import Connection

from etfarm.server.state.backup_lock import BackupRunning
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.engine import DatabaseUnavailable
from etfarm.server.state.postgres.connections import Connections, driver_of
from etfarm.server.state.postgres.failures import one_line

_LOCK: Final = 0x65746662
"""The advisory lock of a backup. A server looks whether it is held; between that look and its deletions a backup may begin, whose
snapshot then has artifacts that nothing refers to."""


def is_running(connection: Connection) -> bool:
    """Return whether a backup of the database is being made, on any machine."""
    row = driver_of(connection).execute("SELECT pg_try_advisory_xact_lock_shared(%s)", [_LOCK]).fetchone()
    return row is None or not row[0]


@contextmanager
def backing_up(url: DatabaseUrl, wait_s: float) -> Iterator[None]:
    """Keep servers from deleting artifacts, and other backups out.

    Raises:
        BackupRunning: another backup is running, or a server looks for artifacts to delete at this moment.
        DATABASE_UNUSABLE, DatabaseUnavailable: the database refuses the connection, cannot be reached, or the connection was lost
            before the end of the block, so that servers may have deleted artifacts.
    """
    connections = Connections(url, wait_s)
    connection = connections.connect(time.monotonic() + wait_s)
    try:
        driver = driver_of(connection)
        driver.execute("SET idle_session_timeout = 0")  # the lock is the connection's
        row = driver.execute("SELECT pg_try_advisory_lock(%s)", [_LOCK]).fetchone()
        if row is None or not row[0]:
            raise BackupRunning("The server is deleting artifacts, or another backup is running.")
        yield
        try:
            driver.execute("SELECT pg_advisory_unlock(%s)", [_LOCK])  # the end of a connection is noticed later
        except psycopg.Error as error:
            what = f"The connection to {url} that kept servers from deleting artifacts was lost: {one_line(error)}."
            raise DatabaseUnavailable(what, "Run the backup again: it continues.", url=url) from error
    finally:
        connections.discard(connection)
        connections.close()
