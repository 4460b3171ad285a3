"""A bounded folder of copies of artifacts; the least recently used go first, and those in use stay."""

from __future__ import annotations

import asyncio
import os
from collections import Counter, OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from etfarm.server.artifacts.blobs import place_of


class Cache:
    """The copies of a folder. Each is complete, and is verified before its first use by a process.

    Args:
        folder: the folder; created if it does not exist.
        scratch: an existing folder on the same file system, for copies that are being deleted.
        limit_bytes: size up to which copies are kept. Those in use stay, also beyond it.
    """

    def __init__(self, folder: Path, scratch: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._scratch = scratch
        self._limit_bytes = limit_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._sizes = OrderedDict[str, int]()
        """Sizes of the copies, least recently used first."""
        self._users: Counter[str] = Counter()
        self._pinned: dict[asyncio.Task[object], set[str]] = {}
        self.size_bytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        for _, digest, size_bytes in sorted(_files(folder)):
            self.add(digest, size_bytes)

    def place(self, digest: str) -> Path:
        """Return the path of a copy, whether or not it exists."""
        return place_of(self._folder, digest)

    def add(self, digest: str, size_bytes: int) -> None:
        """Record a copy that is now at its place."""
        self.size_bytes += size_bytes - self._sizes.pop(digest, 0)
        self._sizes[digest] = size_bytes

    def touch(self, digest: str) -> None:
        """Record that a copy is used."""
        if digest in self._sizes:
            self._sizes.move_to_end(digest)

    def pin(self, digests: Iterable[str]) -> None:
        """Keep copies, which need not exist yet, until the current task ends."""
        task = asyncio.current_task()
        assert task is not None
        if task not in self._pinned:
            self._pinned[task] = set()
            task.add_done_callback(self._unpin)
        new = set(digests) - self._pinned[task]
        self._pinned[task] |= new
        self._users.update(new)

    def _unpin(self, task: asyncio.Task[object]) -> None:
        for digest in self._pinned.pop(task):
            self._users[digest] -= 1
            if not self._users[digest]:
                del self._users[digest]

    def is_pinned(self, digest: str) -> bool:
        """Return whether a task other than the current one uses a copy."""
        own = self._pinned.get(asyncio.current_task(), ())  # type: ignore[arg-type]
        return self._users[digest] > (digest in own)

    def spare_bytes(self) -> int:
        """Return the size of the copies that are not in use."""
        return self.size_bytes - sum(self._sizes.get(digest, 0) for digest in self._users)

    def evict(self, needed_bytes: int = 0) -> list[Path]:
        """Take away copies beyond the limit, or as many as free `needed_bytes`; return their files, for the caller to delete."""
        removed = list[Path]()
        goal_bytes = min(self._limit_bytes, self.size_bytes - needed_bytes)
        if self.size_bytes <= goal_bytes:
            return removed
        for digest in [digest for digest in self._sizes if digest not in self._users]:
            if self.size_bytes <= goal_bytes:
                break
            self.evictions += 1
            removed += self.drop(digest)
        return removed

    def drop(self, digest: str) -> list[Path]:
        """Take away a copy; return its file, if it exists, for the caller to delete."""
        self.size_bytes -= self._sizes.pop(digest, 0)
        target = self._scratch / f"evicted-{os.urandom(8).hex()}"
        with suppress(FileNotFoundError):
            self.place(digest).replace(target)
            return [target]
        return []


def _files(folder: Path) -> Iterable[tuple[float, str, int]]:
    for path in folder.glob("??/*"):
        status = path.stat()
        yield status.st_mtime, path.name, status.st_size


def delete(paths: Iterable[Path]) -> None:
    """Delete files. Blocks; the deletion of a large file takes long."""
    for path in paths:
        path.unlink(missing_ok=True)
