"""The artifact store: files named by digest. Files are renamed into place, so every named file is complete and verified."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, TypeVar

import structlog
from sqlalchemy import Connection

from etfarm.server.access.scope import DEFAULT_PROJECT, agent_holder
from etfarm.server.artifacts.blobs import Blobs, Verified
from etfarm.server.artifacts.digests import require_digest, slices
from etfarm.server.artifacts.errors import (
    ArtifactDamaged,
    DiskFull,
    artifact_missing,
    artifact_not_found,
    quota_exceeded,
)  # fmt: skip
from etfarm.server.artifacts.file_blobs import FileBlobs
from etfarm.server.artifacts.holdings import Holdings
from etfarm.server.artifacts.integrity import Integrity
from etfarm.server.artifacts.limits import StoreLimits
from etfarm.server.artifacts.quotas import Quotas
from etfarm.server.artifacts.room import Room
from etfarm.server.artifacts.s3.blobs import BucketBlobs
from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.artifacts.staging import MAX_CHUNK_BYTES, Staging
from etfarm.server.artifacts.uses import GRANULARITY_S, Uses
from etfarm.server.state import identity
from etfarm.server.state.engine import Database
from etfarm.server.state.identity import Identity
from etfarm.server.state.steady_clock import SteadyClock
from etfarm.v1 import artifact_pb2, common_pb2
from etfarm.wire import digest as digests
from etfarm.wire.chunks import CHUNK_BYTES, spans
from etfarm.wire.errors import error_for

__all__ = [
    "MAX_CHUNK_BYTES",
    "ArtifactDamaged",
    "DiskFull",
    "Store",
    "artifact_missing",
    "quota_exceeded",
]  # fmt: skip

log = structlog.get_logger()

T = TypeVar("T")

_EXPIRE_EVERY: Final = 6
"""Expired artifacts are deleted each time that uses were recorded so often: every hour."""

_SPACE_POLL_S = 1.0
"""Interval at which a full disk is checked for free space."""


class Store:
    """The artifacts of a farm, with their holders.

    The bytes of an artifact are stored once: as files under the folder, or as objects of a bucket, of which the folder then has
    copies. Unfinished uploads are in `uploads/`. A holder (a project's name, `agent_holder(...)` or FARM_HOLDER) can only read
    the artifacts that it holds. A holding is created by an upload of all bytes, which proves that the uploader has them, or by
    the server itself; in both cases only after the bytes are stored.

    Args:
        bucket: the bucket of the artifacts; None to store them as files.
    """

    def __init__(
        self,
        folder: Path,
        database: Database,
        limits: StoreLimits | None = None,
        clock: Callable[[], float] | None = None,
        bucket: Bucket | None = None,
    ) -> None:
        self.limits = limits or StoreLimits()
        self._uploads = folder / "uploads"
        self._uploads.mkdir(parents=True, exist_ok=True)
        # Separate thread pools: neither screening nor an analysis that occupies asyncio's threads may delay an upload.
        self._pool = ThreadPoolExecutor(self.limits.threads, thread_name_prefix="artifact-bytes")
        self._verifiers = ThreadPoolExecutor(self.limits.verifiers, thread_name_prefix="artifact-verify")
        self.holdings = Holdings(database)
        self.uses = Uses(database, clock or SteadyClock())

        def read_identity() -> Awaitable[Identity]:
            return database.read(identity.read)

        self.blobs: Blobs = (
            FileBlobs(
                folder, self._uploads, self.holdings, self._pool, self._verifiers, read_identity if database.is_shared else None
            )
            if bucket is None
            else BucketBlobs(
                bucket, folder, self._uploads, self.holdings, read_identity, self._pool, self._verifiers,
                cache_bytes=self.limits.cache_bytes, floor_bytes=self.limits.floor_bytes,
            )
        )  # fmt: skip
        self.room = Room(
            folder, self.limits.reserve_bytes, self.limits.work_bytes,
            free=lambda folder: shutil.disk_usage(folder).free + self.blobs.spare_bytes(),
        )  # fmt: skip
        self._staging = Staging(self._uploads, self.room, self.limits, self._pool)
        self.quotas = Quotas(self.holdings, self._staging, self.limits)
        self._idle_since: dict[str, datetime] = {}
        """Since when an agent with holdings is known to have no attempt, by holder."""
        self._adopting: set[str] = set()
        self._unshared: set[str] = set()
        """New uploads that only their uploader knows, so that nothing else can refer to them."""
        self.downloaded = Counter[str]()
        """Bytes that callers downloaded since the start of this server: through it (`server`), or by links (`s3`)."""

    @property
    def integrity(self) -> Integrity:
        """What is known about damage."""
        return self.blobs.integrity

    async def open(self) -> None:
        """Get ready, after the database is open.

        Raises:
            BlobsUnusable: the folder is that of a store with artifacts at another place.
        """
        await self.blobs.open()

    def path(self, digest: str) -> Path:
        """Return the path of an artifact's file, which `bring` or `require_whole` has made readable. Never write it.

        Raises:
            ARTIFACT_NOT_FOUND: the store does not hold the artifact.
            ArtifactDamaged: the artifact is damaged and has not been stored again.
        """
        path = self.place(digest)
        if not path.exists():
            raise self._missing_error(digest)
        return path

    def _missing_error(self, digest: str) -> Exception:
        return ArtifactDamaged(digest) if self.integrity.is_damaged(digest) else artifact_not_found(digest)

    async def has(self, digest: str) -> bool:
        """Return whether the artifact is stored completely. The caller may refer to it from now on, so it stays."""
        return digest in await self.sizes([digest])

    async def has_for_now(self, digest: str) -> bool:
        """Return whether the artifact is stored completely, for a caller that will not refer to it later."""
        return digest in await self.sizes([digest], for_now=True)

    async def sizes(self, wanted: Sequence[str], *, for_now: bool = False) -> dict[str, int]:
        """Return the sizes of those artifacts that are stored completely. The caller may refer to them from now on.

        Args:
            for_now: the caller will not refer to them later.
        """
        sizes = dict[str, int]()
        async for batch in slices(wanted, self.blobs.batch):
            for digest in batch:
                require_digest(digest)
            stored = await self.blobs.sizes(batch)
            # Before the next await, so that they are not deleted.
            for digest in () if for_now else stored:
                self._unshared.discard(digest)
                self.uses.mark(digest)
            sizes |= stored
        return sizes

    async def absent(self, wanted: Iterable[str]) -> list[str]:
        """Return the artifacts in `wanted` that are missing or damaged, for any holder. Never reveal the result to clients."""
        digests = list(wanted)
        damaged = set(await self.blobs.find_damaged(digests))
        stored = await self.sizes(digests)
        return [digest for digest in digests if digest in damaged or digest not in stored]

    async def find_lost(self, wanted: Iterable[str]) -> list[str]:
        """Return the artifacts in `wanted` that the store had, and whose bytes are damaged or gone as far as is known here."""
        return [digest for digest in await self.blobs.find_damaged(wanted) if self.integrity.is_damaged(digest)]

    async def bring(self, wanted: Iterable[str]) -> None:
        """Make files readable until the current task ends, if they are stored and whole; those that are not have no file."""
        digests = list(wanted)
        damaged = set(await self.blobs.bring(digests))
        await self.sizes([digest for digest in digests if digest not in damaged])

    async def require_whole(self, wanted: Iterable[str]) -> None:
        """Make files readable until the current task ends. Each server process computes each hash once. Missing ones pass.

        Raises:
            ArtifactDamaged: the bytes of an artifact changed where they are stored.
            BlobsUnavailable: the bucket's server failed.
        """
        for digest in await self.blobs.bring(wanted):
            if self.integrity.is_damaged(digest):
                raise ArtifactDamaged(digest)

    async def missing(self, wanted: Iterable[str], holder: str) -> list[str]:
        """Return the artifacts in `wanted` that `holder` does not hold, or that are missing or damaged."""
        digests = list(wanted)
        async for batch in slices(digests):
            for digest in batch:
                require_digest(digest)
        held = await self.holdings.held(digests, [holder])
        damaged = set(await self.blobs.find_damaged(held))
        stored = await self.sizes([digest for digest in dict.fromkeys(digests) if digest in held and digest not in damaged])
        # Before the answer: the caller relies on the artifacts, also if this server is killed in the meantime.
        await self.uses.write(held)
        return [digest for digest in digests if digest not in stored]

    async def require(self, wanted: Iterable[str], holder: str) -> None:
        """Raise an error if `holder` does not hold an artifact, as if the artifact were not stored.

        Raises:
            ARTIFACT_MISSING: an artifact is not stored, or `holder` does not hold it.
            ArtifactDamaged: an artifact is damaged and has not been stored again.
        """
        if missing := await self.missing(wanted, holder):
            digest = missing[0]
            if self.integrity.is_damaged(digest) and await self.holds(digest, [holder]):
                raise ArtifactDamaged(digest)
            raise artifact_missing(digest)

    async def is_held(self, digest: str, holders: Collection[str]) -> bool:
        """Return whether one of `holders` holds the artifact and its bytes are stored."""
        return await self.has_for_now(digest) and bool(await self.holdings.held([digest], holders))

    async def holds(self, digest: str, holders: Collection[str]) -> bool:
        """Return whether one of `holders` holds the artifact, even if it is damaged."""
        self.place(digest)
        return bool(await self.holdings.held([digest], holders))

    async def find_held(self, digests: Collection[str], holders: Collection[str]) -> set[str]:
        """Return those of several artifacts whose bytes are stored, and that one of `holders` holds."""
        return await self.holdings.held(await self.sizes(list(digests), for_now=True), holders)

    async def hold(
        self,
        holder: str,
        digests: Iterable[str],
        owner: str,
        *,
        for_now: bool = False,
        also: Callable[[Connection], object] | None = None,
    ) -> None:
        """Add holdings of stored artifacts by the server's decision, e.g. after a cache hit. Missing artifacts are skipped.

        Args:
            for_now: whether `discard` may still delete the artifacts.
            also: writes something else in the same transaction.
        """
        wanted = list(digests)
        stored = await self.sizes(wanted, for_now=for_now)
        await self.holdings.add(holder, [digest for digest in wanted if digest in stored], owner, also=also)

    async def upload_status(self, digest: str, holder: str) -> artifact_pb2.UploadStatus:
        """Return the status of a holder's upload; complete if the holder holds the artifact."""
        is_held = not await self.missing([digest], holder)
        return self._status(digest, holder, await self.sizes([digest]) if is_held else {})

    def _status(self, digest: str, holder: str, held: Mapping[str, int]) -> artifact_pb2.UploadStatus:
        committed = held[digest] if digest in held else self._staging.committed_bytes(holder, digest)
        return artifact_pb2.UploadStatus(digest=digest, committed_bytes=committed, complete=digest in held)

    async def put(self, data: bytes, owner: str, *, holder: str = DEFAULT_PROJECT) -> common_pb2.Artifact:
        """Store a small artifact for a holder."""
        path = self._uploads / f"put-{os.urandom(8).hex()}"
        try:
            await self._run(path.write_bytes, data)
            return await self.adopt(path, owner, holder=holder)
        finally:
            path.unlink(missing_ok=True)

    async def adopt(self, path: Path, owner: str, *, holder: str = DEFAULT_PROJECT) -> common_pb2.Artifact:
        """Move one of the server's own files into the store for a holder. It replaces a damaged artifact with the same digest.

        Raises:
            DiskFull: the store cannot write.
        """
        digest = await self._run(digests.of_file, path)
        artifact = common_pb2.Artifact(digest=digest, size_bytes=path.stat().st_size)
        self._adopting.add(digest)
        try:
            await self.blobs.settle(path, digest)
        except OSError as error:
            raise DiskFull(f"The store cannot write: {error.strerror}.", "Free disk on the server.") from None
        finally:
            self._adopting.discard(digest)
            self._unshared.discard(digest)
        await self._record(artifact, holder, owner)
        return artifact

    async def receive(
        self,
        artifact: common_pb2.Artifact,
        chunks: AsyncIterator[artifact_pb2.Chunk],
        holder: str,
        owner: str,
        *,
        is_result: bool = False,
    ) -> artifact_pb2.UploadStatus:
        """Receive one upload, continuing at its committed size.

        The holder holds the artifact once its bytes are complete. Bytes that only other holders have must be uploaded, too:
        knowing a digest does not prove possession of the content.

        Args:
            is_result: whether the upload may use disk space that is reserved for results.

        Raises:
            EtfarmError: see ArtifactService.Upload.
        """
        digest = artifact.digest
        if not await self.missing([digest], holder):
            return self._status(digest, holder, await self.sizes([digest]))
        self._staging.require_free(artifact, holder)
        await self.quotas.require(holder, artifact.size_bytes, without=digest)

        async def settle(part: Path) -> None:
            # Decide before the file gets its name, since others may ask for it from then on. An artifact that is already stored
            # may be in use.
            if await self.has_for_now(digest):
                self._unshared.discard(digest)
            else:
                self._unshared.add(digest)
            try:
                await self.blobs.settle(part, digest)
            except OSError as error:
                self._unshared.discard(digest)
                raise DiskFull(f"The store cannot write: {error.strerror}.", "Free disk on the server.") from None
            except BaseException:
                self._unshared.discard(digest)
                raise
            await self._record(artifact, holder, owner)

        is_whole = await self._staging.receive(artifact, chunks, holder, settle, is_result=is_result)
        return self._status(digest, holder, {digest: artifact.size_bytes} if is_whole else {})

    async def take_results(self, holder: str, digests: Collection[str], owner: str) -> None:
        """Let a project hold the artifacts of an accepted result, which then no longer count against the agents."""
        stored = await self.sizes(list(digests))
        await self.holdings.take(holder, [digest for digest in digests if digest in stored], owner)

    async def discard(self, wanted: Iterable[str]) -> None:
        """Delete the artifacts in `wanted` that were uploaded since the start of this server and that nothing else refers to.

        Their holdings are deleted, too. Artifacts that something may refer to stay.
        """
        withdrawn = [
            digest
            for digest in self._unshared.intersection(wanted) - self._adopting
            if not self._staging.is_streaming(digest) and self.blobs.withdraw(digest)
        ]
        self._unshared.difference_update(withdrawn)
        await self._delete(withdrawn)

    async def remove(self, wanted: Collection[str], *, unused_since_s: float) -> set[str]:
        """Delete artifacts that nothing refers to, with all holdings. Return those that were deleted.

        Artifacts that this process has used since a time in seconds since the epoch stay, as do those that are being written.
        """
        # No await up to the deletion of the rows: a use before it is marked, and one after it does not see the artifact.
        removed = {
            digest
            for digest in wanted
            if digest not in self._adopting
            and not self._staging.is_streaming(digest)
            and not self.uses.is_marked_since(digest, unused_since_s)
            and self.blobs.withdraw(digest)
        }
        await self._delete(removed)
        return removed

    async def _delete(self, withdrawn: Collection[str]) -> None:
        """Delete artifacts that were withdrawn. What is uploaded again in the meantime is recorded after this.

        Nothing is lost if the rows cannot be deleted, for example because another server leads the farm.
        """
        if not withdrawn:
            return
        try:
            await self.holdings.forget(list(withdrawn))
        except BaseException:
            self.blobs.restore(withdrawn)
            raise
        await self.blobs.delete(withdrawn)

    async def chunks(self, digest: str, offset: int) -> AsyncIterator[artifact_pb2.Chunk]:
        """Yield the artifact's bytes from `offset` on. The last chunk is sent only after this process has verified all bytes.

        Raises:
            ARTIFACT_NOT_FOUND: the store does not hold the artifact.
            ArtifactDamaged: its bytes changed on the disk.
            OFFSET_PAST_END: `offset` is beyond the end.
        """
        require_digest(digest)
        reading = await self.blobs.read(digest)
        if reading is None:
            raise self._missing_error(digest)
        with reading.file as file:
            self.uses.mark(digest)
            size, verified = reading.size_bytes, asyncio.ensure_future(reading.verified)
            try:
                if not 0 <= offset <= size:
                    what = f"offset must be 0 to {size}, the size of {digest[:12]}, got {offset}."
                    raise error_for("OFFSET_PAST_END", what)
                for start, length in spans(offset, size, CHUNK_BYTES):
                    await reading.reach(start + length)
                    data = await self._run(os.pread, file.fileno(), length, start)
                    if (start + length == size or verified.done()) and not await verified:
                        raise self._missing_error(digest)
                    self.downloaded["server"] += len(data)
                    yield artifact_pb2.Chunk(offset=start, data=data)
            finally:
                verified.cancel()

    async def link(self, digest: str, offset: int) -> artifact_pb2.ArtifactLink | None:
        """Return a link to read a stored artifact from `offset` on, which is a secret; None if `chunks` is the way to read it."""
        size_bytes = (await self.sizes([digest], for_now=True)).get(digest, 0)
        link = await self.blobs.link(digest) if 0 <= offset < size_bytes else None
        if link is not None:
            self.uses.mark(digest)
            self.downloaded["s3"] += size_bytes - offset
        return link

    def place(self, digest: str) -> Path:
        """Return the path of an artifact's file, whether or not it exists. Read the file, never write it."""
        return self.blobs.place(digest)

    def verify(self) -> AsyncIterator[Verified]:
        """Verify every stored artifact. Yield (done, total, bytes done, newly detected damage) periodically and last."""
        return self.blobs.verify()

    async def wait_for_room(self, key: Hashable, needed_bytes: int, on_wait: Callable[[str], None]) -> None:
        """Reserve disk space for the results of an attempt, waiting while the disk is full; see `Room.release_results`."""
        while True:
            try:
                return self.room.reserve_results(key, needed_bytes)
            except DiskFull as error:
                on_wait(f"the server's disk is full: {error.metadata['free_bytes']} bytes are free")
            await asyncio.sleep(_SPACE_POLL_S)

    async def wait_for_space(self, on_wait: Callable[[str], None]) -> None:
        """Wait while the disk is too full for new work."""
        while (space := self.room.measure()).is_full:
            on_wait(f"the server's disk is full: {space.free_bytes} bytes are free")
            await asyncio.sleep(_SPACE_POLL_S)

    async def tend(self) -> None:
        """Delete expired artifacts now and every hour, and record uses more often, until the task is cancelled."""
        for number in itertools.count():
            try:
                if number % _EXPIRE_EVERY == 0:
                    await self.expire()
                await self.uses.write()
            except Exception:
                log.exception("expired artifacts could not be deleted, or uses not recorded")
            await asyncio.sleep(GRANULARITY_S)

    async def expire(self) -> None:
        """Delete abandoned uploads, and agents' uploads without a result."""
        await self._run(self._staging.expire)
        now = datetime.now(UTC)
        orphans = await self.holdings.expire_agents(
            now - timedelta(seconds=self.limits.agent_holding_age_s), await self._idle_agents(now)
        )
        if withdrawn := [digest for digest in orphans if self.blobs.withdraw(digest)]:
            log.info("agents' uploads that no result refers to expired", count=len(withdrawn))
            await self._delete(withdrawn)

    async def _idle_agents(self, now: datetime) -> dict[str, datetime]:
        """Return the agents that have been without an attempt for long, as holders, with the time before which they had one."""
        holders = await self.holdings.agents()
        idle = [holder for holder in holders if not self.quotas.has_attempt(holder.removeprefix(agent_holder("")))]
        self._idle_since = {holder: self._idle_since.get(holder, now) for holder in idle}
        longest = timedelta(seconds=self.limits.idle_agent_age_s)
        return {holder: since for holder, since in self._idle_since.items() if now - since >= longest}

    def close(self) -> None:
        """Shut down the store's threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._verifiers.shutdown(wait=False, cancel_futures=True)

    async def _record(self, artifact: common_pb2.Artifact, holder: str, owner: str) -> None:
        self.uses.mark(artifact.digest)
        await self.holdings.add(holder, [artifact.digest], owner, {artifact.digest: artifact.size_bytes})

    def _run(self, function: Callable[..., T], *arguments: object) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)
