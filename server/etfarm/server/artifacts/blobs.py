"""The files of complete artifacts, named by digest. Files are renamed into place, so every named file is complete."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from etfarm.v1 import common_pb2
from etfarm.wire import digest as digests

ARTIFACTS: Final = "artifacts"
"""Name of the store's folder in the server's data folder."""

BLOBS: Final = "blobs"
"""Name of the folder of complete artifacts in the store's folder: `ab/abcdef...`."""


def place_of(blobs: Path, digest: str) -> Path:
    """Return the path of an artifact's file, whether or not it exists."""
    return blobs / digest[:2] / digest


def settle(path: Path, place: Path) -> None:
    """Move a complete file to its place, so that after a power failure every file there is complete."""
    place.parent.mkdir(parents=True, exist_ok=True)
    path.chmod(0o444)
    # Sync the bytes before the rename.
    _sync(path)
    path.replace(place)
    _sync(place.parent)


def write_blob(data: Path, content: bytes) -> common_pb2.Artifact:
    """Store a file in a server's data folder while no store is open; a stored file with the same content stays.

    The caller adds its rows to the database.
    """
    artifact = common_pb2.Artifact(digest=digests.of_bytes(content), size_bytes=len(content))
    blobs = data / ARTIFACTS / BLOBS
    place = place_of(blobs, artifact.digest)
    if not place.exists():
        blobs.mkdir(parents=True, exist_ok=True)
        part = blobs / f"{artifact.digest}.part"
        try:
            try:
                part.write_bytes(content)
            except PermissionError:  # read-only: settled by a process that was killed before it renamed the file
                part.unlink()
                part.write_bytes(content)
            settle(part, place)
        except OSError:
            part.unlink(missing_ok=True)
            raise
    return artifact


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
