"""Operations on the artifacts that a farm stores: list, download, upload and verify."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc

from etfarm.client.errors import from_rpc_error
from etfarm.client.transport import transfers
from etfarm.client.transport.paging import iterate_rows
from etfarm.client.transport.stubs import Stubs
from etfarm.v1 import artifact_pb2, common_pb2
from etfarm.v1.artifact_pb2 import StoredArtifact
from etfarm.wire import chunks
from etfarm.wire.errors import error_for

_HEX = re.compile(r"[0-9a-f]{1,64}", re.ASCII)
_WHOLE = 64


async def list_all(stubs: Stubs, limit: int | None = None) -> AsyncIterator[StoredArtifact]:
    """Yield the artifacts that the caller's projects hold, newest first.

    Raises:
        EtfarmError: as ArtifactService.List says.
    """
    request = artifact_pb2.ListArtifactsRequest()
    async for row in iterate_rows(stubs.artifacts.List, request, "artifacts", server=stubs.server, limit=limit):
        yield row


async def find(stubs: Stubs, digest: str) -> common_pb2.Artifact:
    """Return the artifact with a digest, which may be shortened to its first characters.

    Raises:
        ARTIFACT_NOT_FOUND: no artifact matches.
        AMBIGUOUS_DIGEST: several artifacts match.
    """
    if not _HEX.fullmatch(digest):
        raise error_for(
            "ARTIFACT_NOT_FOUND",
            f"{digest[:80]!r} is not a digest.",
            "Give the hexadecimal digits that `etfarm artifacts list` shows.",
        )
    if len(digest) == _WHOLE:
        return common_pb2.Artifact(digest=digest)
    known = {row.artifact.digest: row.artifact async for row in list_all(stubs) if row.artifact.digest.startswith(digest)}
    if len(known) > 1:
        raise error_for("AMBIGUOUS_DIGEST", f"{len(known)} artifacts begin with {digest}.", "Give more of its digits.")
    if not known:
        raise error_for(
            "ARTIFACT_NOT_FOUND", f"No artifact begins with {digest}.", "`etfarm artifacts list` shows those of your projects."
        )
    return next(iter(known.values()))


async def get(stubs: Stubs, digest: str, path: Path) -> common_pb2.Artifact:
    """Download an artifact to `path` and verify it. Return the artifact.

    Raises:
        EtfarmError: as `find` and ArtifactService.Download say.
    """
    artifact = await find(stubs, digest)
    await transfers.download_file(stubs, artifact, path)
    return common_pb2.Artifact(digest=artifact.digest, size_bytes=path.stat().st_size)


async def put(stubs: Stubs, path: Path) -> tuple[common_pb2.Artifact, bool]:
    """Store a file for the caller's project. Return its artifact and whether its bytes had to be sent.

    Raises:
        EtfarmError: as ArtifactService.Upload says.
    """
    artifact = await chunks.artifact_of_file(path)
    request = artifact_pb2.FindMissingArtifactsRequest(digests=[artifact.digest])
    missing = (await stubs.artifacts.FindMissing(request)).missing
    await transfers.upload_missing(stubs, {artifact.digest: (artifact, path)})
    return artifact, bool(missing)


async def verify(
    stubs: Stubs, on_progress: Callable[[artifact_pb2.VerifyArtifactsProgress], None]
) -> tuple[artifact_pb2.VerifyArtifactsProgress, list[common_pb2.Artifact], list[str]]:
    """Have the server verify all that it stores. Return the last progress, the damaged artifacts and values. Admins only.

    Raises:
        EtfarmError: PERMISSION_DENIED.
    """
    damaged, values = list[common_pb2.Artifact](), list[str]()
    last = artifact_pb2.VerifyArtifactsProgress()
    try:
        async for last in stubs.artifacts.Verify(artifact_pb2.VerifyArtifactsRequest()):
            damaged += last.damaged
            values += last.damaged_values
            on_progress(last)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, server=stubs.server) from None
    return last, damaged, values
