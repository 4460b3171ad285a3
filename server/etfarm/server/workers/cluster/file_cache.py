"""The files of requests on a node, stored by digest and verified on arrival."""

from __future__ import annotations

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


class FileCache:
    """A folder of files, which are named by their digests.

    Args:
        folder: existing folder; only this process changes it.
        kept_bytes: see `KEPT_BYTES`.
        reserve_bytes: disk space to keep free.
    """

    def __init__(self, folder: Path, *, kept_bytes: int = KEPT_BYTES, reserve_bytes: int = 0) -> None:
        self._folder = folder
        self._kept_bytes = kept_bytes
        self._reserve_bytes = reserve_bytes
        self._sizes: dict[str, int] = {}
        self._holders: dict[str, set[str]] = {}

    def hold(self, holder: str, files: Mapping[str, int]) -> list[str]:
        """Keep files, by digest with their sizes, until `release`. Return the digests of those that are not stored."""
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
        """Let the holder's files be deleted when room is needed."""
        for digest, holders in list(self._holders.items()):
            holders.discard(holder)
            if not holders:
                del self._holders[digest]

    def write(self, digest: str, offset: int, data: bytes, size: int) -> None:
        """Write a part of a file; the last part completes and verifies it.

        Raises:
            FileDiffers: the complete file has another digest.
            ChildDiskFull: the disk has no room.
        """
        path = self.path(digest)
        part = path.with_name(f"{digest}.part")
        require_room(self._folder, len(data) + self._reserve_bytes)
        with part.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(data)
        if offset + len(data) < size:
            return
        if digests.of_file(part) != digest:
            part.unlink()
            raise FileDiffers(f"A file arrived at the compile node with another digest than {digest[:12]}.", "Retry the job.")
        part.chmod(0o444)
        part.rename(path)
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
