"""ArtifactService: bytes into and out of the store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from etfarm.server.artifacts.store import BadUpload, Store
from etfarm.server.rpc.auth import caller
from etfarm.server.rpc.edge import later
from etfarm.v1 import artifact_pb2, artifact_pb2_grpc

_MOST_DIGESTS = 10_000


class ArtifactService(artifact_pb2_grpc.ArtifactServiceServicer):
    """See artifact.proto."""

    List: Any = later("ArtifactService.List")
    Delete: Any = later("ArtifactService.Delete")
    Collect: Any = later("ArtifactService.Collect")
    Verify: Any = later("ArtifactService.Verify")

    def __init__(self, store: Store) -> None:
        self._store = store

    async def FindMissing(self, request: artifact_pb2.FindMissingRequest, context: object) -> artifact_pb2.FindMissingResponse:
        if len(request.digests) > _MOST_DIGESTS:
            error = BadUpload(f"{len(request.digests)} digests are too many.", f"Ask for {_MOST_DIGESTS} at a time.")
            error.reason = "DIGEST_MALFORMED"
            raise error
        return artifact_pb2.FindMissingResponse(missing=self._store.missing(request.digests))

    async def GetUploadStatus(self, request: artifact_pb2.GetUploadStatusRequest, context: object) -> artifact_pb2.UploadStatus:
        return self._store.upload_status(request.digest)

    async def Upload(
        self, request_iterator: AsyncIterator[artifact_pb2.UploadRequest], context: object
    ) -> artifact_pb2.UploadStatus:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("message") != "header":
            error = BadUpload("An upload begins with a header.", "Send UploadRequest.header first.")
            error.reason = "NO_HEADER"
            raise error
        return await self._store.receive(first.header.artifact, _chunks(request_iterator), caller().name)

    async def Download(self, request: artifact_pb2.DownloadRequest, context: object) -> AsyncIterator[artifact_pb2.Chunk]:
        async for chunk in self._store.chunks(request.digest, request.offset):
            yield chunk


async def _chunks(requests: AsyncIterator[artifact_pb2.UploadRequest]) -> AsyncIterator[artifact_pb2.Chunk]:
    async for request in requests:
        if request.WhichOneof("message") != "chunk":
            raise BadUpload("After an upload's header come chunks only.")
        yield request.chunk
