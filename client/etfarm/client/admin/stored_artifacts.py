"""The artifacts that a farm stores for the caller's projects, and the jobs that need them."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

import grpc

from etfarm.client.admin import artifacts
from etfarm.client.errors import from_rpc_error
from etfarm.client.models import Artifact, ArtifactUse
from etfarm.client.transport import decode
from etfarm.client.transport.paging import iterate_pages
from etfarm.client.transport.stubs import Stubs
from etfarm.v1 import artifact_pb2, common_pb2, job_pb2
from etfarm.wire import chunks

_PAGE = 500


class AsyncArtifacts:
    """The artifacts of the caller's projects."""

    def __init__(self, stubs: Stubs) -> None:
        """Wrap a connection's stubs; use `AsyncFarm.artifacts`."""
        self._stubs = stubs

    async def list(self, limit: int = 50) -> list[Artifact]:
        """Return the artifacts, newest first.

        Args:
            limit: maximum number of artifacts.
        """
        return [decode.artifact(row) async for row in artifacts.list_all(self._stubs, limit)]

    async def uses(self, jobs: int = 500) -> Mapping[str, Sequence[ArtifactUse]]:
        """Return which cells of the newest jobs have which artifacts, by digest.

        Caches, sessions and older jobs may need an artifact as well.

        Args:
            jobs: maximum number of jobs to read.
        """
        uses: dict[str, list[ArtifactUse]] = {}
        left = jobs
        request = job_pb2.ListJobsRequest(page_size=min(jobs, _PAGE))
        async for page in iterate_pages(self._stubs.jobs.List, request, server=self._stubs.server):
            for job in page.jobs[:left]:
                for use in _uses_of(job):
                    uses.setdefault(use.digest, []).append(use)
            left -= len(page.jobs)
            if left <= 0:
                break
        return uses

    async def read(self, digest: str) -> AsyncIterator[bytes]:
        """Yield the bytes of an artifact in order. The last ones come after the whole was verified.

        Args:
            digest: the sha256, or its first characters if they are unique.

        Raises:
            EtfarmError: ARTIFACT_NOT_FOUND, AMBIGUOUS_DIGEST, ARTIFACT_DAMAGED; DIGEST_MISMATCH; SERVER_UNREACHABLE.
        """
        artifact = await artifacts.find(self._stubs, digest)
        hasher = hashlib.sha256()
        waiting = b""
        try:
            async for chunk in self._stubs.artifacts.Download(artifact_pb2.DownloadArtifactRequest(digest=artifact.digest)):
                if waiting:
                    yield waiting
                waiting = chunk.data
                hasher.update(waiting)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, server=self._stubs.server) from None
        if hasher.hexdigest() != artifact.digest:
            raise chunks.corrupt_download(artifact)
        yield waiting


def _uses_of(job: job_pb2.Job) -> Iterator[ArtifactUse]:
    for cell in job.cells:
        label = decode.cell(cell).label
        for kind, artifact in _artifacts_of(cell):
            if artifact.digest:
                yield ArtifactUse(artifact.digest, job.id, job.name, label, kind)


def _artifacts_of(cell: job_pb2.Cell) -> Iterator[tuple[str, common_pb2.Artifact]]:
    yield "program", cell.program.pte
    for name, artifact in sorted(cell.program.data.items()):
        yield f"data file {name}", artifact
    yield "ETRecord", cell.etrecord
    yield "outputs", cell.outputs
