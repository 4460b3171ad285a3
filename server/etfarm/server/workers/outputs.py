"""What a child leaves in its folder, handled as what it is: a stranger's files. Call these after the child's tree has ended."""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from pathlib import Path
from typing import Final

from etfarm.wire.errors import FarmError

_MODE: Final = 0o644


class BadOutputFile(FarmError):
    """What a child names as its output is no regular file of its folder."""

    reason = "BAD_WORKER_ANSWER"


def claim(folder: Path, name: str) -> Path:
    """Make a child's file the daemon's own, so that it can be moved out of the folder; return its path.

    Only a regular file with a single name qualifies, never a symbolic link, a hard link, a FIFO, a socket or a device.

    Raises:
        BadOutputFile: `name` is anything else, or leads out of the folder.
    """
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise BadOutputFile(f"The child names {name[:100]!r}, which is no file of its folder.")
    try:
        parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        raise BadOutputFile("The child's folder is no folder any more.") from None
    try:
        # O_NONBLOCK: opening a FIFO would wait for its writer.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=parent)
    except (OSError, ValueError):
        raise BadOutputFile(f"The child names {name[:100]!r}, which is no file of its folder.") from None
    finally:
        os.close(parent)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise BadOutputFile(f"The child names {name[:100]!r}, which is no regular file of its own.")
        if os.geteuid() == 0:
            os.fchown(file, os.geteuid(), os.getegid())
        os.fchmod(file, _MODE)
    finally:
        os.close(file)
    return folder / name


def delete(folder: Path) -> None:
    """Delete a child's folder however deep it is nested, and whatever modes its folders have; never follow a link.

    What cannot be deleted stays; the next start of the workers tries again.
    """
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(folder.lstat().st_mode):
            _empty(folder)
            folder.rmdir()


def _empty(folder: Path) -> None:
    # Folders move up before they are entered: no recursion, and no path that is longer than the kernel takes.
    while folders := _unlink_files(folder):
        for inner in folders:
            for deeper in _unlink_files(inner):
                deeper.rename(folder / uuid.uuid4().hex)
            inner.rmdir()


def _unlink_files(folder: Path) -> list[Path]:
    """Delete what is no folder; return the folders."""
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
