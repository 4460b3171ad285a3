"""Working folders of builds, created beside their output, deleted with the build, or by the next build if it was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_PREFIX: Final = ".etfarm-bundle-"
_TRIES: Final = 5
"""Number of tries to empty a folder, into which a compiler that still runs may put a file."""
_OPEN: Final[set[Path]] = set()
"""Folders of builds in this process."""


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Provide an empty folder in `parent`, which is created if missing. Folders that killed builds left there are deleted.

    A folder is locked until its build ends, however it ends, so an unlocked folder is abandoned.

    Raises:
        OSError: `parent` cannot be written.
    """
    parent.mkdir(parents=True, exist_ok=True)
    parent_fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Prevents other builds from deleting a folder between its creation and its locking.
        fcntl.flock(parent_fd, fcntl.LOCK_EX)
        _sweep(parent)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    finally:
        os.close(parent_fd)
    _OPEN.add(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _OPEN.discard(folder)
        os.close(lock)


def delete_own() -> None:
    """Delete the folders of this process, which is about to be killed."""
    for folder in list(_OPEN):
        for _ in range(_TRIES):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it belongs to another user, or is gone meanwhile
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
