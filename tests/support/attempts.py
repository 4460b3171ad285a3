"""What attempts on the real runner need: a store of artifacts in this process, and a look at the processes that are left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from etfarm.v1 import artifact_pb2, artifact_pb2_grpc, common_pb2
from etfarm.wire.chunks import artifact_of
from tests.support.fake_servers import serving
from tests.support.farm import wait_until


class Blobs(artifact_pb2_grpc.ArtifactServiceServicer):
    """A store that has what it is given and takes everything."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.downloads: list[str] = []
        """Digests, in the order of the requests."""

    def put(self, data: bytes) -> common_pb2.Artifact:
        self.blobs[artifact_of(data).digest] = data
        return artifact_of(data)

    async def Download(self, request: artifact_pb2.DownloadArtifactRequest, context: Any) -> AsyncIterator[artifact_pb2.Chunk]:
        self.downloads.append(request.digest)
        data = self.blobs[request.digest]
        for start in range(request.offset, len(data), 1 << 18):
            yield artifact_pb2.Chunk(offset=start, data=data[start : start + (1 << 18)])

    async def FindMissing(
        self, request: artifact_pb2.FindMissingArtifactsRequest, context: Any
    ) -> artifact_pb2.FindMissingArtifactsResponse:
        return artifact_pb2.FindMissingArtifactsResponse(missing=[each for each in request.digests if each not in self.blobs])

    async def GetUploadStatus(self, request: artifact_pb2.GetUploadStatusRequest, context: Any) -> artifact_pb2.UploadStatus:
        return artifact_pb2.UploadStatus(digest=request.digest, complete=request.digest in self.blobs)

    async def Upload(
        self, requests: AsyncIterator[artifact_pb2.UploadArtifactRequest], context: Any
    ) -> artifact_pb2.UploadStatus:
        digest, data = "", bytearray()
        async for request in requests:
            digest = digest or request.header.artifact.digest
            data += request.chunk.data
        assert self.put(bytes(data)).digest == digest
        return artifact_pb2.UploadStatus(digest=digest, committed_bytes=len(data), complete=True)


async def no_runner_is_left() -> bool:
    """Whether no runner is below this process, as soon as those of a server that other tests share have ended too."""

    def is_runner(child: psutil.Process) -> bool:
        try:
            return "runner" in child.name()
        except psutil.NoSuchProcess:
            return False

    children = psutil.Process().children
    return await asyncio.to_thread(wait_until, lambda: not any(map(is_runner, children(recursive=True))), 10.0)


@pytest.fixture
async def blobs() -> Blobs:
    return Blobs()


@pytest.fixture
async def address(blobs: Blobs) -> AsyncIterator[str]:
    async with serving(blobs) as served:
        yield served
