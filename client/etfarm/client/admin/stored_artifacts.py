"""The artifacts that a farm stores for the caller's projects, and the jobs that need them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

import grpc

from etfarm.client.admin import artifacts
from etfarm.client.models import Artifact, ArtifactUse, Cell
from etfarm.client.transport.decode import decoded
from etfarm.client.transport.paging import PAGE_SIZE, iterate_rows
from etfarm.client.transport.stubs import Stubs
from etfarm.v1 import artifact_pb2, common_pb2, job_pb2
from etfarm.wire import chunks

_CONCURRENT = 8


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
        return [decoded(Artifact, row) async for row in artifacts.list_all(self._stubs, limit)]

    async def uses(self, jobs: int = 500) -> Mapping[str, Sequence[ArtifactUse]]:
        """Return which cells of the newest jobs have which artifacts, by digest.

        Caches, sessions and older jobs may need an artifact as well.

        Args:
            jobs: maximum number of jobs to read.
        """
        uses: dict[str, list[ArtifactUse]] = {}
        rows = iterate_rows(self._stubs.jobs.List, job_pb2.ListJobsRequest(), "jobs", server=self._stubs.server, limit=jobs)
        async for job in rows:
            for use in _uses_of(job):
                uses.setdefault(use.digest, []).append(use)
        return uses

    async def uses_of(self, digest: str, jobs: int = 500, submissions: int = 100) -> Sequence[ArtifactUse]:
        """Return what the newest jobs use one artifact for, those that were submitted with it first.

        Args:
            digest: the whole sha256.
            jobs: maximum number of jobs whose cells are read.
            submissions: maximum number of the newest of them whose submissions are read, with a call for each.
        """
        page = await self._stubs.jobs.List(job_pb2.ListJobsRequest(page_size=min(submissions, PAGE_SIZE)))
        places = asyncio.Semaphore(_CONCURRENT)

        async def of_submission(job_id: str) -> list[ArtifactUse]:
            async with places:
                job = await self._stubs.jobs.Get(job_pb2.GetJobRequest(job_id=job_id))
            return [use for use in _submitted_with(job) if use.digest == digest]

        submitted, by_digest = await asyncio.gather(
            asyncio.gather(*(of_submission(job.id) for job in page.jobs)), self.uses(jobs)
        )
        return [*(use for uses in submitted for use in uses), *by_digest.get(digest, ())]

    async def read(self, digest: str) -> AsyncIterator[bytes]:
        """Yield the bytes of an artifact in order. The last ones come after the whole was verified.

        Args:
            digest: the sha256, or its first characters if they are unique.

        Raises:
            EtfarmError: ARTIFACT_NOT_FOUND, AMBIGUOUS_DIGEST, ARTIFACT_DAMAGED; DIGEST_MISMATCH; SERVER_UNREACHABLE.
        """
        artifact = await artifacts.find(self._stubs, digest)
        hasher = hashlib.sha256()
        waiting, received = b"", 0
        backoff = self._stubs.patience.backoff()
        while True:
            request = artifact_pb2.DownloadArtifactRequest(digest=artifact.digest, offset=received)
            try:
                async for chunk in self._stubs.artifacts.Download(request):
                    backoff.reset()
                    if waiting:
                        yield waiting
                    waiting = chunk.data
                    received += len(waiting)
                    hasher.update(waiting)
                break
            except grpc.aio.AioRpcError as error:
                await backoff.after(error)
        if hasher.hexdigest() != artifact.digest:
            raise chunks.corrupt_download(artifact)
        yield waiting


def _submitted_with(job: job_pb2.Job) -> Iterator[ArtifactUse]:
    """Yield the artifacts that a job was submitted with, but for ready programs, which its cells have."""
    for candidate in job.spec.candidates:
        for method, source in sorted(candidate.model.methods.items()):
            named = candidate.name if method == "forward" else f"{candidate.name} · {method}"
            artifacts_of_source = [("model", source.exported_program), ("reference", source.reference)]
            artifacts_of_source += [("calibration", sample) for sample in (*source.calibration, *source.samples)]
            for kind, artifact in artifacts_of_source:
                yield ArtifactUse(artifact.digest, job.id, job.name, named, kind)
        for call in candidate.model.calls:
            if call.HasField("inputs"):
                yield ArtifactUse(call.inputs.digest, job.id, job.name, f"{candidate.name} · {call.method}", "inputs")
        for method, artifact in sorted(candidate.model.constant_methods.items()):
            yield ArtifactUse(artifact.digest, job.id, job.name, f"{candidate.name} · {method}", "constant")
    for method, artifact in sorted(job.spec.inputs.items()):
        yield ArtifactUse(artifact.digest, job.id, job.name, method, "inputs")
    for method, further in sorted(job.spec.further_inputs.items()):
        for artifact in further.samples:
            yield ArtifactUse(artifact.digest, job.id, job.name, method, "inputs")


def _uses_of(job: job_pb2.Job) -> Iterator[ArtifactUse]:
    for cell in job.cells:
        label = decoded(Cell, cell).label
        for kind, artifact in _artifacts_of(cell):
            if artifact.digest:
                yield ArtifactUse(artifact.digest, job.id, job.name, label, kind)


def _artifacts_of(cell: job_pb2.Cell) -> Iterator[tuple[str, common_pb2.Artifact]]:
    yield "program", cell.program.pte
    for name, artifact in sorted(cell.program.data.items()):
        yield f"data file {name}", artifact
    yield "ETRecord", cell.etrecord
    yield "outputs", cell.outputs
