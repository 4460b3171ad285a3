"""The lock of a data folder: one server, or one restore, at a time uses it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from etfarm.wire.errors import UserError, error_for
from etfarm.wire.private import make_private

LOCK: Final = "server.lock"
MARKS: Final = (LOCK, "farm.sqlite", "artifacts", "work")
"""Names by which a server's data folder is recognized."""
RESTORING: Final = "restoring"
"""File name of the marker of an unfinished restore."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the data folder for this process, and close it to other users; create it if it does not exist.

    Raises:
        FolderInUse: another server uses it.
        FolderNotPrivate: it belongs to another user.
    """
    try:
        make_private(folder, MARKS)
        # A link in its place would let this process truncate another file.
        lock = os.fdopen(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "a+")
    except OSError as error:
        raise UserError(f"The data folder {folder} cannot be used: {error.strerror}.", "Choose another --data.") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise error_for(
                "DATA_FOLDER_IN_USE",
                f"Another server (pid {lock.read().strip() or 'unknown'}) uses {folder}.",
                "Stop it, or choose another --data.",
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def require_restored(folder: Path) -> None:
    """Refuse a data folder whose restore was interrupted.

    Raises:
        RESTORE_UNFINISHED: the restore has not ended.
    """
    if (folder / RESTORING).exists():
        choices = [word for word in (folder / RESTORING).read_text(errors="replace").split() if word.startswith("--")]
        raise error_for(
            "RESTORE_UNFINISHED",
            f"The restore of {folder} was interrupted.",
            f"Run it again: {' '.join(['etfarm restore FOLDER --data', str(folder), *choices])}",
        )
