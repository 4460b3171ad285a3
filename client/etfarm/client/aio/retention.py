"""The part of `AsyncFarm` that deletes jobs and artifacts."""

from __future__ import annotations

from collections.abc import Sequence

from etfarm.client.aio.connected import AsyncConnected
from etfarm.client.models import Collected, RetentionResult
from etfarm.client.transport.decode import decoded
from etfarm.v1 import artifact_pb2, farm_pb2, job_pb2


class AsyncRetention(AsyncConnected):
    """Deletion of what a farm stores."""

    async def delete_job(self, job_id: str, *, force: bool = False) -> str:
        """Delete a terminal job with its log and reports, which leave the history as well. Return its id.

        Files that only the job needed stay until `collect`, or the server's retention, deletes them.

        Args:
            job_id: an id, a tag, or a unique prefix of an id or name.
            force: whether to delete a job with tags, and the tags.

        Raises:
            EtfarmError: JOB_NOT_FOUND; JOB_LIVE; JOB_TAGGED; NOT_YOURS.
        """
        answer = await self._open.jobs.Delete(job_pb2.DeleteJobRequest(job_id=job_id, force=force))
        return answer.job_id

    async def delete_artifact(self, digest: str, *, force: bool = False) -> None:
        """Delete an artifact that nothing refers to. Admins only.

        Args:
            digest: the whole sha256.
            force: whether to delete it even if it was used within the last hour.

        Raises:
            EtfarmError: ARTIFACT_NOT_FOUND; ARTIFACT_IN_USE; BACKUP_RUNNING; PERMISSION_DENIED.
        """
        await self._open.artifacts.Delete(artifact_pb2.DeleteArtifactRequest(digest=digest, force=force))

    async def collect(self, keep_bytes: int | None = None, *, dry_run: bool = False) -> Collected:
        """Delete artifacts that nothing refers to and that nobody used within the last hour. Admins only.

        Args:
            keep_bytes: total size of the artifacts to keep, the most recently used ones; only what is referred to when None.
            dry_run: only count.

        Raises:
            EtfarmError: BACKUP_RUNNING; PERMISSION_DENIED.
        """
        request = artifact_pb2.CollectArtifactsRequest(keep_bytes=keep_bytes, dry_run=dry_run)
        return decoded(Collected, await self._open.artifacts.Collect(request))

    async def apply_retention(self, keep: Sequence[str] = (), *, dry_run: bool = False) -> list[RetentionResult]:
        """Delete what the server's limits no longer keep, which it does every hour by itself. Admins only.

        Args:
            keep: limits in place of the server's own, such as `jobs=90d` and `artifacts=200GiB`.
            dry_run: only count.

        Raises:
            EtfarmError: BAD_RETENTION; BACKUP_RUNNING; PERMISSION_DENIED.
        """
        request = farm_pb2.ApplyRetentionRequest(keep=keep, dry_run=dry_run)
        answer = await self._open.farm.ApplyRetention(request)
        return [decoded(RetentionResult, row) for row in answer.results]
