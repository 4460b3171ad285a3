"""ArtifactService: bytes into and out of the store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from etfarm.server.access.scope import DEFAULT_PROJECT, FARM_HOLDER, agent_holder
from etfarm.server.artifacts.store import ArtifactNotFound, BadUpload, Store
from etfarm.server.rpc.auth import ADMIN, AGENT, caller
from etfarm.server.rpc.edge import later
from etfarm.v1 import artifact_pb2, artifact_pb2_grpc
from etfarm.v1.common_pb2 import Principal

_MOST_DIGESTS = 10_000


NeededByAgent = Callable[[str, str], bool]
"""Whether a live attempt or session of an agent's principal, the first argument, needs an artifact, the digest."""


def holder_of(principal: Principal) -> str:
    """Return who holds what the principal uploads."""
    return agent_holder(principal.name) if principal.role == AGENT else principal.project or DEFAULT_PROJECT


def readable_holders(principal: Principal) -> set[str]:
    """Return the holders whose artifacts the principal reads; an admin reads those of all."""
    return {holder_of(principal), *(() if principal.role == AGENT else principal.projects), FARM_HOLDER}


class ArtifactService(artifact_pb2_grpc.ArtifactServiceServicer):
    """See artifact.proto.

    Args:
        needed_by_agent: says what an agent may download beside its own uploads and the farm's runners.
    """

    List: Any = later("ArtifactService.List")
    Delete: Any = later("ArtifactService.Delete")
    Collect: Any = later("ArtifactService.Collect")
    Verify: Any = later("ArtifactService.Verify")

    def __init__(self, store: Store, needed_by_agent: NeededByAgent = lambda principal, digest: True) -> None:
        self._store = store
        self._needed_by_agent = needed_by_agent

    async def FindMissing(self, request: artifact_pb2.FindMissingRequest, context: object) -> artifact_pb2.FindMissingResponse:
        if len(request.digests) > _MOST_DIGESTS:
            error = BadUpload(f"{len(request.digests)} digests are too many.", f"Ask for {_MOST_DIGESTS} at a time.")
            error.reason = "DIGEST_MALFORMED"
            raise error
        return artifact_pb2.FindMissingResponse(missing=await self._store.missing(request.digests, holder_of(caller())))

    async def GetUploadStatus(self, request: artifact_pb2.GetUploadStatusRequest, context: object) -> artifact_pb2.UploadStatus:
        return await self._store.upload_status(request.digest, holder_of(caller()))

    async def Upload(
        self, request_iterator: AsyncIterator[artifact_pb2.UploadRequest], context: object
    ) -> artifact_pb2.UploadStatus:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("message") != "header":
            error = BadUpload("An upload begins with a header.", "Send UploadRequest.header first.")
            error.reason = "NO_HEADER"
            raise error
        who = caller()
        return await self._store.receive(first.header.artifact, _chunks(request_iterator), holder_of(who), who.name)

    async def Download(self, request: artifact_pb2.DownloadRequest, context: object) -> AsyncIterator[artifact_pb2.Chunk]:
        if not await self._may_read(caller(), request.digest):
            raise ArtifactNotFound(f"The store does not hold {request.digest[:12]}.", "Upload it again.", digest=request.digest)
        async for chunk in self._store.chunks(request.digest, request.offset):
            yield chunk

    async def _may_read(self, who: Principal, digest: str) -> bool:
        if who.role == ADMIN or await self._store.is_held(digest, readable_holders(who)):
            return True
        return who.role == AGENT and self._needed_by_agent(who.name, digest)


async def _chunks(requests: AsyncIterator[artifact_pb2.UploadRequest]) -> AsyncIterator[artifact_pb2.Chunk]:
    async for request in requests:
        if request.WhichOneof("message") != "chunk":
            raise BadUpload("After an upload's header come chunks only.")
        yield request.chunk
