"""Steps 1 and 10, client: artifacts to and from the store, several at once, each going on where its stream broke."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from etfarm.client.errors import OutputUnwritable, from_rpc_error
from etfarm.client.transport.retry import Backoff, repeat
from etfarm.v1 import artifact_pb2, common_pb2
from etfarm.wire import chunks

if TYPE_CHECKING:
    from etfarm.v1.artifact_pb2_grpc import ArtifactServiceAsyncStub

PARALLEL = 4
"""Uploads of large artifacts at one time: one stream has most of a link."""

PARALLEL_SMALL = 16
"""Uploads of small ones: a calibration set's thousands wait for round trips, not for the link."""

SMALL_BYTES = 256 << 10

_ASK = 5_000
"""Digests in one FindMissing, which takes 10,000."""

_GO_ON = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.OUT_OF_RANGE,  # the committed size is another than ours: ask and go on there
    grpc.StatusCode.ABORTED,  # another stream is writing these bytes
)

Source = bytes | Path
"""What is sent: bytes, or the file that holds them."""

Moved = Callable[[int, int], None]
"""Told (bytes done, bytes in all) of all transfers together."""


async def upload_missing(
    stub: ArtifactServiceAsyncStub,
    blobs: Mapping[str, tuple[common_pb2.Artifact, Source]],
    *,
    server: str,
    on_progress: Moved | None = None,
) -> int:
    """Sends those of `blobs` (by digest) that the store lacks; the bytes that these have together.

    Raises:
        EtfarmError: as ArtifactService.Upload says; SERVER_UNREACHABLE when the server stayed away.
    """
    digests = list(blobs)
    missing: list[str] = []
    for start in range(0, len(digests), _ASK):
        request = artifact_pb2.FindMissingRequest(digests=digests[start : start + _ASK])
        missing += (await repeat(lambda request=request: stub.FindMissing(request), server=server)).missing  # type: ignore[misc]
    wanted = {digest: blobs[digest] for digest in missing if digest in blobs}
    total = sum(artifact.size_bytes for artifact, _ in wanted.values())
    sent = 0

    async def send(digest: str) -> None:
        nonlocal sent
        artifact, source = wanted[digest]
        own = 0

        def moved(bytes_done: int, _: int) -> None:
            nonlocal sent, own
            sent, own = sent + bytes_done - own, bytes_done
            if on_progress is not None:
                on_progress(sent, total)

        await _upload(stub, artifact, source, server, moved)

    async def send_all(queue: Iterator[str]) -> None:
        for digest in queue:
            await send(digest)

    small = iter([digest for digest, (artifact, _) in wanted.items() if artifact.size_bytes <= SMALL_BYTES])
    large = iter([digest for digest, (artifact, _) in wanted.items() if artifact.size_bytes > SMALL_BYTES])
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(min(PARALLEL, len(wanted))):
                group.create_task(send_all(large), name=f"upload large {number}")
            for number in range(min(PARALLEL_SMALL, len(wanted))):
                group.create_task(send_all(small), name=f"upload small {number}")
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return total


async def _upload(
    stub: ArtifactServiceAsyncStub, artifact: common_pb2.Artifact, source: Source, server: str, moved: chunks.Progressed
) -> None:
    backoff = Backoff()
    furthest = -1

    def further(done: int, total: int) -> None:
        nonlocal furthest
        if done > furthest:
            furthest = done
            backoff.reset()
        moved(done, total)

    while True:
        try:
            return await chunks.upload(stub, artifact, source, on_progress=further)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _GO_ON or not await backoff.wait():
                raise from_rpc_error(error, server=server) from None


async def download_file(
    stub: ArtifactServiceAsyncStub,
    artifact: common_pb2.Artifact,
    path: Path,
    *,
    server: str,
    on_progress: Moved | None = None,
) -> None:
    """Puts an artifact at `path`, whole and verified or not at all.

    Raises:
        OutputUnwritable: the file cannot be written.
        EtfarmError: as ArtifactService.Download says; SERVER_UNREACHABLE when the server stayed away.
    """
    # What an earlier command left beside `path` may be of another artifact.
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    try:
        await repeat(lambda: chunks.download(stub, artifact, path, on_progress=on_progress), server=server)
    except OSError as error:
        raise OutputUnwritable(f"{path} cannot be written: {error.strerror or error}.", "Give another path.", path=path) from None
    finally:
        part.unlink(missing_ok=True)


async def download_bytes(stub: ArtifactServiceAsyncStub, artifact: common_pb2.Artifact, *, server: str) -> bytes:
    """A small artifact's bytes, verified.

    Raises:
        EtfarmError: as ArtifactService.Download says; SERVER_UNREACHABLE when the server stayed away.
    """
    return await repeat(lambda: chunks.download_bytes(stub, artifact), server=server)
