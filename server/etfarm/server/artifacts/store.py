"""The artifact store: plain files by digest, written beside and renamed, so that what has its name is whole and verified."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import AsyncIterator, Collection, Iterable
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Connection
from sqlalchemy.dialects.sqlite import insert

from etfarm.server.access.scope import DEFAULT_PROJECT
from etfarm.server.artifacts.holdings import Holdings, delete_artifacts, insert_holdings
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.v1 import artifact_pb2, common_pb2
from etfarm.wire import digest as digests
from etfarm.wire.chunks import CHUNK_BYTES, append, spans
from etfarm.wire.errors import FarmError, Kind, UserError

MAX_CHUNK_BYTES = 1 << 20
"""What one chunk of an upload may carry."""

_RESERVE_BYTES = 256 << 20
"""Disk that uploads leave free, so that the journal can always write."""


class ArtifactNotFound(UserError):
    """The store does not hold the digest."""

    reason = "ARTIFACT_NOT_FOUND"
    kind = Kind.NOT_FOUND


class ArtifactMissing(UserError):
    """A request names an artifact that is not stored."""

    reason = "ARTIFACT_MISSING"
    kind = Kind.FAILED_PRECONDITION


class BadUpload(UserError):
    """An upload stream breaks the contract's rules."""

    reason = "BAD_UPLOAD"


class ChunkOutOfPlace(UserError):
    """A chunk does not start where the stored part ends."""

    reason = "CHUNK_OUT_OF_PLACE"
    kind = Kind.OUT_OF_RANGE


class DigestMismatch(UserError):
    """All bytes came and are others than announced."""

    reason = "DIGEST_MISMATCH"
    kind = Kind.DATA_LOSS


class UploadInProgress(UserError):
    """Two streams write one upload."""

    reason = "UPLOAD_IN_PROGRESS"
    kind = Kind.ABORTED


class DiskFull(FarmError):
    """No room for the upload."""

    reason = "DISK_FULL"
    kind = Kind.RESOURCE_EXHAUSTED


class Store:
    """Artifacts under `folder`: `blobs/ab/abcdef...` whole ones, `uploads/` those that are on their way.

    The bytes are stored once; a holder (a project's name, `agent_holder(...)` or FARM_HOLDER) reads only what it holds. A holding
    comes with an upload of all bytes, which proves that the uploader has them, or from the server itself.
    """

    def __init__(self, folder: Path, database: Database) -> None:
        self._blobs = folder / "blobs"
        self._uploads = folder / "uploads"
        for path in (self._blobs, self._uploads):
            path.mkdir(parents=True, exist_ok=True)
        self._database = database
        self._holdings = Holdings(database)
        self._writing: set[tuple[str, str]] = set()
        """(holder, digest) of the uploads under way."""
        self._adopting: set[str] = set()
        self._untold: set[str] = set()
        """Uploads that nobody but their uploader was told of since they came: nothing else can refer to them."""

    def path(self, digest: str) -> Path:
        """The file of a stored artifact; read it, never write it.

        Raises:
            ArtifactNotFound: the store does not hold it.
        """
        path = self.place(digest)
        if not path.exists():
            raise ArtifactNotFound(f"The store does not hold {digest[:12]}.", "Upload it again.", digest=digest)
        return path

    def has(self, digest: str) -> bool:
        """Whether the artifact is stored whole. Who hears that may refer to it from now on, so that it stays."""
        if not self.place(digest).exists():
            return False
        self._untold.discard(digest)
        return True

    def has_for_now(self, digest: str) -> bool:
        """Whether the artifact is stored whole, for who will not refer to it later."""
        return self.place(digest).exists()

    def absent(self, wanted: Iterable[str]) -> list[str]:
        """Return those of `wanted` that are not stored whole, whoever holds them; never an answer to a client."""
        return [digest for digest in wanted if not self.has(digest)]

    async def missing(self, wanted: Iterable[str], holder: str) -> list[str]:
        """Return those of `wanted` that `holder` does not hold, or whose bytes are not stored whole."""
        digests = list(wanted)
        for digest in digests:
            self.place(digest)
        held = await self._holdings.held(digests, [holder])
        return [digest for digest in digests if digest not in held or not self.has(digest)]

    async def is_held(self, digest: str, holders: Collection[str]) -> bool:
        """Return whether one of `holders` holds the artifact and its bytes are stored whole."""
        return self.has_for_now(digest) and bool(await self._holdings.held([digest], holders))

    async def hold(self, holder: str, digests: Iterable[str], owner: str, *, for_now: bool = False) -> None:
        """Give `holder` stored artifacts, by the server's own decision: a cache hit, a result. Others are left out.

        Args:
            for_now: `discard` may still delete them.
        """
        is_stored = self.has_for_now if for_now else self.has
        await self._holdings.add(holder, [digest for digest in digests if is_stored(digest)], owner)

    async def upload_status(self, digest: str, holder: str) -> artifact_pb2.UploadStatus:
        """Return how far an upload of the holder's came; complete where it holds the artifact."""
        return self._status(digest, holder, is_held=not await self.missing([digest], holder))

    def _status(self, digest: str, holder: str, *, is_held: bool) -> artifact_pb2.UploadStatus:
        if is_held:
            return artifact_pb2.UploadStatus(digest=digest, committed_bytes=self.place(digest).stat().st_size, complete=True)
        part = self._part(digest, holder)
        return artifact_pb2.UploadStatus(digest=digest, committed_bytes=part.stat().st_size if part.exists() else 0)

    async def put(self, data: bytes, owner: str, *, holder: str = DEFAULT_PROJECT) -> common_pb2.Artifact:
        """Store a small artifact for a holder."""
        path = self._uploads / f"put-{os.urandom(8).hex()}"
        try:
            await asyncio.to_thread(path.write_bytes, data)
            return await self.adopt(path, owner, holder=holder)
        finally:
            path.unlink(missing_ok=True)

    async def adopt(self, path: Path, owner: str, *, holder: str = DEFAULT_PROJECT) -> common_pb2.Artifact:
        """Move a file of this server's own into the store for a holder; in place of one of the same digest, which heals a damaged
        one.

        Raises:
            DiskFull: the store cannot write.
        """
        digest = await asyncio.to_thread(digests.of_file, path)
        artifact = common_pb2.Artifact(digest=digest, size_bytes=path.stat().st_size)
        self._adopting.add(digest)
        try:
            await asyncio.to_thread(self._settle, path, digest)
        except OSError as error:
            raise DiskFull(f"The store cannot write: {error.strerror}.", "Free disk on the server.") from None
        finally:
            self._adopting.discard(digest)
            self._untold.discard(digest)
        await self._record(artifact, holder, owner)
        return artifact

    async def receive(
        self, artifact: common_pb2.Artifact, chunks: AsyncIterator[artifact_pb2.Chunk], holder: str, owner: str
    ) -> artifact_pb2.UploadStatus:
        """Take one upload from its committed size on; the holder holds the artifact once its bytes are whole. Bytes that only
        other holders have must come as well: knowing a digest does not prove possession of what it names.

        Raises:
            UploadInProgress, ChunkOutOfPlace, BadUpload, DigestMismatch, DiskFull: as ArtifactService.Upload says.
        """
        digest = artifact.digest
        upload = (holder, digest)
        if await self.missing([digest], holder):
            if upload in self._writing:
                raise UploadInProgress(f"Another stream is uploading {digest[:12]}.", "Wait for it, or try again.", digest=digest)
            self._writing.add(upload)
            # Before it has its name: from then on somebody may ask for it. What is stored already may be in use elsewhere.
            if self.has_for_now(digest):
                self._untold.discard(digest)
            else:
                self._untold.add(digest)
            try:
                await self._write(artifact, chunks, holder)
                if self._part(digest, holder).exists():
                    return self._status(digest, holder, is_held=False)
                await self._record(artifact, holder, owner)
            finally:
                self._writing.discard(upload)
                if not self.has_for_now(digest):
                    self._untold.discard(digest)
        return self._status(digest, holder, is_held=True)

    async def discard(self, wanted: Iterable[str]) -> None:
        """Delete those of `wanted`, with all holdings, that were uploaded since this server started and that nothing else refers
        to; the others, which something may refer to, stay."""
        gone = []
        writing = {digest for _, digest in self._writing}
        for digest in self._untold.intersection(wanted) - writing - self._adopting:
            self._untold.discard(digest)
            self.place(digest).unlink(missing_ok=True)
            gone.append(digest)

        def forget(connection: Connection) -> None:
            # One that came again meanwhile is recorded after this.
            delete_artifacts(connection, [digest for digest in gone if not self.place(digest).exists()])

        if gone:
            await self._database.write(forget)

    async def _write(self, artifact: common_pb2.Artifact, chunks: AsyncIterator[artifact_pb2.Chunk], holder: str) -> None:
        part = self._part(artifact.digest, holder)
        have = part.stat().st_size if part.exists() else 0
        self._check_room(artifact.size_bytes - have)
        hasher = await asyncio.to_thread(_hash_of, part) if have else hashlib.sha256()
        with part.open("ab") as file:
            async for chunk in chunks:
                if chunk.offset != have:
                    raise ChunkOutOfPlace(
                        f"A chunk starts at {chunk.offset} where {have} bytes are committed.",
                        "Ask GetUploadStatus and continue there.", committed_bytes=have,
                    )  # fmt: skip
                if len(chunk.data) > MAX_CHUNK_BYTES:
                    raise _reasoned(BadUpload(f"A chunk has {len(chunk.data)} bytes; 1 MiB is the most."), "TOO_MANY_BYTES")
                if have + len(chunk.data) > artifact.size_bytes:
                    raise _reasoned(BadUpload(f"More bytes came than the {artifact.size_bytes} announced."), "TOO_MANY_BYTES")
                try:
                    await append(file.fileno(), hasher, chunk.data)
                except OSError as error:
                    self._check_room(artifact.size_bytes - have)
                    raise DiskFull(f"The store cannot write: {error.strerror}.", "Free disk on the server.") from None
                have += len(chunk.data)
            if have < artifact.size_bytes:
                return
            await asyncio.to_thread(os.fsync, file.fileno())
        if hasher.hexdigest() != artifact.digest:
            part.unlink()
            raise DigestMismatch(
                f"All {have} bytes came and their sha256 is {hasher.hexdigest()[:12]}, not {artifact.digest[:12]}.",
                "Send it again from 0.", digest=artifact.digest,
            )  # fmt: skip
        if self.has_for_now(artifact.digest):
            # Another holder's upload was faster.
            self._untold.discard(artifact.digest)
        await asyncio.to_thread(self._settle, part, artifact.digest)

    async def chunks(self, digest: str, offset: int) -> AsyncIterator[artifact_pb2.Chunk]:
        """The artifact's bytes from `offset` on.

        Raises:
            ArtifactNotFound: the store does not hold it.
            BadUpload: `offset` lies behind its end (reason OFFSET_PAST_END).
        """
        with self.path(digest).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not 0 <= offset <= size:
                error = _reasoned(BadUpload(f"{digest[:12]} has {size} bytes; {offset} is no offset in it."), "OFFSET_PAST_END")
                error.kind = Kind.OUT_OF_RANGE
                raise error
            for start, length in spans(offset, size, CHUNK_BYTES):
                data = await asyncio.to_thread(os.pread, file.fileno(), length, start)
                yield artifact_pb2.Chunk(offset=start, data=data)

    def place(self, digest: str) -> Path:
        """Where the file of an artifact is, if it is stored; read it, never write it."""
        if not digests.is_digest(digest):
            raise _reasoned(BadUpload(f"{digest!r} is no sha256 in lower-case hex."), "DIGEST_MALFORMED")
        return self._blobs / digest[:2] / digest

    def _part(self, digest: str, holder: str) -> Path:
        # A holder's name is no file name.
        return self._uploads / f"{hashlib.sha256(holder.encode()).hexdigest()[:16]}-{digest}.part"

    def _settle(self, path: Path, digest: str) -> None:
        place = self.place(digest)
        place.parent.mkdir(exist_ok=True)
        path.chmod(0o444)
        # The bytes before the name: after a power cut what has its name is whole.
        _sync(path)
        path.replace(place)
        _sync(place.parent)

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self._uploads).free
        if needed + _RESERVE_BYTES > free:
            raise DiskFull(
                f"The upload needs {needed} bytes, the store has {free} free and keeps {_RESERVE_BYTES} of them.",
                "Free disk on the server; nothing of yours was deleted.", needed_bytes=needed, free_bytes=free,
            )  # fmt: skip

    async def _record(self, artifact: common_pb2.Artifact, holder: str, owner: str) -> None:
        def record(connection: Connection) -> None:
            row = {"digest": artifact.digest, "size_bytes": artifact.size_bytes, "owner": owner, "stored_at": datetime.now(UTC)}
            connection.execute(insert(schema.artifacts).values(row).on_conflict_do_nothing())
            insert_holdings(connection, holder, [artifact.digest], owner)

        await self._database.write(record)


def _reasoned(error: BadUpload, reason: str) -> BadUpload:
    error.reason = reason
    return error


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _hash_of(path: Path) -> hashlib._Hash:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256")
