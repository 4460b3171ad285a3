"""The transfer of artifacts by clients and agents: resumable uploads and downloads, verified on arrival."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc

from etfarm.v1 import artifact_pb2, common_pb2
from etfarm.wire import digest as digests
from etfarm.wire.errors import FarmError, Kind

if TYPE_CHECKING:
    from etfarm.v1.artifact_pb2_grpc import ArtifactServiceAsyncStub

CHUNK_BYTES = 512 << 10
"""Size of one chunk's data. From 2 MiB on, grpc.aio becomes slower."""

_CUT_SHORT: Final = "Internal error from Core"
"""The details with which grpc.aio replaces the server's status if the server ends a stream while a chunk is in flight, mostly
because another stream uploads the same artifact. The next attempt receives the server's own status."""

Progressed = Callable[[int, int], None]
"""A callback that takes (bytes done, total bytes) after each chunk."""


class CorruptDownload(FarmError):
    """A download whose bytes have another digest than requested."""

    reason = "DIGEST_MISMATCH"
    kind = Kind.DATA_LOSS


class LinkFailed(Exception):
    """A link that could not be followed, or led to other bytes. Its text never has the link."""


FollowLink = Callable[[artifact_pb2.ArtifactLink, common_pb2.Artifact, int], AsyncGenerator[bytes, None]]
"""Function that takes a link, its artifact and an offset, and yields the bytes from the offset on; it raises LinkFailed."""


def spans(offset: int, size: int, chunk: int = CHUNK_BYTES) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of the consecutive chunks that cover [offset, size)."""
    for start in range(offset, size, chunk):
        yield start, min(chunk, size - start)


def artifact_of(data: bytes) -> common_pb2.Artifact:
    """Return the artifact of `data`."""
    return common_pb2.Artifact(digest=digests.of_bytes(data), size_bytes=len(data))


async def artifact_of_file(path: Path) -> common_pb2.Artifact:
    """Return the artifact of a file's bytes, hashed in a thread."""
    digest = await asyncio.to_thread(digests.of_file, path)
    return common_pb2.Artifact(digest=digest, size_bytes=path.stat().st_size)


async def upload(
    stub: ArtifactServiceAsyncStub,
    artifact: common_pb2.Artifact,
    source: bytes | Path,
    *,
    on_progress: Progressed | None = None,
) -> None:
    """Upload one artifact, resuming after an interrupted stream. Call FindMissing first.

    Raises:
        grpc.aio.AioRpcError: as documented for ArtifactService.Upload; call again to resume after UNAVAILABLE, OUT_OF_RANGE or
            ABORTED.
    """
    status = await stub.GetUploadStatus(artifact_pb2.GetUploadStatusRequest(digest=artifact.digest))
    if status.complete:
        return
    call = stub.Upload(_requests(artifact, source, status.committed_bytes, on_progress))
    try:
        await call
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INTERNAL and _CUT_SHORT in (error.details() or ""):
            details = "The server ended the stream before all was sent."
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.ABORTED, error.initial_metadata(), error.trailing_metadata(), details
            ) from error
        raise


async def _requests(
    artifact: common_pb2.Artifact, source: bytes | Path, offset: int, on_progress: Progressed | None
) -> AsyncIterator[artifact_pb2.UploadArtifactRequest]:
    yield artifact_pb2.UploadArtifactRequest(header=artifact_pb2.UploadHeader(artifact=artifact))
    file = None if isinstance(source, bytes) else await asyncio.to_thread(source.open, "rb")
    try:
        for start, length in spans(offset, artifact.size_bytes):
            if isinstance(source, bytes):
                data = source[start : start + length]
            else:
                assert file is not None
                data = await asyncio.to_thread(os.pread, file.fileno(), length, start)
            yield artifact_pb2.UploadArtifactRequest(chunk=artifact_pb2.Chunk(offset=start, data=data))
            if on_progress is not None:
                on_progress(start + length, artifact.size_bytes)
    finally:
        if file is not None:
            file.close()


async def download_bytes(stub: ArtifactServiceAsyncStub, artifact: common_pb2.Artifact) -> bytes:
    """Return a small artifact's bytes, verified.

    Raises:
        CorruptDownload: the digest differs.
        grpc.aio.AioRpcError: as documented for ArtifactService.Download.
    """
    parts, done = [], 0
    async for chunk in stub.Download(artifact_pb2.DownloadArtifactRequest(digest=artifact.digest)):
        parts.append(chunk.data)
        done += len(chunk.data)
        _require_room(artifact, done)
    data = b"".join(parts)
    if digests.of_bytes(data) != artifact.digest:
        raise corrupt_download(artifact)
    return data


async def download(
    stub: ArtifactServiceAsyncStub,
    artifact: common_pb2.Artifact,
    path: Path,
    *,
    on_progress: Progressed | None = None,
    follow: FollowLink | None = None,
) -> None:
    """Download an artifact to `path`.

    Bytes are written to `path`.part, from which the next call resumes after an interrupted stream. A file at `path` is always
    complete and verified.

    Args:
        follow: reads from the farm's S3 server if the server answers with a link to it; None to let the server send the bytes.

    Raises:
        LinkFailed: the link could not be followed; the next attempt resumes. Or it led to other bytes, and the next starts at 0.
        CorruptDownload: the digest differs; the part file is deleted, so that the next attempt starts at 0.
        grpc.aio.AioRpcError: as documented for ArtifactService.Download.
    """
    part = path.with_name(path.name + ".part")
    hasher = hashlib.sha256()
    done = 0
    with part.open("ab") as file:
        resume_at = file.tell()
        if resume_at > artifact.size_bytes:
            file.truncate(0)
            resume_at = 0
        if resume_at:
            hasher = await asyncio.to_thread(digests.hash_of, part)
            done = resume_at
        link: artifact_pb2.ArtifactLink | None = None
        # Without a known size, what a link yields could not be bounded.
        accepts_link = follow is not None and resume_at < artifact.size_bytes
        request = artifact_pb2.DownloadArtifactRequest(digest=artifact.digest, offset=resume_at, accepts_link=accepts_link)

        async def keep(data: bytes) -> None:
            nonlocal done
            done += len(data)
            try:
                _require_room(artifact, done)
            except CorruptDownload:
                part.unlink()
                raise
            await append(file.fileno(), hasher, data)
            if on_progress is not None:
                on_progress(done, artifact.size_bytes)

        async for chunk in stub.Download(request):
            if chunk.HasField("link"):
                link = chunk.link
            else:
                await keep(chunk.data)
        if link is not None and follow is not None:
            async with aclosing(follow(link, artifact, done)) as pieces:
                async for data in pieces:
                    await keep(data)
        await asyncio.to_thread(os.fsync, file.fileno())
    if hasher.hexdigest() != artifact.digest:
        part.unlink()
        raise LinkFailed("other bytes arrived") if link is not None else corrupt_download(artifact)
    part.replace(path)


def _require_room(artifact: common_pb2.Artifact, done: int) -> None:
    """Refuse bytes beyond an artifact's size if it is known, since a server could send bytes endlessly.

    Raises:
        CorruptDownload: more bytes arrived.
    """
    if artifact.size_bytes and done > artifact.size_bytes:
        raise corrupt_download(artifact)


async def append(fd: int, hasher: hashlib._Hash, data: bytes, pool: Executor | None = None) -> None:
    """Write and hash one chunk in a thread.

    Even if the caller is cancelled, this returns only after the thread is done: the thread must not write to a file descriptor
    that the caller closed and the system reused.

    Args:
        pool: executor of the thread; asyncio's default executor if None.

    Raises:
        OSError: the disk is full; the bytes written so far are in the file.
    """
    writing = asyncio.get_running_loop().run_in_executor(pool, _write, fd, hasher, data)
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        raise


def _write(fd: int, hasher: hashlib._Hash, data: bytes) -> None:
    hasher.update(data)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def corrupt_download(artifact: common_pb2.Artifact) -> CorruptDownload:
    """Return the error of a download whose bytes have another digest than the artifact."""
    return CorruptDownload(
        f"The bytes that arrived for {artifact.digest[:12]} do not match their sha256.",
        "Try again; if it persists, the store's disk is damaged.",
        digest=artifact.digest,
    )
