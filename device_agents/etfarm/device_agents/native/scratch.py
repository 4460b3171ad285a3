"""Folders that builds work in: beside what they make, gone with the build, and swept by the next one where it was killed."""

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
"""Compilers that are still at work may put a file into a folder while it is emptied."""
_OPEN: Final[set[Path]] = set()
"""Of builds in this process."""


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """An empty folder in `parent`, which is made when it is missing. Deletes what killed builds have left there.

    A folder is locked as long as its build lives, whatever ends it; so one without a lock belongs to nobody.

    Raises:
        OSError: `parent` cannot be written.
    """
    parent.mkdir(parents=True, exist_ok=True)
    parent_fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # So that nobody sweeps a folder between its making and its locking.
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
    """Deletes the folders of this process, which is about to be killed."""
    for folder in list(_OPEN):
        for _ in range(_TRIES):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # somebody else's, or gone meanwhile
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
