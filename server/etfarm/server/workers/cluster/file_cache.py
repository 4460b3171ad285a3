"""The files of requests on a node, stored by digest and verified on arrival."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import uuid
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Final

from etfarm.server.workers.channel.room import require_room
from etfarm.wire import digest as digests
from etfarm.wire.errors import FarmError, Kind

KEPT_BYTES: Final = 20 << 30
"""Total size beyond which the files that were used longest ago are deleted; files of running children are kept."""


class FileDiffers(FarmError):
    """A file arrived at a node, or from a node, with other bytes than were sent."""

    reason = "DIGEST_MISMATCH"
    kind = Kind.DATA_LOSS


def _child_ended() -> FileDiffers:
    return FileDiffers("A file arrived at the compile node for a child that has ended.", "Retry the job.")


class ArrivingFile:
    """A file that is written piece by piece. Its digest grows with it, since hashing a large file again takes seconds.

    Args:
        path: of the new file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size_bytes = 0
        self.turn = threading.Lock()
        """Held while a thread writes or discards."""
        self._sha256 = hashlib.sha256()
        self._file = path.open("xb")

    @property
    def digest(self) -> str:
        """The digest of what has arrived."""
        return self._sha256.hexdigest()

    def append(self, data: bytes) -> None:
        """Write the next piece. Blocking."""
        self._file.write(data)
        self._sha256.update(data)
        self.size_bytes += len(data)

    def close(self) -> None:
        """Write what is buffered, and close the file."""
        self._file.close()

    def discard(self) -> None:
        """Delete the file."""
        with contextlib.suppress(OSError):  # the disk is full
            self._file.close()
        self.path.unlink(missing_ok=True)


def _append(file: ArrivingFile, data: bytes, *, size: int, digest: str) -> bool:
    """Write a piece and return whether the file is whole; it is closed then."""
    file.append(data)
    if file.size_bytes < size:
        return False
    if file.digest != digest:
        raise FileDiffers(f"A file arrived at the compile node with another digest than {digest[:12]}.", "Retry the job.")
    file.close()
    file.path.chmod(0o444)
    return True


class FileCache:
    """A folder of files, which are named by their digests. Several threads may write files.

    Args:
        folder: existing folder; only this process changes it.
        kept_bytes: see `KEPT_BYTES`.
        reserve_bytes: disk space to keep free.
    """

    def __init__(self, folder: Path, *, kept_bytes: int = KEPT_BYTES, reserve_bytes: int = 0) -> None:
        self._folder = folder
        self._kept_bytes = kept_bytes
        self._reserve_bytes = reserve_bytes
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._holders: dict[str, set[str]] = {}
        self._arriving: dict[tuple[str, str], ArrivingFile] = {}
        """The files that are being written, by holder and digest."""

    def hold(self, holder: str, files: Mapping[str, int]) -> list[str]:
        """Keep files, by digest with their sizes, until `release`. Return the digests of those that are not stored."""
        with self._lock:
            for digest in files:
                self._holders.setdefault(digest, set()).add(holder)
                if digest in self._sizes:
                    self._sizes[digest] = self._sizes.pop(digest)  # used last
            missing = [digest for digest in files if digest not in self._sizes]
            self._make_room(sum(files[digest] for digest in missing))
        return missing

    def holders(self, digest: str) -> Set[str]:
        """Return those that hold a file."""
        return self._holders.get(digest, set())

    def release(self, holder: str) -> None:
        """Let the holder's files be deleted when room is needed, and delete those that it has not written whole."""
        with self._lock:
            for digest, holders in list(self._holders.items()):
                holders.discard(holder)
                if not holders:
                    del self._holders[digest]
            partial = [self._arriving.pop(key) for key in list(self._arriving) if key[0] == holder]
        for file in partial:
            with file.turn:
                file.discard()

    def write(self, holder: str, digest: str, offset: int, data: bytes, size: int) -> None:
        """Write a piece of a file, in order; the last one completes it. A call takes as long as its piece does. Blocking.

        Raises:
            FileDiffers: the complete file has another digest, a piece is missing, or the holder was released.
            DISK_FULL, OSError: the disk has no room, or the file cannot be written.
        """
        path, key = self.path(digest), (holder, digest)
        require_room(self._folder, len(data) + self._reserve_bytes)
        with self._lock:
            if holder not in self.holders(digest):
                raise _child_ended()
            if key not in self._arriving:
                self._arriving[key] = ArrivingFile(self._folder / f"{uuid.uuid4().hex}.part")
            file = self._arriving[key]
        with file.turn:
            if self._arriving.get(key) is not file:
                raise _child_ended()
            if file.size_bytes != offset or offset + len(data) > size:
                raise FileDiffers(f"A file arrived at the compile node with gaps, at byte {offset} of {size}.", "Retry the job.")
            try:
                is_whole = _append(file, data, size=size, digest=digest)
                if is_whole:
                    file.path.rename(path)
            except (OSError, FileDiffers):
                with self._lock:
                    self._arriving.pop(key, None)
                file.discard()
                raise
            if is_whole:
                with self._lock:
                    self._arriving.pop(key, None)
                    self._sizes[digest] = size

    def path(self, digest: str) -> Path:
        """Return the path of a file, whether or not it is stored.

        Raises:
            ValueError: `digest` is not a digest.
        """
        if not digests.is_digest(digest):
            raise ValueError(f"{digest[:100]!r} is not a digest")
        return self._folder / digest

    def _make_room(self, needed_bytes: int) -> None:
        excess = sum(self._sizes.values()) + needed_bytes - self._kept_bytes
        for digest in list(self._sizes):
            if excess <= 0:
                return
            if digest not in self._holders:
                self.path(digest).unlink(missing_ok=True)
                excess -= self._sizes.pop(digest)
