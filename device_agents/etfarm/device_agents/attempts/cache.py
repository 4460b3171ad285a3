"""Step 6 of a job's way: the artifacts that a run needs, on this machine's disk, verified, and kept for the next run.

And the way back, step 8: `Transfers` carries artifacts in both directions, patient with a link that is cut.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import grpc

from etfarm.device_agents.errors import DiskFull, MalformedDigest
from etfarm.device_agents.jail.box import require_plain_file
from etfarm.device_agents.runners.bundle import BadBundle, Bundle, unpack
from etfarm.v1 import artifact_pb2, common_pb2
from etfarm.wire import chunks, digest
from etfarm.wire.chunks import Progressed
from etfarm.wire.errors import DeviceError
from etfarm.wire.status import from_rpc_error

if TYPE_CHECKING:
    from etfarm.v1.artifact_pb2_grpc import ArtifactServiceAsyncStub

log = logging.getLogger(__name__)

T = TypeVar("T")
_TRY_AGAIN: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
        # What a server that is going down gives the streams under way.
        grpc.StatusCode.CANCELLED,
    }
)
_FULL: Final = frozenset({"DISK_FULL", "QUOTA_EXCEEDED"})
"""Reasons for which the server has no room for a result now. The agent waits, so that no measurement is lost."""
_CORRUPTIONS: Final = 3
"""Times that one artifact may arrive damaged before it is no accident."""
_MODE: Final = 0o444
"""Mode of a complete artifact: read-only, and readable for a runner of another user that has a link to it."""
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)


class BundleUnusable(DeviceError):
    """This device cannot unpack the runner bundle, or does not keep it whole."""

    reason = "DEVICE_BUNDLE_UNUSABLE"


class Transfers:
    """Artifacts from and to the server. A cut link or a server that restarts is waited for, without an end of its own:
    cancel, or set a deadline around.

    Args:
        stub: of the connection.
        pauses: gives the seconds to wait before each further try of one transfer.
    """

    def __init__(self, stub: ArtifactServiceAsyncStub, pauses: Callable[[], Iterator[float]]) -> None:
        self._stub = stub
        self._pauses = pauses

    async def download(self, artifact: common_pb2.Artifact, path: Path, on_progress: Progressed | None = None) -> None:
        """Puts the artifact at `path`, whole and verified; see `etfarm.wire.chunks.download`."""
        await self._persist(lambda: chunks.download(self._stub, artifact, path, on_progress=on_progress))

    async def upload(self, source: bytes | Path, on_progress: Progressed | None = None) -> common_pb2.Artifact:
        """The artifact that `source` is, once the server holds it whole."""
        if isinstance(source, Path):
            # Written by a runner, which may read less than this process.
            require_plain_file(source)
            artifact = await chunks.artifact_of_file(source)
        else:
            artifact = chunks.artifact_of(source)
        await self._persist(lambda: self._upload(artifact, source, on_progress))
        return artifact

    async def _upload(self, artifact: common_pb2.Artifact, source: bytes | Path, on_progress: Progressed | None) -> None:
        asked = await self._stub.FindMissing(artifact_pb2.FindMissingRequest(digests=[artifact.digest]))
        if asked.missing:
            await chunks.upload(self._stub, artifact, source, on_progress=on_progress)

    async def _persist(self, transfer: Callable[[], Awaitable[T]]) -> T:
        corruptions = 0
        for pause in self._pauses():
            try:
                return await transfer()
            except chunks.CorruptDownload:
                corruptions += 1
                if corruptions == _CORRUPTIONS:
                    raise
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.DATA_LOSS:
                    corruptions += 1
                is_full = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and _reason(error) in _FULL
                if corruptions == _CORRUPTIONS or not (is_full or error.code() in _TRY_AGAIN | {grpc.StatusCode.DATA_LOSS}):
                    raise
                log.info("a transfer was cut (%s); trying again in %.1f s", error.code().name, pause)
            await asyncio.sleep(pause)
        raise AssertionError("pauses never end")


def _reason(error: grpc.aio.AioRpcError) -> str:
    return from_rpc_error(error, server="").reason


class Cache:
    """Artifacts by digest below one folder, and bundles unpacked beside them.

    A file under its digest is whole: it gets that name when its sha256 has been verified. One that an earlier process left
    is verified again before its first use here, since what happened to the disk meanwhile is unknown. Least recently used
    ones go when the limit is passed, but none that a lease holds. The folder belongs to this process alone.

    Args:
        folder: made when it is missing.
        limit_bytes: of everything below `folder`; what leases hold may pass it.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._blobs = folder / "blobs"
        self._bundles = folder / "bundles"
        self._limit_bytes = limit_bytes
        self._verified: set[str] = set()
        self._locks: dict[str, asyncio.Lock] = {}
        self._leases: list[Lease] = []
        for path in (self._blobs, self._bundles):
            path.mkdir(parents=True, exist_ok=True)
        # Runners get links to the files of their own attempt and must not reach anything else here.
        with suppress(PermissionError):  # another user's folder that this agent may write
            folder.chmod(0o700)
        # Folders that an ended process was unpacking into.
        for staging in self._bundles.glob(".*"):
            shutil.rmtree(staging, ignore_errors=True)

    @contextmanager
    def lease(self, transfers: Transfers) -> Iterator[Lease]:
        """A lease, whose artifacts stay at least until it ends. Missing ones come by `transfers`."""
        lease = Lease(self, transfers)
        self._leases.append(lease)
        try:
            yield lease
        finally:
            self._leases.remove(lease)
            self.evict()

    def evict(self) -> None:
        """Deletes what was not used for longest until the limit holds. Blocks for a few file operations."""
        held = {name for lease in self._leases for name in lease.digests}
        entries: list[tuple[float, int, Path]] = []
        for path in [*self._blobs.iterdir(), *self._bundles.iterdir()]:
            if path.name.startswith("."):
                continue  # a bundle that is being unpacked
            try:
                status = path.stat()
                size = sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else status.st_size
            except FileNotFoundError:
                continue  # another device's run has just put it in place, or deleted it
            entries.append((status.st_mtime, size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self._limit_bytes:
                return
            name = path.name.removesuffix(".part")
            if name in held:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
                self._verified.discard(name)
            total -= size
            log.info("deleted %s from the cache, %d bytes", path.name, size)

    async def fetch(self, transfers: Transfers, artifact: common_pb2.Artifact, on_progress: Progressed | None) -> Path:
        """See `Lease.fetch`."""
        path = self._blobs / _checked(artifact.digest)
        async with self._alone(artifact.digest):
            if artifact.digest not in self._verified and path.exists():
                if await asyncio.to_thread(digest.of_file, path) == artifact.digest:
                    self._verified.add(artifact.digest)
                else:
                    log.warning("%s was damaged on this disk; it is fetched again", artifact.digest)
                    path.unlink()
            if artifact.digest not in self._verified or not path.exists():
                try:
                    await transfers.download(artifact, path, on_progress)
                except OSError as error:
                    if error.errno in _NO_ROOM:
                        raise _disk_full(artifact, path) from error
                    raise
                path.chmod(_MODE)
                self._verified.add(artifact.digest)
                self.evict()
            os.utime(path)
            return path

    async def open_bundle(self, transfers: Transfers, artifact: common_pb2.Artifact, on_progress: Progressed | None) -> Bundle:
        """See `Lease.open_bundle`."""
        archive = await self.fetch(transfers, artifact, on_progress)
        folder = self._bundles / artifact.digest
        async with self._alone(f"bundle {artifact.digest}"):
            try:
                # Its files are verified at every run: hashing 17 MB takes 10 ms, and this is what measures all the others.
                bundle = await asyncio.to_thread(unpack, archive, folder)
            except BadBundle:
                # The archive was verified at its first use only; now it is again, and fetched where it was damaged since.
                self._verified.discard(artifact.digest)
                archive = await self.fetch(transfers, artifact, on_progress)
                try:
                    bundle = await asyncio.to_thread(unpack, archive, folder)
                except (BadBundle, OSError) as error:
                    raise _bundle_failed(artifact, archive, error) from error
            except OSError as error:
                raise _bundle_failed(artifact, archive, error) from error
            os.utime(folder)
            return bundle

    @asynccontextmanager
    async def _alone(self, key: str) -> AsyncIterator[None]:
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            yield


class Lease:
    """Artifacts that one run uses. Made by `Cache.lease`."""

    def __init__(self, cache: Cache, transfers: Transfers) -> None:
        self._cache = cache
        self._transfers = transfers
        self.digests: set[str] = set()
        """What may not be deleted now."""

    async def fetch(self, artifact: common_pb2.Artifact, on_progress: Progressed | None = None) -> Path:
        """The artifact's file, whole and verified. Bytes that an earlier try left are not asked for again.

        Raises:
            CorruptDownload: the bytes that came have another digest; the next try starts at 0.
            DiskFull: this machine's disk has no room.
            grpc.aio.AioRpcError: as ArtifactService.Download says.
        """
        self.digests.add(artifact.digest)
        return await self._cache.fetch(self._transfers, artifact, on_progress)

    async def open_bundle(self, artifact: common_pb2.Artifact, on_progress: Progressed | None = None) -> Bundle:
        """The runner bundle that the artifact is, unpacked and verified.

        Raises:
            BundleUnusable: it cannot be unpacked here, not even when its archive was verified or fetched once more.
            As `fetch`.
        """
        self.digests.add(artifact.digest)
        return await self._cache.open_bundle(self._transfers, artifact, on_progress)


def _checked(name: str) -> str:
    """The digest, which becomes a file name."""
    if not digest.is_digest(name):
        raise MalformedDigest(f"{name!r} is no sha256.", digest=name)
    return name


def _bundle_failed(artifact: common_pb2.Artifact, archive: Path, error: BadBundle | OSError) -> DeviceError:
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return _disk_full(artifact, archive)
    return BundleUnusable(
        f"The runner bundle {artifact.digest[:12]} cannot be unpacked on this device: "
        f"{error.metadata['why'] if isinstance(error, BadBundle) else error}.",
        "Look at the device's disk; `etfarm bundle build` makes another bundle.",
        digest=artifact.digest,
    )


def _disk_full(artifact: common_pb2.Artifact, path: Path) -> DiskFull:
    free = shutil.disk_usage(path.parent).free
    return DiskFull(
        f"The device's disk has {free} bytes left and the artifact {artifact.digest[:12]} needs {artifact.size_bytes}.",
        "Free space there, or give the agent a smaller --cache-limit.",
        digest=artifact.digest,
        free_bytes=free,
        needed_bytes=artifact.size_bytes,
    )
