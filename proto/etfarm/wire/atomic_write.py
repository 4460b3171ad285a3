"""Atomic writes of files: a reader sees either the complete new content or the previous one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, data: bytes, *, durable: bool = False, mode: int = 0o666) -> None:
    """Write a file atomically: write a temporary file next to it, then rename that file.

    Args:
        path: the file; an existing one is replaced.
        data: its whole content.
        durable: make the file survive a power cut once this returns. Its folder must have a single writer, since the
            temporary file is always `NAME.part`, so that the next write replaces what a power cut left behind.
        mode: the new file's permissions before the umask.

    Raises:
        OSError: the file cannot be written; the temporary file is removed.
    """
    part = path.with_name(f"{path.name}.part" if durable else f".{path.name}.{os.getpid()}.part")
    try:
        part.unlink(missing_ok=True)  # may have other permissions, or be a link
        with os.fdopen(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)  # the file's name is part of the folder's data


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
