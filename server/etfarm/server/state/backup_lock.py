"""Exclusion of a backup and of the deletion of artifacts, between the processes that use a data folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from etfarm.wire.errors import FarmError, Kind

NAME: Final = "backup.lock"
"""File name of the lock within the data folder."""


class BackupRunning(FarmError):
    """A deletion during a backup, or a second backup of one data folder."""

    reason = "BACKUP_RUNNING"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, what: str) -> None:
        super().__init__(what, "Try again when it has ended.")


class BackupLock:
    """The lock of a data folder. Neither side waits for the other."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    @contextmanager
    def deleting(self) -> Iterator[None]:
        """Keep backups out while artifacts are deleted.

        Raises:
            BackupRunning: a backup reads the store.
        """
        with self._held("A backup of the farm is running, which needs every stored artifact."):
            yield

    def require_none(self) -> None:
        """Refuse a deletion while a backup runs.

        Raises:
            BackupRunning: a backup reads the store.
        """
        with self.deleting():
            pass

    @contextmanager
    def backing_up(self) -> Iterator[None]:
        """Keep deletions and other backups out.

        Raises:
            BackupRunning: the server deletes artifacts, or another backup runs.
        """
        with self._held("The server is deleting artifacts, or another backup is running."):
            yield

    @contextmanager
    def _held(self, what: str) -> Iterator[None]:
        with self._path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BackupRunning(what) from None
            yield
