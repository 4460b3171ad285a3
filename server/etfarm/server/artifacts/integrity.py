"""Integrity of stored artifacts: each server process verifies an artifact on its first read; damaged ones are quarantined."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import structlog

from etfarm.v1 import common_pb2
from etfarm.wire import digest as digests
from etfarm.wire.shielding import shielded

log = structlog.get_logger()

_BATCH = 100

MOST_VERIFIED: Final = 2_000
"""Number of files, for 0.4 MB, after which those that were not read since the last such time are forgotten: they are verified
again on their next read."""

_Stamp = int
"""Hash of a digest with its file's inode, modification time in ns, and size in bytes, which change when the file is replaced or
rewritten. Nobody can look for equal ones: Python's hashes of text have a secret."""


class Integrity:
    """The stored files that this process has verified.

    Args:
        quarantine: folder to which damaged files are moved, for an admin to inspect; None if the files are copies, of which a
            damaged one is deleted.
        place: returns the path of an artifact.
        pool: thread pool that computes hashes.
    """

    def __init__(self, quarantine: Path | None, place: Callable[[str], Path], pool: ThreadPoolExecutor) -> None:
        self._quarantine = quarantine
        self._place = place
        self._pool = pool
        self._verified: set[_Stamp] = set()
        self._verified_before: set[_Stamp] = set()
        self._checks: dict[str, asyncio.Task[bool]] = {}
        kept = quarantine.iterdir() if quarantine is not None and quarantine.is_dir() else ()
        self._damaged = {path.name.partition(".")[0] for path in kept}
        self.on_damaged: Callable[[str, int], None] = lambda digest, size_bytes: None
        """Called with (digest, size in bytes) of each artifact that turns out to be damaged."""

    def is_damaged(self, digest: str) -> bool:
        """Return whether the artifact turned out to be damaged and has not been stored again."""
        return digest in self._damaged

    def mark_damaged(self, digest: str) -> None:
        """Record damage that is reported already, or is in the log."""
        self._damaged.add(digest)

    def settled(self, digest: str) -> None:
        """Record that verified bytes were just moved into the store."""
        self._damaged.discard(digest)
        if (stamp := self._stamp(digest)) is not None:
            self._remember(stamp)

    def is_known_whole(self, digest: str) -> bool:
        """Return whether this process has verified the file in its current state."""
        stamp = self._stamp(digest)
        if stamp in self._verified_before and stamp is not None:
            self._remember(stamp)
        return stamp in self._verified

    async def is_whole(self, digest: str) -> bool:
        """Return whether the artifact is stored and undamaged. A damaged artifact is moved to the quarantine."""
        if self.is_known_whole(digest):
            return True
        check = self._checks.get(digest)
        if check is None:
            check = asyncio.create_task(self._check(digest), name=f"verify-{digest[:12]}")
            self._checks[digest] = check
            check.add_done_callback(lambda _: self._checks.pop(digest, None))
        return await shielded(check)

    async def find_damaged(self, wanted: Iterable[str]) -> list[str]:
        """Return the artifacts in `wanted` that are missing or damaged."""
        names = list(dict.fromkeys(wanted))
        if len(names) > _BATCH:
            # With many files, even stat blocks the event loop for too long.
            loop = asyncio.get_running_loop()
            unknown = await loop.run_in_executor(self._pool, lambda: [name for name in names if not self.is_known_whole(name)])
        else:
            unknown = [name for name in names if not self.is_known_whole(name)]
        damaged = []
        for start in range(0, len(unknown), _BATCH):
            batch = unknown[start : start + _BATCH]
            results = await asyncio.gather(*map(self.is_whole, batch))
            damaged += [digest for digest, is_whole in zip(batch, results, strict=True) if not is_whole]
        return damaged

    async def recheck(self, digest: str) -> bool:
        """Read the bytes from disk again; return whether they are undamaged."""
        self._forget(digest)
        return await self.is_whole(digest)

    async def verify(self, blobs: Path) -> AsyncIterator[tuple[int, int, int, list[common_pb2.Artifact]]]:
        """Verify all artifacts of a folder. Yield (done, total, bytes done, newly detected damage) periodically and last."""
        loop = asyncio.get_running_loop()
        paths = await loop.run_in_executor(self._pool, lambda: sorted(blobs.glob("??/*")))
        done_bytes, damaged, clock = 0, list[common_pb2.Artifact](), loop.time()
        for done, path in enumerate(paths, 1):
            try:
                size_bytes = path.stat().st_size
            except FileNotFoundError:
                continue  # deleted in the meantime
            if not await self.recheck(path.name) and self.is_damaged(path.name):
                damaged.append(common_pb2.Artifact(digest=path.name, size_bytes=size_bytes))
            done_bytes += size_bytes
            if done < len(paths) and (now := loop.time()) - clock > 0.2:
                clock = now
                yield done, len(paths), done_bytes, damaged
                damaged = []
        yield len(paths), len(paths), done_bytes, damaged

    async def _check(self, digest: str) -> bool:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._hash, digest)

    def _hash(self, digest: str) -> bool:
        path = self._place(digest)
        stamp = self._stamp(digest)
        if stamp is None:
            return False
        try:
            # Reading anything but a regular file, such as a pipe, could block the thread forever.
            actual = digests.of_file(path) if path.is_file() else "not a file"
        except FileNotFoundError:
            return False
        except OSError as error:
            # An unreadable sector is damage, too.
            actual = f"unreadable: {error.strerror}"
        if actual == digest:
            self._remember(stamp)
            return True
        if self._stamp(digest) != stamp:
            # The file was replaced in the meantime, by verified bytes.
            return self.is_known_whole(digest)
        self._move_away(path, digest, actual)
        return False

    def _move_away(self, path: Path, digest: str, actual: str) -> None:
        self._forget(digest)
        if self._quarantine is None:
            path.unlink()
            log.warning("a copy of an artifact is damaged; it is fetched again", digest=digest, actual=actual)
            return
        size_bytes = path.stat().st_size
        target = self._quarantine / f"{digest}.{time.time_ns()}"
        self._quarantine.mkdir(exist_ok=True, mode=0o700)
        self._damaged.add(digest)
        path.replace(target)
        self.report(digest, actual, size_bytes, str(target))

    def _stamp(self, digest: str) -> _Stamp | None:
        try:
            status = self._place(digest).stat()
        except FileNotFoundError:
            return None
        return hash((digest, status.st_ino, status.st_mtime_ns, status.st_size))

    def _remember(self, stamp: _Stamp) -> None:
        if len(self._verified) >= MOST_VERIFIED:
            self._verified_before, self._verified = self._verified, set()
        self._verified.add(stamp)

    def _forget(self, digest: str) -> None:
        if (stamp := self._stamp(digest)) is not None:
            self._verified.discard(stamp)
            self._verified_before.discard(stamp)

    def report(self, digest: str, actual: str, size_bytes: int, moved_to: str) -> None:
        """Record that a stored artifact turned out to be damaged."""
        self._damaged.add(digest)
        log.error("a stored artifact is damaged", digest=digest, actual=actual, size_bytes=size_bytes, moved_to=moved_to)
        self.on_damaged(digest, size_bytes)
