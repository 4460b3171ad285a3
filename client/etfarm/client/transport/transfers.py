"""Concurrent transfers of artifacts to and from the store, each resumed where its stream broke."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from etfarm.client.errors import OutputUnwritable
from etfarm.client.transport.retry import repeat
from etfarm.v1 import artifact_pb2, common_pb2
from etfarm.wire import chunks

if TYPE_CHECKING:
    from etfarm.client.transport.stubs import Stubs

PARALLEL = 4
"""Number of concurrent uploads of large artifacts: one stream already uses most of a link."""

PARALLEL_SMALL = 16
"""Number of concurrent uploads of small artifacts: the thousands of a calibration set wait for round trips, not for the link."""

SMALL_BYTES = 256 << 10

_DIGESTS_PER_CALL = 5_000
"""Number of digests in one FindMissing call, which takes 10,000."""

_GO_ON = (
    grpc.StatusCode.OUT_OF_RANGE,  # the committed size differs: ask for it and continue there
    grpc.StatusCode.ABORTED,  # another stream is uploading these bytes
)

Source = bytes | Path
"""The source of an upload: bytes, or the file that contains them."""

Moved = Callable[[int, int], None]
"""Callback with the bytes done and the bytes in total, over all transfers."""


async def upload_missing(
    stubs: Stubs, blobs: Mapping[str, tuple[common_pb2.Artifact, Source]], *, on_progress: Moved | None = None
) -> int:
    """Upload those of `blobs` (by digest) that the store lacks, and return their total size in bytes.

    Raises:
        EtfarmError: as ArtifactService.Upload; SERVER_UNREACHABLE if the server does not come back.
    """
    digests = list(blobs)
    missing: list[str] = []
    for start in range(0, len(digests), _DIGESTS_PER_CALL):
        request = artifact_pb2.FindMissingArtifactsRequest(digests=digests[start : start + _DIGESTS_PER_CALL])
        missing += (await stubs.artifacts.FindMissing(request)).missing
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

        await _upload(stubs, artifact, source, moved)

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


async def _upload(stubs: Stubs, artifact: common_pb2.Artifact, source: Source, moved: chunks.Progressed) -> None:
    backoff = stubs.patience.backoff()
    furthest = -1

    def further(done: int, total: int) -> None:
        nonlocal furthest
        if done > furthest:
            furthest = done
            backoff.reset()
        moved(done, total)

    while True:
        try:
            return await chunks.upload(stubs.artifacts, artifact, source, on_progress=further)
        except grpc.aio.AioRpcError as error:
            await backoff.after(error, also=_GO_ON)


async def download_file(stubs: Stubs, artifact: common_pb2.Artifact, path: Path, *, on_progress: Moved | None = None) -> None:
    """Download an artifact to `path`; the file is complete and verified, or not written at all.

    Raises:
        OutputUnwritable: the file cannot be written.
        EtfarmError: as ArtifactService.Download; SERVER_UNREACHABLE if the server does not come back.
    """
    # A partial file that an earlier command left beside `path` may be of another artifact.
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    backoff = stubs.patience.backoff()

    def moved(done: int, total: int) -> None:
        backoff.reset()
        if on_progress is not None:
            on_progress(done, total)

    try:
        await repeat(partial(chunks.download, stubs.artifacts, artifact, path, on_progress=moved), backoff)
    except OSError as error:
        raise OutputUnwritable(f"{path} cannot be written: {error.strerror or error}.", "Give another path.", path=path) from None
    finally:
        part.unlink(missing_ok=True)


async def download_bytes(stubs: Stubs, artifact: common_pb2.Artifact) -> bytes:
    """Download a small artifact and return its verified bytes.

    Raises:
        EtfarmError: as ArtifactService.Download; SERVER_UNREACHABLE if the server does not come back.
    """
    return await repeat(lambda: chunks.download_bytes(stubs.artifacts, artifact), stubs.patience.backoff())
