"""Artifacts over their streams: resumable upload and download, verified on arrival. Used by clients and agents alike."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc

from etfarm.v1 import artifact_pb2, common_pb2
from etfarm.wire import digest as digests
from etfarm.wire.errors import FarmError, Kind

if TYPE_CHECKING:
    from etfarm.v1.artifact_pb2_grpc import ArtifactServiceAsyncStub

CHUNK_BYTES = 512 << 10
"""One chunk's data. From 2 MiB on grpc.aio becomes slower."""

_CUT_SHORT: Final = "Internal error from Core"
"""What grpc.aio says of a stream that the server ended while a chunk was on its way, in place of what the server said: mostly
that another stream writes these bytes. The next try hears the server's own words."""

Progressed = Callable[[int, int], None]
"""Told (bytes done, bytes in all) after each chunk."""


class CorruptDownload(FarmError):
    """The bytes that arrived have another digest."""

    reason = "DIGEST_MISMATCH"
    kind = Kind.DATA_LOSS


def spans(offset: int, size: int, chunk: int = CHUNK_BYTES) -> Iterator[tuple[int, int]]:
    """(start, length) of the chunks that cover [offset, size) without gaps, in order."""
    for start in range(offset, size, chunk):
        yield start, min(chunk, size - start)


def artifact_of(data: bytes) -> common_pb2.Artifact:
    """The artifact that `data` is."""
    return common_pb2.Artifact(digest=digests.of_bytes(data), size_bytes=len(data))


async def artifact_of_file(path: Path) -> common_pb2.Artifact:
    """The artifact that a file's bytes are; hashed in a thread."""
    digest = await asyncio.to_thread(digests.of_file, path)
    return common_pb2.Artifact(digest=digest, size_bytes=path.stat().st_size)


async def upload(
    stub: ArtifactServiceAsyncStub,
    artifact: common_pb2.Artifact,
    source: bytes | Path,
    *,
    on_progress: Progressed | None = None,
) -> None:
    """Sends one artifact from where an earlier stream of it broke. Call FindMissing first.

    Raises:
        grpc.aio.AioRpcError: as ArtifactService.Upload says; call again to go on after UNAVAILABLE, OUT_OF_RANGE or ABORTED.
    """
    status = await stub.GetUploadStatus(artifact_pb2.GetUploadStatusRequest(digest=artifact.digest))
    if status.complete:
        return
    call = stub.Upload(_requests(artifact, source, status.committed_bytes, on_progress))
    try:
        await call
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INTERNAL and _CUT_SHORT in (error.details() or ""):
            said = "The server ended the stream before all was sent."
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.ABORTED, error.initial_metadata(), error.trailing_metadata(), said
            ) from error
        raise


async def _requests(
    artifact: common_pb2.Artifact, source: bytes | Path, offset: int, on_progress: Progressed | None
) -> AsyncIterator[artifact_pb2.UploadRequest]:
    yield artifact_pb2.UploadRequest(header=artifact_pb2.UploadHeader(artifact=artifact))
    file = None if isinstance(source, bytes) else await asyncio.to_thread(source.open, "rb")
    try:
        for start, length in spans(offset, artifact.size_bytes):
            if isinstance(source, bytes):
                data = source[start : start + length]
            else:
                assert file is not None
                data = await asyncio.to_thread(os.pread, file.fileno(), length, start)
            yield artifact_pb2.UploadRequest(chunk=artifact_pb2.Chunk(offset=start, data=data))
            if on_progress is not None:
                on_progress(start + length, artifact.size_bytes)
    finally:
        if file is not None:
            file.close()


async def download_bytes(stub: ArtifactServiceAsyncStub, artifact: common_pb2.Artifact) -> bytes:
    """A small artifact's bytes, verified.

    Raises:
        CorruptDownload: the digest is another.
        grpc.aio.AioRpcError: as ArtifactService.Download says.
    """
    parts, done = [], 0
    async for chunk in stub.Download(artifact_pb2.DownloadRequest(digest=artifact.digest)):
        parts.append(chunk.data)
        done += len(chunk.data)
        _require_room(artifact, done)
    data = b"".join(parts)
    if digests.of_bytes(data) != artifact.digest:
        raise _corrupt(artifact)
    return data


async def download(
    stub: ArtifactServiceAsyncStub,
    artifact: common_pb2.Artifact,
    path: Path,
    *,
    on_progress: Progressed | None = None,
) -> None:
    """Puts an artifact at `path`: bytes gather in `path`.part, which a broken stream leaves to go on from; what lies at
    `path` is always whole and verified.

    Raises:
        CorruptDownload: the digest is another; the part file is gone, so that the next try starts at 0.
        grpc.aio.AioRpcError: as ArtifactService.Download says.
    """
    part = path.with_name(path.name + ".part")
    hasher = hashlib.sha256()
    done = 0
    with part.open("ab") as file:
        have = file.tell()
        if have > artifact.size_bytes:
            file.truncate(0)
            have = 0
        if have:
            hasher = await asyncio.to_thread(_hash_so_far, part)
            done = have
        async for chunk in stub.Download(artifact_pb2.DownloadRequest(digest=artifact.digest, offset=have)):
            done += len(chunk.data)
            try:
                _require_room(artifact, done)
            except CorruptDownload:
                part.unlink()
                raise
            await append(file.fileno(), hasher, chunk.data)
            if on_progress is not None:
                on_progress(done, artifact.size_bytes)
        await asyncio.to_thread(os.fsync, file.fileno())
    if hasher.hexdigest() != artifact.digest:
        part.unlink()
        raise _corrupt(artifact)
    part.replace(path)


def _require_room(artifact: common_pb2.Artifact, done: int) -> None:
    """Refuse bytes beyond an artifact's size, where that is known: a server could send them without end.

    Raises:
        CorruptDownload: there are more.
    """
    if artifact.size_bytes and done > artifact.size_bytes:
        raise _corrupt(artifact)


def _hash_so_far(part: Path) -> hashlib._Hash:
    with part.open("rb") as file:
        return hashlib.file_digest(file, "sha256")


async def append(fd: int, hasher: hashlib._Hash, data: bytes, pool: Executor | None = None) -> None:
    """Writes and hashes one chunk in a thread. Returns, also when the caller is cancelled, only after the thread is done:
    it must not write to a number that the caller has closed and another file has got.

    Args:
        pool: runs the thread; asyncio's default executor when None.

    Raises:
        OSError: the disk takes no more; what it took is in the file.
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


def _corrupt(artifact: common_pb2.Artifact) -> CorruptDownload:
    return CorruptDownload(
        f"The bytes that arrived for {artifact.digest[:12]} have another sha256.",
        "Try again; if it stays, the store's disk is damaged.",
        digest=artifact.digest,
    )
