"""Files that are written as a whole: a reader finds all of the new bytes or what was there before."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, data: bytes, *, durable: bool = False, mode: int = 0o666) -> None:
    """Write a file as a whole; the bytes gather in a file beside it, which then takes its name.

    Args:
        path: the file. Whatever stands there is replaced.
        data: all of its bytes.
        durable: the file survives a power cut once this returns. Its folder must have one writer, since the file beside it is
            `NAME.part`, so that the next write replaces what a power cut left of this one.
        mode: the new file's permissions, less the umask.

    Raises:
        OSError: the file cannot be written; nothing is left of it.
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
        # The file's name is the folder's data.
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
