"""Files that a command writes at its end: checked before it starts, and written atomically."""

from __future__ import annotations

import os
from pathlib import Path

from etfarm.client.errors import OutputUnwritable
from etfarm.wire.atomic_write import write_atomically
from etfarm.wire.errors import error_for


def require_writable(path: Path) -> None:
    """Check an option's path of a file that is written at the end.

    Raises:
        USAGE: the file's folder does not exist, or the file is a folder.
        OutputUnwritable: this user may not write there.
    """
    if not path.parent.is_dir():
        raise error_for("USAGE", f"There is no folder {path.parent} for {path}.", "Create it first.", path=path)
    if path.is_dir():
        raise error_for("USAGE", f"{path} is a folder.", "Name a file.", path=path)
    # A file is replaced, which its folder must allow; a pipe or a device is written to.
    if not os.access(path if path.exists() and not path.is_file() else path.parent, os.W_OK):
        raise OutputUnwritable(f"{path} cannot be written: Permission denied.", "Give another path.", path=path)


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically: a reader gets all of it or the earlier content.

    Raises:
        OutputUnwritable: it cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)  # a pipe or /dev/null: nothing to replace
            return
        write_atomically(path, data)
    except OSError as error:
        raise OutputUnwritable(f"{path} cannot be written: {error.strerror or error}.", "Give another path.", path=path) from None
