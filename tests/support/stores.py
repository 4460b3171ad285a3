"""Artifact stores of both kinds: their bytes in files, and in a bucket of a real S3 server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from etfarm.server.artifacts.blobs import place_of
from etfarm.server.artifacts.limits import StoreLimits
from etfarm.server.artifacts.s3.blobs import key_of
from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.artifacts.s3.location import BucketLocation
from etfarm.server.artifacts.store import Store
from etfarm.server.state.engine import Database
from etfarm.v1.artifact_pb2 import Chunk

KINDS = ("files", "s3")


class Stores:
    """Creates stores of one kind; those in a bucket share a folder of it.

    Args:
        location: the folder of the bucket; None for files.
    """

    def __init__(self, location: BucketLocation | None) -> None:
        self.location = location
        self._created: list[Store] = []

    def create(
        self,
        folder: Path,
        database: Database,
        limits: StoreLimits | None = None,
        clock: Callable[[], float] | None = None,
        *,
        location: BucketLocation | None = None,
        patience_s: float = 20.0,
        timeout_s: float = 10.0,
        presign: str = "",
    ) -> Store:
        """Return a store, without opening it.

        Args:
            location: another way to the folder of the bucket.
        """
        location = location or self.location
        bucket = None if location is None else Bucket(location, patience_s=patience_s, timeout_s=timeout_s, presign=presign)
        store = Store(folder, database, limits, clock, bucket)
        self._created.append(store)
        return store

    async def damage(self, store: Store, digest: str) -> None:
        """Flip a bit of an artifact where it is stored, and remove the copy of a bucket's store."""
        if self.location is None:
            damage(store.place(digest))
            return
        bucket = Bucket(self.location)
        size_bytes = await bucket.size(key_of(digest))
        assert size_bytes
        data = b"".join([piece async for piece in bucket.pieces(key_of(digest), size_bytes)])
        await bucket.put(key_of(digest), bytes([data[0] ^ 1]) + data[1:])
        store.place(digest).unlink(missing_ok=True)

    async def lose(self, store: Store, digest: str) -> None:
        """Delete an artifact where it is stored, and the copy of a bucket's store, behind the server's back."""
        if self.location is not None:
            await Bucket(self.location).delete(key_of(digest))
        store.place(digest).unlink(missing_ok=True)

    def close(self) -> None:
        for store in self._created:
            store.close()


class HeldUpload:
    """An upload that halts in the middle until a test lets it go on."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.halts = asyncio.Event()
        self.may_go_on = asyncio.Event()

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Yield the first 100 bytes, and later the rest."""
        yield Chunk(offset=0, data=self._data[:100])
        self.halts.set()
        await self.may_go_on.wait()
        yield Chunk(offset=100, data=self._data[100:])


def damage(path: Path) -> None:
    """Flip a bit, and leave the times as they were: as a disk does."""
    status, data = path.stat(), path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def blob(folder: Path, digest: str) -> Path:
    """Return the file of an artifact of a store of files."""
    return place_of(folder / "blobs", digest)


@contextmanager
def stores_of(kind: str, request: pytest.FixtureRequest) -> Iterator[Stores]:
    """Yield the stores of a kind; the S3 server is started when it is first needed."""
    created = Stores(request.getfixturevalue("s3_server").new_location() if kind == "s3" else None)
    try:
        yield created
    finally:
        created.close()
