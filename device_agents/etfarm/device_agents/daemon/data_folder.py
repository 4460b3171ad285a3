"""The agent's data folder: its lock, the agent's id, and the folders that the other rooms work in."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

from etfarm.device_agents.errors import FolderInUse, FolderUnusable
from etfarm.wire.atomic_write import write_atomically
from etfarm.wire.private import make_private

log = logging.getLogger(__name__)

MARKS: Final = ("lock", "agent_id", "runs", "results", "cache", "versions", "own-runners.json")
"""Names by which an agent's data folder is recognized."""


class DataFolder:
    """The data folder of one agent, locked while the agent runs.

    Raises:
        FolderInUse: another process holds the lock.
        FolderNotPrivate: the folder belongs to another user.
        FolderUnusable: the folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with usable(path):
            # Other users, runners above all, must not read results, the cache or the agent's identity.
            make_private(path, MARKS)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock: IO[str] = os.fdopen(os.open(path / "lock", flags, 0o600), "r+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise FolderInUse(
                f"Another agent uses {path}.", "Stop it, or give this one its own folder with --data.", folder=path
            ) from None
        # Work folders of runs that ended with an earlier process.
        shutil.rmtree(self.runs, ignore_errors=True)

    @property
    def runs(self) -> Path:
        """The folder that holds a work folder for each run; emptied when the agent starts."""
        return self.path / "runs"

    @property
    def results(self) -> Path:
        """The folder of results that the server has not acknowledged."""
        return self.path / "results"

    def agent_id(self) -> str:
        """Return the agent's UUID, which the first call creates.

        Raises:
            FolderUnusable: a new id cannot be written.
        """
        path = self.path / "agent_id"
        if path.exists():
            try:
                return str(uuid.UUID(path.read_text().strip()))
            except ValueError:
                log.warning("%s holds no UUID; this agent gets a new id", path)
        agent_id = str(uuid.uuid4())
        with usable(self.path):
            write_atomically(path, f"{agent_id}\n".encode(), durable=True)
        return agent_id

    def device_id(self) -> str:
        """Return the id under which the agent served its machine last; empty if it has not yet."""
        with usable(self.path), suppress(FileNotFoundError):
            return (self.path / "device_id").read_text(errors="replace").strip()
        return ""

    def keep_device_id(self, device_id: str) -> None:
        """Write the id under which the agent serves its machine.

        Raises:
            FolderUnusable: it cannot be written.
        """
        with usable(self.path):
            write_atomically(self.path / "device_id", f"{device_id}\n".encode(), durable=True)

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()


@contextmanager
def usable(folder: Path) -> Iterator[None]:
    """Turn an error of the system in the block into one of the agent's data folder.

    Raises:
        FolderUnusable: a file cannot be read or written.
    """
    try:
        yield
    except OSError as error:
        raise FolderUnusable(folder, error.strerror or str(error)) from None
