"""Safe handling of the untrusted files that a child leaves in its folder, after the child's process tree has ended."""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from pathlib import Path
from typing import Final

from etfarm.server.workers.errors import BadWorkerAnswer

_MODE: Final = 0o644


def claim(folder: Path, name: str) -> Path:
    """Take ownership of a child's file, so that it can be moved out of the folder. Return its path.

    Only a regular file with a single name qualifies, never a symbolic link, a hard link, a FIFO, a socket or a device.

    Raises:
        BadWorkerAnswer: `name` names anything else, or leads out of the folder.
    """
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise BadWorkerAnswer(f"The child names {name[:100]!r}, which is not a file in its folder.")
    try:
        parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        raise BadWorkerAnswer("The child's folder is no longer a folder.") from None
    try:
        # O_NONBLOCK: opening a FIFO would wait for its writer.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=parent)
    except (OSError, ValueError):
        raise BadWorkerAnswer(f"The child names {name[:100]!r}, which is not a file in its folder.") from None
    finally:
        os.close(parent)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise BadWorkerAnswer(f"The child names {name[:100]!r}, which is not a regular file of its own.")
        if os.geteuid() == 0:
            os.fchown(file, os.geteuid(), os.getegid())
        os.fchmod(file, _MODE)
    finally:
        os.close(file)
    return folder / name


def delete(folder: Path) -> None:
    """Delete a child's folder regardless of its depth and of modes, without following links.

    What cannot be deleted stays; the next start of the workers tries again.
    """
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(folder.lstat().st_mode):
            _empty(folder)
            folder.rmdir()


def _empty(folder: Path) -> None:
    # Move folders up before entering them, to avoid recursion and paths that are too long for the kernel.
    while folders := _unlink_files(folder):
        for inner in folders:
            for deeper in _unlink_files(inner):
                deeper.rename(folder / uuid.uuid4().hex)
            inner.rmdir()


def _unlink_files(folder: Path) -> list[Path]:
    """Delete everything in a folder except its folders; return those."""
    folders = []
    if stat.S_IMODE(folder.lstat().st_mode) & 0o700 != 0o700:
        folder.chmod(0o700)
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry.path))
            else:
                Path(entry.path).unlink()
    return folders
