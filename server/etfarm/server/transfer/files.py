"""Copies of stored artifacts: each is compared with its digest on its way, and has its name only once it is complete."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

_CHUNK_BYTES: Final = 1 << 20


class Differs(Exception):
    """A file whose content is not that of its digest."""


def copy_verified(source: Path, target: Path, digest: str) -> int:
    """Copy a file to `target`, which exists only once its sha256 is `digest`. Return its size in bytes.

    Raises:
        Differs: the content has another digest.
        OSError: a file cannot be read or written.
    """
    part = target.with_name(f"{target.name}.part")
    hasher, size_bytes = hashlib.sha256(), 0
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part.unlink(missing_ok=True)  # a killed copy may have left one that its owner may not write any more
    try:
        with source.open("rb") as reader, part.open("wb") as writer:
            while chunk := reader.read(_CHUNK_BYTES):
                hasher.update(chunk)
                writer.write(chunk)
                size_bytes += len(chunk)
            if hasher.hexdigest() != digest:
                raise Differs
            writer.flush()
            os.fsync(writer.fileno())
            os.fchmod(writer.fileno(), 0o444)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return size_bytes


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
