"""Exclusion of a backup and of the deletion of artifacts, between the machines whose servers share a database."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy import Connection

from etfarm.server.state.backup_lock import BackupRunning
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.postgres.connections import Connections, driver_of

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
        DatabaseUnusable, DatabaseUnavailable: the database refuses the connection, or cannot be reached.
    """
    connections = Connections(url, wait_s)
    connection = connections.connect(time.monotonic() + wait_s)
    try:
        row = driver_of(connection).execute("SELECT pg_try_advisory_lock(%s)", [_LOCK]).fetchone()
        if row is None or not row[0]:
            raise BackupRunning("The server is deleting artifacts, or another backup is running.")
        yield
    finally:
        connections.discard(connection)
        connections.close()
