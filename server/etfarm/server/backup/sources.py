"""Where a farm's artifacts are, for a backup that reads them and a restore that writes them: files, or a bucket."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etfarm.server.artifacts.s3.blobs import key_of
from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.artifacts.s3.location import BucketLocation
from etfarm.server.backup.copying import Differs


class BucketArtifacts:
    """The artifacts of a bucket."""

    def __init__(self, location: BucketLocation, runner: asyncio.Runner) -> None:
        self._bucket = Bucket(location)
        self._runner = runner
        runner.run(self._bucket.check())

    def read(self, digest: str, target: Path) -> int:
        """Copy an artifact to `target`, which exists only once its sha256 is `digest`. Return its size in bytes.

        Raises:
            FileNotFoundError, Differs: it is missing or damaged.
            BlobsUnavailable: the bucket's server failed.
        """
        return self._runner.run(self._read(digest, target))

    async def _read(self, digest: str, target: Path) -> int:
        size_bytes = await self._bucket.size(key_of(digest))
        if size_bytes is None:
            raise FileNotFoundError(digest)
        part, hasher = target.with_name(f"{target.name}.part"), hashlib.sha256()
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part.unlink(missing_ok=True)
        try:
            with part.open("wb") as writer:
                async for piece in self._bucket.pieces(key_of(digest), size_bytes):
                    hasher.update(piece)
                    writer.write(piece)
                if hasher.hexdigest() != digest:
                    raise Differs
                writer.flush()
                os.fsync(writer.fileno())
                os.fchmod(writer.fileno(), 0o444)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        return size_bytes

    def write(self, digest: str, source: Path) -> None:
        """Store an artifact, unless the bucket has it.

        Raises:
            FileNotFoundError, Differs: the file is missing or damaged.
            BlobsUnavailable: the bucket's server failed.
        """
        with source.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise Differs
        if self._runner.run(self._bucket.size(key_of(digest))) != source.stat().st_size:
            self._runner.run(self._bucket.put(key_of(digest), source))


@contextmanager
def bucket_artifacts(location: BucketLocation | None) -> Iterator[BucketArtifacts | None]:
    """Yield the artifacts of a bucket; None without one.

    Raises:
        BlobsUnusable: the bucket cannot be used.
    """
    if location is None:
        yield None
        return
    with asyncio.Runner() as runner:
        yield BucketArtifacts(location, runner)
