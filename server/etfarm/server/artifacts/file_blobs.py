"""Artifacts as files of this machine, which is where they are by default."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from etfarm.server.artifacts.blobs import BLOBS, CACHE, Reading, Verified, place_of, settle
from etfarm.server.artifacts.digests import require_digest
from etfarm.server.artifacts.folder_claim import claim
from etfarm.server.artifacts.holdings import Holdings
from etfarm.server.artifacts.integrity import Integrity
from etfarm.server.artifacts.s3.errors import BlobsUnusable
from etfarm.server.state.identity import Identity
from etfarm.v1 import common_pb2

log = structlog.get_logger()

_BATCH: Final = 20
"""Number of digests that are looked up between two checks of the clock; each takes a system call."""


def require_no_copies(folder: Path) -> None:
    """Check that a store's folder has no copies of artifacts in a bucket.

    Raises:
        BlobsUnusable: it has some.
    """
    if (copies := folder / CACHE).is_dir():
        raise BlobsUnusable(
            f"The farm's artifacts are in a bucket: {copies} has copies of them.",
            "Start the server with --blobs; or delete the folder if they are files again.",
        )


class FileBlobs:
    """Files under a folder. Each server process verifies a file on its first read, and quarantines a damaged one.

    Args:
        folder: folder of the store; complete artifacts are in `blobs/ab/abcdef...`, damaged ones in `quarantine/`.
        scratch: an existing folder on the same file system.
        holdings: which artifacts the database has. Those without a file are lost, which counts as damage.
        pool: thread pool that moves and deletes files.
        verifiers: thread pool that computes hashes.
        identity: returns the identity of a farm whose servers may share the folder; None if it is this server's alone.
    """

    batch = _BATCH

    def __init__(
        self,
        folder: Path,
        scratch: Path,
        holdings: Holdings,
        pool: ThreadPoolExecutor,
        verifiers: ThreadPoolExecutor,
        identity: Callable[[], Awaitable[Identity]] | None = None,
    ) -> None:
        self._folder = folder / BLOBS
        self._folder.mkdir(parents=True, exist_ok=True)
        self._folder_text = os.fspath(self._folder)
        self._scratch = scratch
        self._holdings = holdings
        self._pool = pool
        self._identity = identity
        self.integrity = Integrity(folder / "quarantine", self.place, verifiers)

    def place(self, digest: str) -> Path:
        """Return the path of an artifact's file, whether or not it exists."""
        require_digest(digest)
        return place_of(self._folder, digest)

    async def open(self) -> None:
        """Check that the artifacts are files, and claim the folder for the farm.

        Raises:
            BlobsUnusable: the folder has copies of those of a bucket, or is another farm's.
        """
        require_no_copies(self._folder.parent)
        if self._identity is not None:
            farm = await self._identity()
            await asyncio.get_running_loop().run_in_executor(self._pool, claim, self._folder.parent, farm)

    async def sizes(self, digests: Sequence[str]) -> dict[str, int]:
        """Return the sizes of the artifacts that are stored completely. Never waits."""
        sizes = {}
        for digest in digests:
            try:
                # A fifth of a Path's time, for each of 100,000 digests.
                sizes[digest] = os.stat(f"{self._folder_text}/{digest[:2]}/{digest}").st_size  # noqa: PTH116
            except FileNotFoundError:
                continue
        return sizes

    async def find_damaged(self, wanted: Iterable[str]) -> list[str]:
        """Return the artifacts in `wanted` that are missing or damaged."""
        damaged = await self.integrity.find_damaged(wanted)
        await self._note_lost([digest for digest in damaged if not self.integrity.is_damaged(digest)])
        return damaged

    async def bring(self, wanted: Iterable[str]) -> list[str]:
        """Return the artifacts in `wanted` that are missing or damaged."""
        return await self.find_damaged(wanted)

    async def _note_lost(self, digests: Sequence[str]) -> None:
        """Record which artifacts have no file although the database names them."""
        gone = [digest for digest in digests if self._is_gone(digest)]
        if not gone:
            return
        for digest in await self._holdings.sizes(gone):
            # Again: it may have been stored, or begun to be deleted, in the meantime.
            if self._is_gone(digest):
                self.integrity.mark_damaged(digest)
                log.error("a stored artifact is missing on the disk", digest=digest, path=str(self.place(digest)))

    def _is_gone(self, digest: str) -> bool:
        """Return whether an artifact has no file, and is not being deleted."""
        return not self.place(digest).exists() and not self._withdrawn(digest).exists()

    async def settle(self, path: Path, digest: str) -> None:
        """Move a complete, verified file to its place."""
        await asyncio.get_running_loop().run_in_executor(self._pool, self._settle, path, digest)

    def _settle(self, path: Path, digest: str) -> None:
        settle(path, self.place(digest))
        self.integrity.settled(digest)

    async def read(self, digest: str) -> Reading | None:
        """Open an artifact, and verify it meanwhile; None if it is missing or damaged."""
        try:
            file = self.place(digest).open("rb")
        except FileNotFoundError:
            await self._note_lost([digest])
            return None
        return Reading(file, os.fstat(file.fileno()).st_size, _reach, asyncio.ensure_future(self.integrity.is_whole(digest)))

    async def link(self, digest: str) -> None:
        """Return None: files are read through this server."""

    def withdraw(self, digest: str) -> bool:
        """Rename an artifact's file, so that it does not exist any more."""
        with suppress(FileNotFoundError):
            self.place(digest).replace(self._withdrawn(digest))
        return True

    def restore(self, digests: Collection[str]) -> None:
        """Rename files back; those that were stored again in the meantime stay."""
        for digest in digests:
            withdrawn, place = self._withdrawn(digest), self.place(digest)
            with suppress(FileNotFoundError):
                if place.exists():
                    withdrawn.unlink()
                else:
                    withdrawn.replace(place)

    async def delete(self, digests: Collection[str]) -> None:
        """Delete the files of artifacts that were withdrawn."""
        for digest in digests:
            # In a thread: the deletion of a large file takes long.
            unlink = partial(self._withdrawn(digest).unlink, missing_ok=True)
            await asyncio.get_running_loop().run_in_executor(self._pool, unlink)

    def _withdrawn(self, digest: str) -> Path:
        return self._scratch / f"removed-{digest}"

    async def verify(self) -> AsyncIterator[Verified]:
        """Verify every file (see `Integrity.verify`), and find those that the database names and that are not there."""
        done = done_bytes = 0
        named = set[str]()
        async for done, total, done_bytes, damaged in self.integrity.verify(self._folder):
            named.update(artifact.digest for artifact in damaged)
            yield done, total, done_bytes, damaged
        lost = list[common_pb2.Artifact]()
        async for digest, size_bytes in self._holdings.all_sizes():
            # One that was found damaged before has its file in the quarantine.
            if self._is_gone(digest) and digest not in named:
                lost.append(common_pb2.Artifact(digest=digest, size_bytes=size_bytes))
        await self._note_lost([each.digest for each in lost if not self.integrity.is_damaged(each.digest)])
        lost = [each for each in lost if self.integrity.is_damaged(each.digest)]
        yield done + len(lost), done + len(lost), done_bytes, lost

    def spare_bytes(self) -> int:
        """Return 0: no file is a copy."""
        return 0

    async def tend(self) -> None:
        """Do nothing."""


async def _reach(position: int) -> None:
    pass
