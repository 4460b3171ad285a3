"""Copies of stored artifacts: each is compared with its digest on its way, and has its name only once it is complete.

Folders may have been in other hands: below them, only regular files of the expected size are read, and no links are followed.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

_CHUNK_BYTES: Final = 1 << 20


class Differs(Exception):
    """A file whose content is not that of its digest, or that is no regular file."""


def open_plain(folder: Path, *names: str) -> BinaryIO:
    """Open a regular file below a folder. A link, device or pipe in its place is not opened, nor is what is behind a link.

    Raises:
        Differs: it is no regular file, or one of the names is a link.
        OSError: it cannot be opened, such as because it does not exist.
    """
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names:
            below = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
            if stat.S_ISLNK(os.fstat(descriptor).st_mode):
                raise Differs(f"{Path(folder, *names)} is a link, or below one")
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Differs(f"{Path(folder, *names)} is no regular file")
        return open(f"/proc/self/fd/{descriptor}", "rb")  # noqa: PTH123 - what was looked at, under whichever name
    except NotADirectoryError:
        raise Differs(f"{Path(folder, *names)} is below a file") from None
    finally:
        os.close(descriptor)


class VerifiedFile:
    """A file being written, whose bytes are hashed as they arrive."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hasher = hashlib.sha256()
        self.size_bytes = 0
        """The number of bytes so far."""

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._hasher.update(data)
        self._file.write(data)
        self.size_bytes += len(data)

    @property
    def digest(self) -> str:
        """The sha256 of the bytes so far."""
        return self._hasher.hexdigest()


@contextmanager
def verified_file(target: Path, digest: str) -> Iterator[VerifiedFile]:
    """Yield a new file, which is renamed to `target` at the end of the block if its sha256 is `digest`.

    Raises:
        Differs: the content has another digest.
        OSError: the file cannot be written.
    """
    part = target.with_name(f"{target.name}.part")
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part.unlink(missing_ok=True)  # a killed copy may have left one that its owner may not write any more
    try:
        with part.open("wb") as file:
            written = VerifiedFile(file)
            yield written
            if written.digest != digest:
                raise Differs
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o444)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def copy_verified(reader: BinaryIO, target: Path, digest: str, size_bytes: int) -> None:
    """Copy an open file to `target`, which exists only once its sha256 is `digest`.

    Raises:
        Differs: the content has another size or digest; one that is longer is not read.
        OSError: a file cannot be read or written.
    """
    if os.fstat(reader.fileno()).st_size != size_bytes:
        raise Differs
    with verified_file(target, digest) as file:
        while file.size_bytes < size_bytes and (chunk := reader.read(min(_CHUNK_BYTES, size_bytes - file.size_bytes))):
            file.write(chunk)


def link_or_copy(source: Path, target: Path, digest: str, size_bytes: int) -> None:
    """Give `target` the same content as `source` without using space, by a hard link; copy between file systems.

    Raises:
        Differs, OSError: as `copy_verified`.
    """
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open_plain(source.parent, source.name) as reader:
        try:
            target.hardlink_to(source)
        except FileNotFoundError:
            raise
        except OSError:  # another file system, or one without links
            copy_verified(reader, target, digest, size_bytes)
