"""The artifact cache, which keeps the files that runs need on this machine's disk, verified."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

from etfarm.device_agents.attempts.links import Links
from etfarm.device_agents.attempts.transfers import Transfers
from etfarm.device_agents.errors import DiskFull
from etfarm.device_agents.runners.bundle import Bundle, unpack
from etfarm.v1 import common_pb2
from etfarm.wire import digest
from etfarm.wire.bundles import NotABundle
from etfarm.wire.chunks import Progressed
from etfarm.wire.errors import EtfarmError, Fault, error_for, error_of

log = logging.getLogger(__name__)

_MODE: Final = 0o444
"""Mode of a complete artifact: read-only, and readable for a runner of another user that has a link to it."""
DOWNLOADS: Final = 16
"""Number of downloads at a time. Servers close connections that read many responses slowly, as the phones of an agent would that
share a narrow line."""
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)


class Cache:
    """Artifacts by digest below one folder, and bundles unpacked beside them.

    A file named by its digest is complete: it gets that name after its sha256 was verified. A file of an earlier process is
    verified again before its first use, since the disk may have changed meanwhile. Above the limit the least recently used files
    are deleted, except for those that a lease holds. The folder belongs to this process alone.

    Args:
        folder: created if it is missing.
        limit_bytes: the limit of everything below `folder`; files that leases hold may exceed it.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._blobs = folder / "blobs"
        self._bundles = folder / "bundles"
        self._limit_bytes = limit_bytes
        self._verified: set[str] = set()
        self._locks: dict[str, asyncio.Lock] = {}
        self._leases: list[Lease] = []
        self._links = Links()
        self._downloads = asyncio.Semaphore(DOWNLOADS)
        for path in (self._blobs, self._bundles):
            path.mkdir(parents=True, exist_ok=True)
        # Runners get links to the files of their own attempt and must not reach anything else here.
        folder.chmod(0o700)
        # Folders that an earlier process was unpacking into.
        for staging in self._bundles.glob(".*"):
            shutil.rmtree(staging, ignore_errors=True)

    @contextmanager
    def lease(self, transfers: Transfers) -> Iterator[Lease]:
        """Open a lease, which keeps its artifacts in the cache until it ends; `transfers` downloads missing ones."""
        lease = Lease(self, transfers)
        self._leases.append(lease)
        try:
            yield lease
        finally:
            self._leases.remove(lease)
            self.evict()

    def evict(self) -> None:
        """Delete the least recently used entries until the limit holds. Blocks for a few file operations."""
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
        """Return an artifact's file; see `Lease.fetch`."""
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
                    async with self._downloads:
                        await transfers.download(artifact, path, on_progress, self._links)
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
        """Open a runner bundle; see `Lease.open_bundle`."""
        archive = await self.fetch(transfers, artifact, on_progress)
        folder = self._bundles / artifact.digest
        async with self._alone(f"bundle {artifact.digest}"):
            try:
                # Its files are verified at every run: hashing 17 MB takes 10 ms, and all measurements depend on them.
                bundle = await asyncio.to_thread(unpack, archive, folder)
            except NotABundle:
                # Only the archive's first use verified it: verify it again, and fetch it if it is damaged.
                self._verified.discard(artifact.digest)
                archive = await self.fetch(transfers, artifact, on_progress)
                try:
                    bundle = await asyncio.to_thread(unpack, archive, folder)
                except (NotABundle, OSError) as error:
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
    """The artifacts that one run uses, created by `Cache.lease`."""

    def __init__(self, cache: Cache, transfers: Transfers) -> None:
        self._cache = cache
        self._transfers = transfers
        self.digests: set[str] = set()
        """Digests of entries that must not be deleted now."""

    async def fetch(self, artifact: common_pb2.Artifact, on_progress: Progressed | None = None) -> Path:
        """Return the artifact's file, whole and verified. A download continues an earlier partial one.

        Raises:
            CorruptDownload: the bytes that arrived have another digest; the next try starts at 0.
            DiskFull: this machine's disk has no room.
            grpc.aio.AioRpcError: see ArtifactService.Download.
        """
        self.digests.add(artifact.digest)
        return await self._cache.fetch(self._transfers, artifact, on_progress)

    async def open_bundle(self, artifact: common_pb2.Artifact, on_progress: Progressed | None = None) -> Bundle:
        """Return the runner bundle that the artifact is, unpacked and verified.

        Raises:
            DEVICE_BUNDLE_UNUSABLE: the bundle cannot be unpacked here, although its archive was verified or fetched once more.
            As `fetch`.
        """
        self.digests.add(artifact.digest)
        return await self._cache.open_bundle(self._transfers, artifact, on_progress)


def _checked(name: str) -> str:
    """Return the digest, which becomes a file name, if it is valid."""
    if not digest.is_digest(name):
        raise error_of(Fault.FARM, "DIGEST_MALFORMED", f"{name!r} is not a sha256.", metadata={"digest": name})
    return name


def _bundle_failed(artifact: common_pb2.Artifact, archive: Path, error: NotABundle | OSError) -> EtfarmError:
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return _disk_full(artifact, archive)
    return error_for(
        "DEVICE_BUNDLE_UNUSABLE",
        f"The runner bundle {artifact.digest[:12]} cannot be unpacked on this device: "
        f"{error.metadata['why'] if isinstance(error, NotABundle) else error}.",
        "Check the device's disk; `etfarm bundle build` builds another bundle.",
        digest=artifact.digest,
    )


def _disk_full(artifact: common_pb2.Artifact, path: Path) -> DiskFull:
    free = shutil.disk_usage(path.parent).free
    return DiskFull(
        f"The device's disk has {free} bytes left, but the artifact {artifact.digest[:12]} needs {artifact.size_bytes}.",
        "Free space there, or give the agent a smaller --cache-limit.",
        digest=artifact.digest,
        free_bytes=free,
        needed_bytes=artifact.size_bytes,
    )
