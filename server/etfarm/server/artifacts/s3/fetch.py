"""One transfer from a bucket to a file of this machine, which others may read while it goes on."""

from __future__ import annotations

import asyncio
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.wire.chunks import append


class Overtaken(Exception):
    """A transfer that ended before it had the bytes that a reader waits for."""


class Fetch:
    """The bytes of one object on their way.

    Args:
        path: the file, which does not exist.
        pool: thread pool that writes and hashes.
    """

    def __init__(self, path: Path, size_bytes: int, pool: ThreadPoolExecutor) -> None:
        self.size_bytes = size_bytes
        self._path = path
        self._pool = pool
        self._received = 0
        self._is_over = False
        self._progress = asyncio.Event()
        self.file: BinaryIO = path.open("xb")
        """The file; `run` closes it."""

    async def run(self, bucket: Bucket, key: str) -> str:
        """Receive all bytes; return their sha256.

        Raises:
            FileNotFoundError: there is no such object.
            BlobsUnavailable: the server failed.
            OSError: the disk cannot be written.
        """
        hasher = hashlib.sha256()
        with self.file:
            async for piece in bucket.pieces(key, self.size_bytes):
                await append(self.file.fileno(), hasher, piece, self._pool)
                self._received += len(piece)
                self._wake()
        return hasher.hexdigest()

    def end(self) -> None:
        """Release the readers; what they still lack does not come."""
        self._is_over = True
        self._wake()

    def open(self) -> BinaryIO:
        """Open the file for a reader."""
        return os.fdopen(os.open(self._path, os.O_RDONLY), "rb")

    async def reach(self, position: int) -> None:
        """Wait until the file has the bytes up to a position.

        Raises:
            Overtaken: the transfer has ended without them.
        """
        while self._received < position:
            if self._is_over:
                raise Overtaken
            await self._progress.wait()

    def _wake(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()
