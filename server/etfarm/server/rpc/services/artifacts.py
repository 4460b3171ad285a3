"""ArtifactService: uploads, downloads and verification of artifacts."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Final

import structlog

from etfarm.server.access.projects import require_active
from etfarm.server.access.scope import FARM_HOLDER, agent_holder
from etfarm.server.artifacts.errors import artifact_not_found
from etfarm.server.artifacts.holdings import Holding
from etfarm.server.artifacts.store import Store
from etfarm.server.retention.collection import ArtifactCollection
from etfarm.server.rpc.door.caller import caller
from etfarm.server.rpc.door.roles import ADMIN, AGENT
from etfarm.server.state.paging import BadPageToken, page_size
from etfarm.v1 import artifact_pb2, artifact_pb2_grpc, common_pb2
from etfarm.v1.common_pb2 import Principal
from etfarm.wire.errors import error_for

log = structlog.get_logger()

_MAX_DIGESTS: Final = 10_000
_PAGE: Final = 100, 1000
"""Default and maximum number of artifacts on a page."""
_PAGE_BYTES: Final = 1 << 20

NeededByAgent = Callable[[str, str], Awaitable[bool]]
"""Function that takes an agent's principal and a digest, and returns whether a live attempt or session needs the artifact."""


def holder_of(principal: Principal) -> str:
    """Return the holder of the principal's uploads.

    Raises:
        PROJECT_AMBIGUOUS: the principal has to choose one of several projects.
    """
    return agent_holder(principal.name) if principal.role == AGENT else require_active(principal)


def readable_holders(principal: Principal) -> set[str]:
    """Return the holders whose artifacts the principal may read; not for admins, who may read all."""
    return {FARM_HOLDER, *([agent_holder(principal.name)] if principal.role == AGENT else principal.projects)}


class ArtifactService(artifact_pb2_grpc.ArtifactServiceServicer):
    """The servicer of ArtifactService; see artifact.proto.

    Args:
        needed_by_agent: returns whether an agent may download an artifact besides its own uploads and the farm's runners.
        find_damaged_values: yields the names of values in the database that are damaged.
    """

    def __init__(
        self,
        store: Store,
        needed_by_agent: NeededByAgent,
        collection: ArtifactCollection,
        find_damaged_values: Callable[[], AsyncIterator[list[str]]],
    ) -> None:
        self._find_damaged_values = find_damaged_values
        self._store = store
        self._collection = collection
        self._needed_by_agent = needed_by_agent
        self._downloads: dict[str, asyncio.Semaphore] = {}
        self._verifying = asyncio.Lock()

    async def FindMissing(
        self, request: artifact_pb2.FindMissingArtifactsRequest, context: object
    ) -> artifact_pb2.FindMissingArtifactsResponse:
        if len(request.digests) > _MAX_DIGESTS:
            raise error_for(
                "DIGEST_MALFORMED",
                f"A request must have at most {_MAX_DIGESTS} digests, got {len(request.digests)}.",
                f"Ask for {_MAX_DIGESTS} at a time.",
            )
        missing = await self._store.missing(request.digests, holder_of(caller()))
        return artifact_pb2.FindMissingArtifactsResponse(missing=missing)

    async def GetUploadStatus(self, request: artifact_pb2.GetUploadStatusRequest, context: object) -> artifact_pb2.UploadStatus:
        return await self._store.upload_status(request.digest, holder_of(caller()))

    async def Upload(
        self, request_iterator: AsyncIterator[artifact_pb2.UploadArtifactRequest], context: object
    ) -> artifact_pb2.UploadStatus:
        first = None
        # A silent stream is refused like one whose first message is not a header.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._store.limits.upload_idle_s):
                first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("message") != "header":
            raise error_for(
                "NO_HEADER", "The first message of an upload must be its header.", "Send UploadArtifactRequest.header first."
            )
        principal = caller()
        # An agent of a farm without tokens is an admin.
        return await self._store.receive(
            first.header.artifact,
            _chunks(request_iterator),
            holder_of(principal),
            principal.name,
            is_result=principal.role in (ADMIN, AGENT),
        )

    async def Download(self, request: artifact_pb2.DownloadArtifactRequest, context: object) -> AsyncIterator[artifact_pb2.Chunk]:
        principal = caller()
        if not await self._may_read(principal, request.digest):
            if principal.role != AGENT:
                raise artifact_not_found(request.digest)
            raise error_for(
                "ARTIFACT_NOT_OF_ATTEMPT",
                f"The farm gives {request.digest[:12]} to agents only while an attempt on their devices needs it, and no attempt "
                "does.",
                "Submit the job again if it failed because of this.",
                digest=request.digest,
            )
        if request.accepts_link and (link := await self._store.link(request.digest, request.offset)) is not None:
            yield artifact_pb2.Chunk(offset=request.offset, link=link)
            return
        limits = self._store.limits
        turn = self._downloads.setdefault(principal.name, asyncio.Semaphore(limits.downloads))
        async with turn:
            with _ended_when_idle(limits.download_idle_s) as advance:
                async for chunk in self._store.chunks(request.digest, request.offset):
                    advance()
                    yield chunk

    async def _may_read(self, principal: Principal, digest: str) -> bool:
        self._store.place(digest)
        if principal.role == ADMIN or await self._store.holds(digest, readable_holders(principal)):
            return True
        return principal.role == AGENT and await self._needed_by_agent(principal.name, digest)

    async def List(self, request: artifact_pb2.ListArtifactsRequest, context: object) -> artifact_pb2.ListArtifactsResponse:
        principal, size = caller(), page_size(request.page_size, *_PAGE)
        after = _read_token(request.page_token) if request.page_token else None
        rows = await self._store.holdings.page(None if principal.role == ADMIN else set(principal.projects), after, size + 1)
        answer, taken_bytes = artifact_pb2.ListArtifactsResponse(), 0
        for index, row in enumerate(rows):
            listed = _listed(row)
            taken_bytes += listed.ByteSize()
            if index == size or (index and taken_bytes > _PAGE_BYTES):
                answer.next_page_token = _token(rows[index - 1])
                break
            answer.artifacts.append(listed)
        return answer

    async def Delete(self, request: artifact_pb2.DeleteArtifactRequest, context: object) -> artifact_pb2.DeleteArtifactResponse:
        await self._collection.delete(request.digest, force=request.force)
        return artifact_pb2.DeleteArtifactResponse()

    async def Collect(
        self, request: artifact_pb2.CollectArtifactsRequest, context: object
    ) -> artifact_pb2.CollectArtifactsResponse:
        keep_bytes = request.keep_bytes if request.HasField("keep_bytes") else None
        if keep_bytes is not None and keep_bytes < 0:
            raise error_for(
                "BAD_RETENTION", f"`keep_bytes` must be 0 or more, got {keep_bytes}.", "Leave it out to keep only what is used."
            )
        done = await self._collection.collect(keep_bytes, dry_run=request.dry_run, release=keep_bytes is None)
        return artifact_pb2.CollectArtifactsResponse(
            deleted_bytes=done.size_bytes, deleted_count=done.count, kept_bytes=done.kept_bytes,
            released_bytes=done.released_bytes,
        )  # fmt: skip

    async def Verify(
        self, request: artifact_pb2.VerifyArtifactsRequest, context: object
    ) -> AsyncIterator[artifact_pb2.VerifyArtifactsProgress]:
        # One at a time, since several would compete for the same disk.
        async with self._verifying:
            async for done, total, done_bytes, damaged in self._store.verify():
                yield artifact_pb2.VerifyArtifactsProgress(done=done, total=total, done_bytes=done_bytes, damaged=damaged)
                last = artifact_pb2.VerifyArtifactsProgress(done=done, total=total, done_bytes=done_bytes)
            async for values in self._find_damaged_values():
                if values:
                    log.error("stored values are damaged", values=values)
                    yield artifact_pb2.VerifyArtifactsProgress(
                        done=last.done, total=last.total, done_bytes=last.done_bytes, damaged_values=values
                    )


@contextmanager
def _ended_when_idle(idle_s: float) -> Iterator[Callable[[], None]]:
    """Cancel the current task if a stream's receiver reads nothing for too long. Yield a function to call for each message.

    The stream's generator is suspended while it waits for the receiver, so a timeout within the generator would not fire.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    timer = loop.call_later(idle_s, task.cancel)

    def advance() -> None:
        nonlocal timer
        timer.cancel()
        timer = loop.call_later(idle_s, task.cancel)

    try:
        yield advance
    finally:
        timer.cancel()


def _listed(row: Holding) -> artifact_pb2.StoredArtifact:
    listed = artifact_pb2.StoredArtifact(
        artifact=common_pb2.Artifact(digest=row.digest, size_bytes=row.size_bytes), owner=row.owner, project=row.holder
    )
    listed.create_time.FromDatetime(row.held_at)
    return listed


def _token(row: Holding) -> str:
    position = [row.held_at.astimezone(UTC).isoformat(), row.digest, row.holder]
    return base64.urlsafe_b64encode(json.dumps(position).encode()).decode()


def _read_token(token: str) -> tuple[datetime, str, str]:
    try:
        held_at, digest, holder = json.loads(base64.urlsafe_b64decode(token))
        return datetime.fromisoformat(held_at).astimezone(UTC), str(digest), str(holder)
    except (ValueError, TypeError, RecursionError, OverflowError):
        raise BadPageToken.of(token) from None


async def _chunks(requests: AsyncIterator[artifact_pb2.UploadArtifactRequest]) -> AsyncIterator[artifact_pb2.Chunk]:
    async for request in requests:
        if request.WhichOneof("message") != "chunk":
            raise error_for("BAD_UPLOAD", "The messages after an upload's header must be chunks.")
        yield request.chunk
