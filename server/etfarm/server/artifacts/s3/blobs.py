"""Artifacts as objects of a bucket, `blobs/ab/abcdef...`, with copies on this machine for what reads files."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, TypeVar

import structlog

from etfarm.server.artifacts.blobs import BLOBS, CACHE, Reading, Verified
from etfarm.server.artifacts.digests import require_digest
from etfarm.server.artifacts.errors import ArtifactDamaged, DiskFull, artifact_not_found
from etfarm.server.artifacts.holdings import Holdings
from etfarm.server.artifacts.integrity import Integrity
from etfarm.server.artifacts.s3 import cache as caches
from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.artifacts.s3.cache import Cache
from etfarm.server.artifacts.s3.claim import Claim
from etfarm.server.artifacts.s3.errors import LOOK, BlobsUnavailable, BlobsUnusable, Failure
from etfarm.server.artifacts.s3.fetch import Fetch, Overtaken
from etfarm.server.artifacts.s3.location import BucketLocation
from etfarm.server.state.identity import Identity
from etfarm.v1 import artifact_pb2, common_pb2
from etfarm.wire.digest import is_digest
from etfarm.wire.errors import EtfarmError
from etfarm.wire.shielding import retrieve_error, shielded

log = structlog.get_logger()

T = TypeVar("T")

_BATCH: Final = 5_000
"""Number of digests per read of the database."""
_FLIGHTS: Final = 64
"""Maximum number of artifacts of one caller that are looked at at a time."""
_TRANSFERS: Final = 8
"""Maximum number of artifacts that are received at a time."""
QUARANTINE: Final = "quarantine"
"""Key of the folder of damaged artifacts, for an admin to inspect."""
_ROOM_POLL_S: Final = 1.0
"""Interval at which copies are deleted if the disk is nearly full."""
ORPHAN_AGE: Final = timedelta(days=1)
"""Age from which a verification deletes an object that the database does not name: a younger one may be about to be recorded."""
_DELETION_S: Final = 2.0
"""Time after the check of the lease in which objects are deleted, less than another server needs to take the lead and to store
one of them again. Later, the lease is checked again."""
_PROGRESS_S: Final = 0.2
_OPEN_S: Final = 1.0
"""Time for which a start waits for the bucket."""


def require_no_files(folder: Path, location: BucketLocation) -> None:
    """Check that a store's folder has no artifacts of its own.

    Raises:
        BlobsUnusable: it has some, which are not in the bucket.
    """
    former = folder / BLOBS
    if next(former.glob("??/*"), None) is not None:
        raise BlobsUnusable(
            f"{former} has artifacts, which --blobs {location.url} would leave out.",
            "Start the server without --blobs, or with another --data; or move the artifacts with `etfarm migrate`.",
        )


def key_of(digest: str) -> str:
    """Return the key of an artifact's object."""
    return f"{BLOBS}/{digest[:2]}/{digest}"


class _Flight:
    """The work that makes one copy, which any number of callers wait for."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        """Set once `transfer` is known, or the work has ended without one."""
        self.transfer: Fetch | None = None
        self.task: asyncio.Task[bool]


class BucketBlobs:
    """Objects of a bucket. The database says which artifacts are stored: it names one only after the bucket has it.

    Several servers may share a bucket and a database.

    Args:
        folder: folder of the store; copies are in `cache/`.
        scratch: an existing folder on the same file system.
        holdings: which artifacts the database has.
        identity: returns the identity of the farm that the database has.
        pool: thread pool that writes and deletes files.
        verifiers: thread pool that computes hashes.
        cache_bytes: size up to which copies are kept.
        floor_bytes: free disk space below which copies are deleted.
    """

    batch = _BATCH

    def __init__(
        self,
        bucket: Bucket,
        folder: Path,
        scratch: Path,
        holdings: Holdings,
        identity: Callable[[], Awaitable[Identity]],
        pool: ThreadPoolExecutor,
        verifiers: ThreadPoolExecutor,
        *,
        cache_bytes: int,
        floor_bytes: int,
        free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
    ) -> None:
        self.bucket = bucket
        self._claim = Claim(bucket, identity)
        self.cache = Cache(folder / CACHE, scratch, cache_bytes)
        self.integrity = Integrity(None, self.place, verifiers)
        self._folder = folder
        self._scratch = scratch
        self._holdings = holdings
        self._pool = pool
        self._floor_bytes = floor_bytes
        self.repeat_s = 60.0
        """Interval at which deletions that failed are tried again."""
        self.quarantine_s = 10.0
        """Time in which the quarantine is looked up, however much is in it."""
        self._knows_quarantine = False
        self._free = free
        self._coming_bytes = 0
        self._transfers = asyncio.Semaphore(_TRANSFERS)
        self._flights: dict[str, _Flight] = {}
        self._asked: Counter[str] = Counter()
        """Artifacts that `sizes` looks up at the moment."""
        self._sending: Counter[str] = Counter()
        self._lost = set[str]()
        """Artifacts that the database names, and whose objects turned out to be missing or damaged."""
        self._withdrawn: dict[str, asyncio.Event] = {}
        """Artifacts that are being deleted, with events that are set afterwards."""
        self._orphans = set[str]()
        """Artifacts that nothing names any more, and whose objects could not be deleted."""

    def place(self, digest: str) -> Path:
        """Return the path of an artifact's copy, whether or not it exists."""
        require_digest(digest)
        return self.cache.place(digest)

    async def open(self) -> None:
        """Look up what is in the bucket's quarantine. A bucket that is away is no obstacle: `tend` does it later.

        Raises:
            BlobsUnusable: this machine has artifacts that are not in the bucket.
        """
        require_no_files(self._folder, self.bucket.location)
        await self._look_up_quarantine(min(_OPEN_S, self.quarantine_s))

    async def _look_up_quarantine(self, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await self._read_quarantine()
        except (BlobsUnavailable, TimeoutError) as error:
            why = error.metadata["why"] if isinstance(error, BlobsUnavailable) else f"it takes longer than {within_s:g} s"
            log.warning("the quarantine in S3 was not read to its end; damaged artifacts count as missing when read", why=why)
        else:
            self._knows_quarantine = True

    async def _read_quarantine(self) -> None:
        """Record which artifacts are in the quarantine, and not at their places. Others may have filled it with anything."""
        seen = set[str]()
        async for page in self.bucket.list(QUARANTINE):
            names = {each.key.rpartition("/")[2].partition(".")[0] for each in page} - seen
            seen |= names
            named = list(await self._holdings.sizes([name for name in names if is_digest(name)]))
            for start in range(0, len(named), _FLIGHTS):
                some = named[start : start + _FLIGHTS]
                sizes = await asyncio.gather(*(self.bucket.size(key_of(digest)) for digest in some))
                for digest, size_bytes in zip(some, sizes, strict=True):
                    # One that was sent meanwhile is there again.
                    if size_bytes is None and not self._sending[digest] and not self.integrity.is_known_whole(digest):
                        self._lost.add(digest)
                        self.integrity.mark_damaged(digest)

    async def sizes(self, digests: Sequence[str]) -> dict[str, int]:
        """Return the sizes of the artifacts that the database names."""
        self._asked.update(digests)
        try:
            sizes = await self._holdings.sizes(digests)
        finally:
            _decrease(self._asked, digests)
        return {
            digest: size_bytes
            for digest, size_bytes in sizes.items()
            if digest not in self._lost and digest not in self._withdrawn
        }

    async def find_damaged(self, wanted: Iterable[str]) -> list[str]:
        """Return the artifacts in `wanted` of which a former transfer showed that they are missing or damaged."""
        return [digest for digest in wanted if digest in self._lost]

    async def bring(self, wanted: Iterable[str]) -> list[str]:
        """Make copies where there are none; return the artifacts that are missing or damaged.

        Raises:
            BlobsUnavailable: the bucket's server failed.
            DiskFull: there is no space for a copy.
        """
        digests = list(dict.fromkeys(wanted))
        self.cache.pin(digests)
        lacking = []
        for digest in digests:
            if self.integrity.is_known_whole(digest):
                self.cache.hits += 1
                self.cache.touch(digest)
            else:
                lacking.append(digest)
        damaged = []
        for start in range(0, len(lacking), _FLIGHTS):
            some = lacking[start : start + _FLIGHTS]
            are_whole = await asyncio.gather(*(shielded(self._start(digest).task) for digest in some))
            damaged += [digest for digest, is_whole in zip(some, are_whole, strict=True) if not is_whole]
        return damaged

    def _start(self, digest: str) -> _Flight:
        """Return the flight that makes a copy."""
        flight = self._flights.get(digest)
        if flight is None:
            flight = self._flights[digest] = _Flight()
            flight.task = asyncio.create_task(self._fly(digest, flight), name=f"fetch-{digest[:12]}")
            flight.task.add_done_callback(retrieve_error)
        return flight

    async def _fly(self, digest: str, flight: _Flight) -> bool:
        """Return whether there is a verified copy."""
        try:
            if await self.integrity.is_whole(digest):  # a copy of an earlier process
                self.cache.hits += 1
                self.cache.touch(digest)
                return True
            self.cache.misses += 1
            known_bytes = None if digest in self._withdrawn else (await self._holdings.sizes([digest])).get(digest)
            if known_bytes is None:
                return False
            actual, size_bytes = "", None
            for _ in range(2):
                if (size_bytes := await self.bucket.size(key_of(digest))) is None:
                    break
                if size_bytes != known_bytes:  # it is not read: it could fill the disk
                    actual = _describe_size(size_bytes, known_bytes)
                    continue
                async with self._transfers:
                    actual = await self._transfer(digest, size_bytes, flight)
                if actual == digest:
                    return True
                log.warning("an artifact arrived with other bytes from S3", digest=digest, actual=actual)
            if actual and size_bytes is not None:
                await self._quarantine(digest, actual, size_bytes)
            elif digest not in self._withdrawn:
                await self._note_missing(digest)
            return False
        finally:
            flight.begun.set()
            del self._flights[digest]

    async def _transfer(self, digest: str, size_bytes: int, flight: _Flight) -> str:
        """Receive an artifact, and keep it if it is whole; return the sha256 of what arrived, empty if there is no object."""
        await self._make_room(size_bytes)
        path = self._scratch / f"fetch-{os.urandom(8).hex()}"
        self._coming_bytes += size_bytes
        flight.transfer = fetch = Fetch(path, size_bytes, self._pool)
        flight.begun.set()
        try:
            actual = await fetch.run(self.bucket, key_of(digest))
            if actual == digest:
                self._keep(path, digest, size_bytes)
                await self._run(caches.delete, self.cache.evict())
            return actual
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise DiskFull(f"A copy of {digest[:12]} cannot be written: {error.strerror}.", "Free disk on the server.") from None
        finally:
            self._coming_bytes -= size_bytes
            fetch.end()
            path.unlink(missing_ok=True)

    def _keep(self, path: Path, digest: str, size_bytes: int) -> None:
        """Move a verified file to the place of the copy."""
        place = self.place(digest)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.chmod(0o444)
        path.replace(place)
        self.integrity.settled(digest)
        self.cache.add(digest, size_bytes)

    async def _make_room(self, needed_bytes: int) -> None:
        """Delete copies until there is space for another one.

        Raises:
            DiskFull: that does not suffice.
        """
        lacking = needed_bytes + self._coming_bytes + self._floor_bytes // 2 - self._free(self._folder)
        if lacking <= 0:
            return
        await self._run(caches.delete, self.cache.evict(lacking))
        free_bytes = self._free(self._folder)
        if needed_bytes + self._coming_bytes + self._floor_bytes // 2 > free_bytes:
            raise DiskFull(
                f"A copy of {needed_bytes} bytes does not fit: the server's disk has {free_bytes} bytes free, and the other "
                "copies are in use.",
                "Free disk where its --data is.", needed_bytes=needed_bytes, free_bytes=free_bytes,
            )  # fmt: skip

    async def _quarantine(self, digest: str, actual: str, size_bytes: int) -> None:
        # A server that has lost the lead must not move what the one that leads has stored meanwhile.
        await self._holdings.require_lead([digest])
        self._lost.add(digest)
        target = f"{QUARANTINE}/{digest}.{time.time_ns()}"
        try:
            await self._claim.require()
            await self.bucket.move(key_of(digest), target)
        except (BlobsUnavailable, FileNotFoundError) as error:
            log.warning("a damaged artifact stays where it is", digest=digest, why=str(error))
            target = key_of(digest)
        self.integrity.report(digest, actual, size_bytes, f"{self.bucket.location.url}/{target}")

    async def _note_missing(self, digest: str) -> None:
        """Record that an object is missing, if the database names it."""
        if await self._holdings.sizes([digest]):
            self._lost.add(digest)
            self.integrity.mark_damaged(digest)
            log.error("a stored artifact is missing in S3", digest=digest)

    async def settle(self, path: Path, digest: str) -> None:
        """Send a complete, verified file to the bucket; then its place is that of the copy.

        Raises:
            BlobsUnavailable: the bucket's server failed; the file stays.
            OSError: the file cannot be moved.
        """
        while (withdrawn := self._withdrawn.get(digest)) is not None:
            await withdrawn.wait()
        self._sending[digest] += 1
        try:
            await self._claim.require()
            # Also if it is there already: what is there may be damaged.
            await self.bucket.put(key_of(digest), path)
            self._lost.discard(digest)
            self._keep(path, digest, path.stat().st_size)
        finally:
            _decrease(self._sending, [digest])
        await self._run(caches.delete, self.cache.evict())

    async def read(self, digest: str) -> Reading | None:
        """Open an artifact, from its copy or while that arrives; None if it is missing or damaged.

        Raises:
            BlobsUnavailable: the bucket's server failed.
        """
        if self.integrity.is_known_whole(digest):
            self.cache.hits += 1
            self.cache.touch(digest)
            return _whole(self.place(digest))
        flight = self._start(digest)
        await flight.begun.wait()
        transfer = flight.transfer
        if transfer is None or flight.task.done():
            return _whole(self.place(digest)) if await shielded(flight.task) else None
        try:
            file = transfer.open()
        except FileNotFoundError:  # it has just ended
            return _whole(self.place(digest)) if await shielded(flight.task) else None

        async def reach(position: int) -> None:
            try:
                await transfer.reach(position)
            except Overtaken:
                if not await is_whole():
                    raise (ArtifactDamaged if self.integrity.is_damaged(digest) else artifact_not_found)(digest) from None

        async def is_whole() -> bool:
            is_whole = await shielded(flight.task)
            if is_whole and flight.transfer is not transfer:
                failure = Failure("other bytes arrived first", LOOK)
                raise BlobsUnavailable(f"Reading {digest[:12]}", self.bucket.location.place, failure)
            return is_whole

        verified = asyncio.ensure_future(is_whole())
        verified.add_done_callback(retrieve_error)
        return Reading(file, transfer.size_bytes, reach, verified)

    async def link(self, digest: str) -> artifact_pb2.ArtifactLink | None:
        """Return a link to an artifact's object; None if the bucket signs no links."""
        if not self.bucket.signs:
            return None
        return artifact_pb2.ArtifactLink(
            url=await self.bucket.sign(key_of(digest)), certificates=self.bucket.location.authorities or b""
        )

    def withdraw(self, digest: str) -> bool:
        """Hide an artifact, and take away its copy; return False if it is looked up, sent, received or read."""
        if self._asked[digest] or self._sending[digest] or digest in self._flights or self.cache.is_pinned(digest):
            return False
        if digest not in self._withdrawn:
            self._withdrawn[digest] = asyncio.Event()
        return True

    def restore(self, digests: Collection[str]) -> None:
        """Show artifacts again; their objects are untouched."""
        for digest in digests:
            self._withdrawn.pop(digest).set()

    async def delete(self, digests: Collection[str]) -> None:
        """Delete the objects and the copies of artifacts that were withdrawn.

        What cannot be deleted at once is deleted later. What the database still names, or names again, stays.

        Raises:
            FENCED: another server leads the farm, and may store the artifacts again; nothing was deleted.
        """
        try:
            files = [path for digest in digests for path in self.cache.drop(digest)]
            await self._run(caches.delete, files)
            checked_s = asyncio.get_running_loop().time()
            named = await self._holdings.require_lead(list(digests))
            ends_s = checked_s + _DELETION_S
            await asyncio.gather(*(self._delete_object(digest, ends_s) for digest in digests if digest not in named))
        finally:
            self.restore(digests)

    async def _delete_object(self, digest: str, ends_s: float) -> None:
        self._orphans.discard(digest)
        self._lost.discard(digest)
        try:
            async with asyncio.timeout_at(ends_s):
                await self._claim.require()
                await self.bucket.delete(key_of(digest))
        except (BlobsUnavailable, TimeoutError) as error:
            self._orphans.add(digest)
            why = error.message if isinstance(error, BlobsUnavailable) else f"it takes longer than {_DELETION_S:g} s"
            log.warning("an artifact could not be deleted from S3; that is tried again", digest=digest, why=why)

    async def verify(self) -> AsyncIterator[Verified]:
        """Read every artifact that the database names, and delete objects that it does not name.

        Objects that are missing or damaged are damage. Others are deleted if they are older than a day: servers that were killed
        while they stored or deleted something have left them.
        """
        loop = asyncio.get_running_loop()
        total, _ = await self._holdings.totals()
        done = done_bytes = 0
        damaged, clock = list[common_pb2.Artifact](), loop.time()
        async for digest, size_bytes in self._holdings.all_sizes():
            if digest in self._lost or not await self._verify_object(digest, size_bytes):
                damaged.append(common_pb2.Artifact(digest=digest, size_bytes=size_bytes))
            done, done_bytes = done + 1, done_bytes + size_bytes
            if loop.time() - clock > _PROGRESS_S:
                clock = loop.time()
                yield done, max(total, done), done_bytes, damaged
                damaged = []
        try:
            async for _ in self._delete_strays():
                if loop.time() - clock > _PROGRESS_S:
                    clock = loop.time()
                    yield done, max(total, done), done_bytes, damaged
                    damaged = []
        except BlobsUnavailable as error:
            log.warning("objects that nothing names could not be deleted from S3", why=error.metadata["why"])
        yield done, done, done_bytes, damaged

    async def _delete_strays(self) -> AsyncIterator[None]:
        """Delete old objects at an artifact's place that the database does not name; yield after each group of them."""
        if not (await self._holdings.totals())[0]:
            log.warning("the database names no artifact, so none is deleted from S3: it may not be that of the farm")
            return
        await self._claim.require()
        before = datetime.now(UTC) - ORPHAN_AGE
        async for page in self.bucket.list(BLOBS):
            old = [each.key.rpartition("/")[2] for each in page if each.changed_at < before]
            old = [name for name in old if is_digest(name)]
            named = await self._holdings.sizes(old)
            strays = [digest for digest in old if digest not in named]
            for start in range(0, len(strays) or 1, _FLIGHTS):
                await self.delete([digest for digest in strays[start : start + _FLIGHTS] if self.withdraw(digest)])
                yield

    async def _verify_object(self, digest: str, known_bytes: int) -> bool:
        """Read an object; return whether it is whole. A damaged one is moved to the quarantine."""
        actual, size_bytes = "", None
        for _ in range(2):
            if (size_bytes := await self.bucket.size(key_of(digest))) is None:
                await self._note_missing(digest)  # unless it was deleted in the meantime
                return digest not in self._lost
            if size_bytes != known_bytes:
                actual = _describe_size(size_bytes, known_bytes)
                continue
            hasher = hashlib.sha256()
            with suppress(FileNotFoundError):
                async for piece in self.bucket.pieces(key_of(digest), size_bytes):
                    await self._run(hasher.update, piece)
            if (actual := hasher.hexdigest()) == digest:
                return True
        assert size_bytes is not None
        await self._quarantine(digest, actual, size_bytes)
        return False

    def spare_bytes(self) -> int:
        """Return the size of the copies that are not in use."""
        return self.cache.spare_bytes()

    async def tend(self) -> None:
        """Delete copies while the disk is nearly full, and make up for times without the bucket, until the task is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_room(), name="room for copies")
            group.create_task(self._catch_up(), name="late work in S3")

    async def _keep_room(self) -> None:
        while True:
            lacking = self._floor_bytes - self._free(self._folder)
            if lacking > 0:
                await self._run(caches.delete, self.cache.evict(lacking))
            await asyncio.sleep(_ROOM_POLL_S)

    async def _catch_up(self) -> None:
        """Claim the bucket's folder, look up the quarantine, and delete objects whose deletion failed."""
        while True:
            try:
                await self._claim.renew()
                if not self._knows_quarantine:
                    await self._look_up_quarantine(self.quarantine_s)
                for start in range(0, len(orphans := list(self._orphans)), _FLIGHTS):
                    await self.delete([digest for digest in orphans[start : start + _FLIGHTS] if self.withdraw(digest)])
            except EtfarmError as error:  # the bucket or the database is unavailable, or another server or farm has it
                log.warning("what was left to do in S3 could not be done; that is tried again", error=error.message,
                            remedy=error.remedy)  # fmt: skip
            await asyncio.sleep(self.repeat_s)

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)


def _describe_size(size_bytes: int, known_bytes: int) -> str:
    return f"{size_bytes} bytes instead of {known_bytes}"


def _decrease(counter: Counter[str], digests: Iterable[str]) -> None:
    for digest in digests:
        counter[digest] -= 1
        if counter[digest] <= 0:
            del counter[digest]


def _whole(path: Path) -> Reading:
    async def reach(position: int) -> None:
        pass

    file = path.open("rb")
    verified: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    verified.set_result(True)
    return Reading(file, os.fstat(file.fileno()).st_size, reach, verified)
