"""Where the artifacts of a farm are: files, or a bucket; and copies from one to the other, each compared with its digest."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from etfarm.server.artifacts.blobs import BLOBS, place_of
from etfarm.server.artifacts.s3.blobs import key_of
from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.artifacts.s3.location import BucketLocation
from etfarm.server.state.copies import copy_unfinished
from etfarm.server.transfer.errors import CopyDiffers
from etfarm.server.transfer.files import Differs, copy_verified, link_or_copy, open_plain, verified_file
from etfarm.server.transfer.rows import OnProgress
from etfarm.wire import digest as digests
from etfarm.wire.errors import error_for
from etfarm.wire.shielding import end_tasks

_AT_ONCE: Final = 8
"""Number of artifacts that are copied at a time."""
_MARK: Final = "copying"
"""Key of the object that names what is copied to a bucket."""
_MARK_BYTES: Final = 4096
"""Maximum number of bytes that are read of it."""


class Artifacts(Protocol):
    """The artifacts of a farm. Each operation raises FileNotFoundError or Differs for one that is missing or damaged."""

    async def size(self, digest: str) -> int | None:
        """Return the size of an artifact; None if it is missing."""

    def file(self, digest: str, size_bytes: int) -> AbstractAsyncContextManager[Path]:
        """Yield a file with the bytes of an artifact, which need not be verified."""

    async def read(self, digest: str, size_bytes: int, target: Path) -> None:
        """Copy an artifact to a file, which exists only once its sha256 is the digest."""

    async def write(self, digest: str, size_bytes: int, source: Artifacts) -> None:
        """Store an artifact of another place, compared with its digest on arrival."""


class FileArtifacts:
    """Artifacts in files. Below their folder, links are not followed.

    Args:
        folder: the folder `blobs` of a store.
        link: whether another file of the same artifact may be a link to this one's.
    """

    def __init__(self, folder: Path, *, link: bool = False) -> None:
        self._folder = folder
        self._link = link

    def place(self, digest: str) -> Path:
        """Return the path of an artifact, whether or not it exists."""
        return place_of(self._folder, digest)

    async def size(self, digest: str) -> int | None:
        """Return the size of an artifact; None if it is missing."""
        try:
            status = self.place(digest).lstat()
        except FileNotFoundError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    @asynccontextmanager
    async def file(self, digest: str, size_bytes: int) -> AsyncIterator[Path]:
        """Yield the file itself."""
        with open_plain(self._folder, digest[:2], digest) as file:
            if os.fstat(file.fileno()).st_size != size_bytes:
                raise Differs
            yield self.place(digest)

    async def read(self, digest: str, size_bytes: int, target: Path) -> None:
        """Copy an artifact to a file."""
        await asyncio.to_thread(self._read, digest, size_bytes, target)

    def _read(self, digest: str, size_bytes: int, target: Path) -> None:
        if self._link:
            link_or_copy(self.place(digest), target, digest, size_bytes)
            return
        with open_plain(self._folder, digest[:2], digest) as file:
            copy_verified(file, target, digest, size_bytes)

    async def write(self, digest: str, size_bytes: int, source: Artifacts) -> None:
        """Store an artifact of another place."""
        await source.read(digest, size_bytes, self.place(digest))


class BucketArtifacts:
    """Artifacts in a bucket.

    Args:
        scratch: folder for artifacts on their way to another bucket; created when it is needed.
    """

    def __init__(self, location: BucketLocation, scratch: Path) -> None:
        self.bucket = Bucket(location)
        self._scratch = scratch

    async def size(self, digest: str) -> int | None:
        """Return the size of an artifact; None if it is missing."""
        return await self.bucket.size(key_of(digest))

    @asynccontextmanager
    async def file(self, digest: str, size_bytes: int) -> AsyncIterator[Path]:
        """Yield a copy, which is deleted afterwards."""
        path = self._scratch / uuid.uuid4().hex
        try:
            await self.read(digest, size_bytes, path)
            yield path
        finally:
            path.unlink(missing_ok=True)

    async def read(self, digest: str, size_bytes: int, target: Path) -> None:
        """Copy an artifact to a file; one of another size is not read, since it could fill the disk.

        Raises:
            BlobsUnavailable: the bucket's server failed.
        """
        found_bytes = await self.bucket.size(key_of(digest))
        if found_bytes is None:
            raise FileNotFoundError(digest)
        if found_bytes != size_bytes:
            raise Differs
        with verified_file(target, digest) as file:
            async for piece in self.bucket.pieces(key_of(digest), size_bytes):
                file.write(piece)

    async def is_begun(self, name: str) -> bool:
        """Return whether the bucket's folder is marked as the copy of a farm's artifacts.

        Raises:
            COPY_UNFINISHED: it has an unfinished copy of another farm.
            BlobsUnavailable: the bucket's server failed.
        """
        if (former := await self.bucket.text(_MARK, _MARK_BYTES)) is None:
            return False
        if former != name:
            raise copy_unfinished(self.bucket.location.place, former)
        return True

    async def begin(self, name: str) -> None:
        """Mark the bucket's folder as the copy of a farm's artifacts.

        Raises:
            TARGET_NOT_EMPTY: it has artifacts.
            BlobsUnavailable: the bucket's server failed.
        """
        await self.require_empty()
        await self.bucket.put(_MARK, name.encode())

    async def require_empty(self) -> None:
        """Check that the bucket's folder has no artifacts.

        Raises:
            TARGET_NOT_EMPTY: it has some.
            BlobsUnavailable: the bucket's server failed.
        """
        async for _ in self.bucket.list(BLOBS):
            raise error_for(
                "TARGET_NOT_EMPTY",
                f"{self.bucket.location.place} has artifacts already.",
                "Name an empty folder of the bucket: one for each farm.",
            )

    async def clear(self) -> None:
        """Delete all artifacts of the bucket's folder.

        Raises:
            BlobsUnavailable: the bucket's server failed.
        """
        async for page in self.bucket.list(BLOBS):
            for start in range(0, len(page), _AT_ONCE):
                await asyncio.gather(*(self.bucket.delete(each.key) for each in page[start : start + _AT_ONCE]))

    async def finish(self) -> None:
        """Take the mark away.

        Raises:
            BlobsUnavailable: the bucket's server failed.
        """
        await self.bucket.delete(_MARK)

    async def write(self, digest: str, size_bytes: int, source: Artifacts) -> None:
        """Store an artifact of another place, and read it back.

        Raises:
            CopyDiffers: the bucket returns other bytes.
            BlobsUnavailable: the bucket's server failed.
        """
        async with source.file(digest, size_bytes) as path:
            if await asyncio.to_thread(digests.of_file, path) != digest:
                raise Differs
            await self.bucket.put(key_of(digest), path)
        hasher = hashlib.sha256()
        async for piece in self.bucket.pieces(key_of(digest), size_bytes):
            hasher.update(piece)
        if hasher.hexdigest() != digest:
            await self.bucket.delete(key_of(digest))
            raise CopyDiffers(
                f"{self.bucket.location.place} returns other bytes of the artifact {digest[:12]} than it was sent.",
                "Check the S3 server and its disks, and copy again.", digest=digest,
            )  # fmt: skip


def artifacts_of(location: BucketLocation | None, blobs: Path, scratch: Path) -> Artifacts:
    """Return the artifacts of a farm.

    Args:
        location: the bucket; None for files.
        blobs: folder of the files.
        scratch: folder for artifacts on their way to another bucket.
    """
    return FileArtifacts(blobs) if location is None else BucketArtifacts(location, scratch)


@dataclass
class Copied:
    """What a copy of artifacts did."""

    count: int = 0
    size_bytes: int = 0
    new_count: int = 0
    """Number of those that the target did not have before."""
    new_bytes: int = 0
    lost: list[str] = field(default_factory=list)
    """Digests of those that are missing or damaged where they were to be copied from."""


def _require_name(digest: object, size_bytes: object) -> None:
    """Refuse what a database names that is no artifact: paths are made of it."""
    if not (isinstance(digest, str) and digests.is_digest(digest) and isinstance(size_bytes, int) and size_bytes >= 0):
        raise CopyDiffers(
            f"The farm's database names the artifact {str(digest)[:80]!r} of {str(size_bytes)[:40]} bytes, which is none.",
            "Somebody has changed the database; use a backup.",
        )


async def count_missing_bytes(target: Artifacts, wanted: Iterator[tuple[str, int]]) -> int:
    """Return how many bytes a copy of the artifacts adds to the target."""
    total = 0
    for digest, size_bytes in wanted:
        _require_name(digest, size_bytes)
        if await target.size(digest) != size_bytes:
            total += size_bytes
    return total


async def copy_artifacts(
    source: Artifacts, target: Artifacts, wanted: Iterator[tuple[str, int]], total: int, on_progress: OnProgress
) -> Copied:
    """Copy the artifacts that the target lacks.

    Args:
        wanted: digests and sizes; read as they are needed.
        total: their number.

    Raises:
        CopyDiffers: the target has other bytes than were written, or what is wanted is no artifact.
        BlobsUnavailable: a bucket's server failed.
        OSError: a file cannot be written.
    """
    copied, done = Copied(), 0

    async def work() -> None:
        nonlocal done
        for digest, size_bytes in wanted:
            _require_name(digest, size_bytes)
            try:
                if await target.size(digest) != size_bytes:
                    await target.write(digest, size_bytes, source)
                    copied.new_count += 1
                    copied.new_bytes += size_bytes
                copied.count += 1
                copied.size_bytes += size_bytes
            except (FileNotFoundError, Differs):
                copied.lost.append(digest)
            done += 1
            on_progress("artifacts copied", done, total)

    workers = [asyncio.create_task(work(), name="copy artifacts") for _ in range(_AT_ONCE)]
    try:
        await asyncio.gather(*workers)
    finally:
        await end_tasks(*workers)
    return copied
