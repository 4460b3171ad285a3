"""Copies of stored artifacts: each is compared with its digest on its way, and has its name only once it is complete."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

_CHUNK_BYTES: Final = 1 << 20


class Differs(Exception):
    """A file whose content is not that of its digest."""


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


def copy_verified(source: Path, target: Path, digest: str) -> int:
    """Copy a file to `target`, which exists only once its sha256 is `digest`. Return its size in bytes.

    Raises:
        Differs: the content has another digest.
        OSError: a file cannot be read or written.
    """
    with source.open("rb") as reader, verified_file(target, digest) as file:
        while chunk := reader.read(_CHUNK_BYTES):
            file.write(chunk)
    return file.size_bytes


def link_or_copy(source: Path, target: Path, digest: str) -> int:
    """Give `target` the same content as `source` without using space, by a hard link; copy between file systems.

    Raises:
        Differs, OSError: as `copy_verified`.
    """
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        target.hardlink_to(source)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        return copy_verified(source, target, digest)
    return target.stat().st_size


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
