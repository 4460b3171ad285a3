"""Staging of uploads: bytes are collected in one file per holder and digest, and only verified bytes enter the store."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog

from etfarm.server.artifacts.errors import (
    DiskFull,
)  # fmt: skip
from etfarm.server.artifacts.limits import StoreLimits
from etfarm.server.artifacts.room import Room
from etfarm.v1 import artifact_pb2, common_pb2
from etfarm.wire import digest as digests
from etfarm.wire.chunks import append
from etfarm.wire.errors import error_for

log = structlog.get_logger()

T = TypeVar("T")

MAX_CHUNK_BYTES = 1 << 20
"""Maximum size of one chunk of an upload."""


@dataclass
class _Stream:
    """State of an upload stream: announced and received size in bytes."""

    size_bytes: int
    received: int = 0


class Staging:
    """Incomplete uploads, in one file per holder and digest, so that no holder's bytes enter another holder's upload.

    Args:
        folder: an existing folder. Files other than parts, left over from an earlier version or a killed server, are deleted.
        pool: thread pool that writes files and computes hashes.
    """

    def __init__(self, folder: Path, room: Room, limits: StoreLimits, pool: ThreadPoolExecutor) -> None:
        self._folder = folder
        self._room = room
        self._limits = limits
        self._pool = pool
        self._streams: dict[tuple[str, str], _Stream] = {}
        for path in folder.iterdir():
            if path.suffix != ".part" or "-" not in path.name:
                path.unlink()
        self.expire()

    def part(self, holder: str, digest: str) -> Path:
        """Return the path of the file that collects a holder's bytes of an unfinished upload."""
        return self._folder / f"{_hashed_name(holder)}-{digest}.part"

    def committed_bytes(self, holder: str, digest: str) -> int:
        """Return the committed size of a holder's upload, in bytes."""
        return _size(self.part(holder, digest))

    def is_streaming(self, digest: str) -> bool:
        """Return whether any holder's stream is currently uploading the artifact."""
        return any(streamed == digest for _, streamed in self._streams)

    def staged_bytes(self, holder: str, *, without: str = "") -> int:
        """Return the size of a holder's unfinished uploads except `without`. Active streams count at their announced size."""
        parts = self._own_parts(holder)
        active = {self.part(holder, digest): stream for (other, digest), stream in self._streams.items() if other == holder}
        skipped = self.part(holder, without) if without else None
        idle_bytes = sum(_size(path) for path in parts if path not in active and path != skipped)
        return idle_bytes + sum(stream.size_bytes for path, stream in active.items() if path != skipped)

    def require_free(self, artifact: common_pb2.Artifact, holder: str) -> None:
        """Raise an error if a stream cannot start now.

        Raises:
            BAD_UPLOAD, LIMIT_EXCEEDED, UPLOAD_IN_PROGRESS, LIMIT_EXCEEDED: see ArtifactService.Upload.
        """
        if artifact.size_bytes < 0:
            raise error_for("BAD_UPLOAD", f"`size_bytes` must be 0 or more, got {artifact.size_bytes}.")
        if artifact.size_bytes > self._limits.artifact_bytes:
            raise error_for(
                "LIMIT_EXCEEDED",
                f"An artifact must have at most {self._limits.artifact_bytes} bytes, got {artifact.size_bytes}.",
                "Ask the farm's admin for a larger `etfarm serve --max-artifact-gib`.",
                limit_bytes=self._limits.artifact_bytes,
                size_bytes=artifact.size_bytes,
            )
        digest = artifact.digest
        if (holder, digest) in self._streams:
            raise error_for(
                "UPLOAD_IN_PROGRESS", f"Another stream is uploading {digest[:12]}.", "Wait for it, or try again.", digest=digest
            )
        if sum(other == holder for other, _ in self._streams) >= self._limits.uploads:
            raise error_for(
                "LIMIT_EXCEEDED",
                f"A project may have at most {self._limits.uploads} uploads in progress.",
                "Wait until some of them finish.",
                limit=self._limits.uploads,
            )

    async def receive(
        self,
        artifact: common_pb2.Artifact,
        chunks: AsyncIterator[artifact_pb2.Chunk],
        holder: str,
        settle: Callable[[Path], Awaitable[None]],
        *,
        is_result: bool,
    ) -> bool:
        """Receive one stream, continuing at the committed size; return whether the upload is complete.

        Args:
            settle: moves the verified file into the store; no other stream of the upload can start until it returns.
            is_result: whether the uploader is an agent; see `Room.reserve`.

        Raises:
            BAD_UPLOAD, LIMIT_EXCEEDED, UPLOAD_IN_PROGRESS, UPLOAD_IDLE, CHUNK_OUT_OF_PLACE, DIGEST_MISMATCH, DiskFull:
                see ArtifactService.Upload.
        """
        self.require_free(artifact, holder)
        key, part = (holder, artifact.digest), self.part(holder, artifact.digest)
        stream = self._streams[key] = _Stream(artifact.size_bytes)
        try:
            stream.received = _size(part)
            if stream.received > artifact.size_bytes:
                # The part belongs to a header with another announced size.
                part.unlink()
                stream.received = 0
            self._room.reserve(key, artifact.size_bytes - stream.received, is_result=is_result)
            self._evict(holder)
            if not await self._write(artifact, chunks, key, part, stream):
                return False
            await settle(part)
            return True
        finally:
            self._room.release(key)
            del self._streams[key]

    async def _write(
        self,
        artifact: common_pb2.Artifact,
        chunks: AsyncIterator[artifact_pb2.Chunk],
        key: tuple[str, str],
        part: Path,
        stream: _Stream,
    ) -> bool:
        hasher = await self._run(digests.hash_of, part) if stream.received else hashlib.sha256()
        reader = aiter(chunks)
        with part.open("ab") as file:
            while (chunk := await self._next(reader, artifact.digest, stream.received)) is not None:
                _check_chunk(chunk, stream.received, artifact.size_bytes)
                try:
                    await append(file.fileno(), hasher, chunk.data, self._pool)
                except OSError as error:
                    raise DiskFull(f"The store cannot write: {error.strerror}.", "Free disk on the server.") from None
                stream.received += len(chunk.data)
                self._room.shrink(key, artifact.size_bytes - stream.received)
            if stream.received < artifact.size_bytes:
                return False
            await self._run(os.fsync, file.fileno())
        if hasher.hexdigest() != artifact.digest:
            part.unlink()
            raise error_for(
                "DIGEST_MISMATCH",
                f"All {stream.received} bytes arrived, but their sha256 is {hasher.hexdigest()[:12]}, not "
                f"{artifact.digest[:12]}.",
                "Send it again from 0.", digest=artifact.digest,
            )  # fmt: skip
        return True

    async def _next(self, reader: AsyncIterator[artifact_pb2.Chunk], digest: str, received: int) -> artifact_pb2.Chunk | None:
        """Return the next chunk; None at the end of the stream."""
        clock = asyncio.timeout(self._limits.upload_idle_s)
        try:
            async with clock:
                return await anext(reader, None)
        except TimeoutError:
            if not clock.expired():
                raise
            raise error_for(
                "UPLOAD_IDLE",
                f"The upload of {digest[:12]} sent nothing for {self._limits.upload_idle_s:g} s.",
                "Ask GetUploadStatus and continue there.",
                digest=digest,
                committed_bytes=received,
            ) from None

    def _evict(self, holder: str) -> None:
        """Delete a holder's oldest parts beyond the limit, except active ones."""
        streaming = {self.part(other, digest) for other, digest in self._streams}
        idle = [path for path in self._own_parts(holder) if path not in streaming]
        for path in sorted(idle, key=_mtime)[: max(0, len(idle) - self._limits.parts + 1)]:
            path.unlink(missing_ok=True)

    def expire(self) -> None:
        """Delete parts that were not continued in time."""
        streaming = {self.part(holder, digest) for holder, digest in self._streams}
        before = time.time() - self._limits.part_age_s
        for path in self._folder.glob("*.part"):
            if path not in streaming and _mtime(path) < before:
                log.info("an unfinished upload expired", part=path.name, size_bytes=_size(path))
                path.unlink(missing_ok=True)

    def _own_parts(self, holder: str) -> list[Path]:
        return list(self._folder.glob(f"{_hashed_name(holder)}-*.part"))

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)


def _check_chunk(chunk: artifact_pb2.Chunk, received: int, size_bytes: int) -> None:
    if chunk.offset != received:
        raise error_for(
            "CHUNK_OUT_OF_PLACE",
            f"A chunk starts at offset {chunk.offset}, but {received} bytes are committed.", "Ask GetUploadStatus and "
            "continue there.",
            committed_bytes=received,
        )  # fmt: skip
    if len(chunk.data) > MAX_CHUNK_BYTES:
        raise error_for("TOO_MANY_BYTES", f"A chunk must have at most 1 MiB, got {len(chunk.data)} bytes.")
    if received + len(chunk.data) > size_bytes:
        raise error_for("TOO_MANY_BYTES", f"More bytes arrived than the {size_bytes} announced.")


def _hashed_name(holder: str) -> str:
    # A holder's name may contain characters that are not allowed in a file name.
    return hashlib.sha256(holder.encode()).hexdigest()[:16]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
