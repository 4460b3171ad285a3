"""The database of a farm, for a command that works on it while no server does, or beside one: a SQLite file, or PostgreSQL."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection

from etfarm.server.state import copies, databases, revisions
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.sqlite import LOGS
from etfarm.server.transfer import rows
from etfarm.server.transfer.errors import CopyDiffers, RowRefused, other_version
from etfarm.server.transfer.rows import OnProgress

_ROOM_BYTES: Final = 16 << 20
"""Disk space that a copy of rows leaves."""

if TYPE_CHECKING:
    from etfarm.server.cluster.stopped import StoppedFarm


@dataclass(frozen=True)
class FarmDatabase:
    """A database of either engine."""

    path: Path
    """The SQLite file; with PostgreSQL, a file in the data folder, which need not exist."""
    url: DatabaseUrl | None = None

    def __str__(self) -> str:
        return str(self.path if self.url is None else self.url)

    def open(self) -> None:
        """Check it, and create or migrate its tables, as a server does at its start.

        Raises:
            EtfarmError: it cannot be used.
        """
        database = databases.create_database(self.path, self.url)
        try:
            asyncio.run(database.open())
        finally:
            database.close()

    def connected(self) -> AbstractContextManager[Connection]:
        """Connect to it; it has its tables."""
        return databases.connected(self.path, self.url)

    def source_of_copy(self) -> str | None:
        """Return what is being copied to it; None if it is empty or complete."""
        if self.url is None and not self.path.exists():
            return None
        with self.connected() as connection, connection.begin():
            return copies.source_of(connection)

    def is_complete(self) -> bool:
        """Return whether it has a farm, and no unfinished copy of one."""
        with self.connected() as connection, connection.begin():
            return revisions.revision_of(connection) is not None and copies.source_of(connection) is None

    def clear(self) -> None:
        """Delete an unfinished copy; the database then has no tables."""
        if self.url is None:
            for suffix in ("", *LOGS):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            return
        from etfarm.server.state.postgres import tables

        with self.connected() as connection, connection.begin():
            tables.drop(connection)


def begin_copy(target: FarmDatabase, name: str) -> bool:
    """Mark an empty database as the copy of a farm, so that no server opens it; return whether one was begun before.

    Args:
        name: the name of the source.

    Raises:
        TARGET_NOT_EMPTY: the target has a farm of its own.
        COPY_UNFINISHED: the target has an unfinished copy of another source.
    """
    if target.source_of_copy() is None:
        target.open()
    with target.connected() as connection:
        return rows.begin(connection, target, name)


def copy_rows(source: Connection, target: FarmDatabase, name: str, on_progress: OnProgress, room_bytes: int = _ROOM_BYTES) -> int:
    """Copy all rows of a farm to an empty database, or go on with an interrupted copy of it. Return the number of rows.

    The target stays marked, so that no server opens it.

    Args:
        source: a connection in a transaction, which sees one snapshot.
        name: the name of the source.
        room_bytes: disk space that a copy to a file leaves.

    Raises:
        TARGET_NOT_EMPTY: the target has a farm of its own.
        COPY_UNFINISHED: the target has an unfinished copy of another source.
        CopyDiffers: what the target has is not what was copied.
        RowRefused: the target cannot store a row.
    """
    is_resumed = begin_copy(target, name)
    with target.connected() as connection:
        try:
            return rows.copy(
                source, connection, on_progress if target.url is not None else _with_room(target.path, on_progress, room_bytes)
            )
        except (CopyDiffers, RowRefused):
            if not is_resumed:
                raise
    # The source was used since the copy was interrupted.
    target.clear()
    return copy_rows(source, target, name, on_progress, room_bytes)


def _with_room(path: Path, on_progress: OnProgress, room_bytes: int) -> OnProgress:
    """Return a function that ends a copy before it fills the disk: a source may have rows without end."""

    def check(what: str, done: int, total: int) -> None:
        if shutil.disk_usage(path.parent).free < room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        on_progress(what, done, total)

    return check


def stopped(url: DatabaseUrl) -> AbstractContextManager[StoppedFarm]:
    """Require that no server of a farm in PostgreSQL runs, and let none lead until the end of the block.

    Raises:
        SERVERS_RUNNING: a server runs, or one that was killed was seen a few seconds ago.
        ExtraMissing: the driver of PostgreSQL is not installed.
        DATABASE_UNUSABLE, DatabaseUnavailable: the database refuses the connection, or cannot be reached.
    """
    databases.require_driver()
    from etfarm.server.cluster import stopped as holds  # needs etfarm[scale]

    return holds.stopped(url)


def require_this_version(connection: Connection, database: FarmDatabase) -> None:
    """Refuse a database without a complete farm of this version of etfarm.

    Raises:
        COPY_UNFINISHED, FARM_MOVED: the farm is not, or no longer, there.
        OTHER_VERSION: another version of etfarm has written it.
    """
    revision = revisions.revision_of(connection)
    if revision != revisions.HEAD:
        raise other_version(database, revision)
    copies.require_current(connection, database)
