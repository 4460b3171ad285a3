"""Requests that create jobs, each of which creates a single one however often it is sent."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from etfarm.v1.job_pb2 import JobSpec, RetryJobRequest
from etfarm.wire.errors import EtfarmError, error_for

_SHOWN: Final = 80


def request_id_used(request_id: str, job: str) -> EtfarmError:
    """Return the error of a request_id that the owner has sent with something else before."""
    return error_for(
        "REQUEST_ID_USED",
        f"The request_id {request_id[:_SHOWN]!r} is that of another request, which created job {job}.",
        "Send another id with each new job, such as a UUID, and the same one only with the same request.", job=job,
    )  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A request of one owner."""

    id: str
    digest: bytes
    """What was sent, as far as the job depends on it."""
    spec: bytes | None = None
    """The spec of a request that names no project: the farm's members, and so its project, may change before it is repeated."""
    projects: frozenset[str] | None = None
    """The projects that its caller sees; None for all."""

    @classmethod
    def to_submit(
        cls,
        request_id: str,
        spec: JobSpec,
        project: str,
        *,
        names_project: bool = True,
        projects: frozenset[str] | None = None,
    ) -> Request:
        """Return the request for a job with a spec, as it was received."""
        body = spec.SerializeToString(deterministic=True)
        return cls(request_id, _of_submit(project, body), None if names_project else body, projects)

    @classmethod
    def to_retry(cls, request: RetryJobRequest) -> Request:
        """Return the request for the failed cells of a job."""
        return cls(request.request_id, _digest(b"retry", request.job_id.encode()))

    def has_created(self, digest: bytes, project: str) -> bool:
        """Return whether a job is this request's, by the digest of what created it, and its project."""
        if digest == self.digest:
            return True
        is_seen = self.projects is None or project in self.projects
        return self.spec is not None and is_seen and digest == _of_submit(project, self.spec)


def _of_submit(project: str, body: bytes) -> bytes:
    return _digest(b"submit", project.encode(), body)


def _digest(*parts: bytes) -> bytes:
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "big"))
        hasher.update(part)
    return hasher.digest()
