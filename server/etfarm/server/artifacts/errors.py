"""Errors of the artifact store."""

from __future__ import annotations

from etfarm.wire.errors import EtfarmError, FarmError, Kind, error_for


def artifact_not_found(digest: str) -> EtfarmError:
    """Return the error of a digest that the store does not hold, or that none of the caller's holders holds."""
    return error_for("ARTIFACT_NOT_FOUND", f"The store does not hold {digest[:12]}.", "Upload it again.", digest=digest)


def artifact_not_of_attempt(digest: str) -> EtfarmError:
    """Return the error of an artifact that no attempt on a device of the agent needs, as far as the farm knows."""
    return error_for(
        "ARTIFACT_NOT_OF_ATTEMPT",
        f"The farm gives {digest[:12]} to agents only while an attempt on their devices needs it, and no attempt does.",
        "Submit the job again if it failed because of this.",
        digest=digest,
    )  # fmt: skip


def artifact_missing(digest: str) -> EtfarmError:
    """Return the error of an artifact that a request names and the store does not hold."""
    return error_for("ARTIFACT_MISSING", f"Artifact {digest[:12]} is not stored.", "Upload it first.", digest=digest)


class ArtifactDamaged(FarmError):
    """A stored artifact whose bytes changed or vanished where they are stored."""

    reason = "ARTIFACT_DAMAGED"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, digest: str) -> None:
        super().__init__(
            f"Artifact {digest[:12]} is damaged where it is stored: its bytes are gone, or no longer match its sha256.",
            "Submit the job again: a new upload or compilation replaces it. Have the server's disk or S3 bucket checked.",
            digest=digest,
        )


def upload_idle(digest: str, idle_s: float, committed_bytes: int) -> EtfarmError:
    """Return the error of an upload whose stream sent nothing for too long."""
    return error_for(
        "UPLOAD_IDLE",
        f"The upload of {digest[:12]} sent nothing for {idle_s:g} s.", "Ask GetUploadStatus and continue there.",
        digest=digest, committed_bytes=committed_bytes,
    )  # fmt: skip


def upload_too_large(size_bytes: int, limit_bytes: int) -> EtfarmError:
    """Return the error of an artifact larger than the server accepts."""
    return error_for(
        "LIMIT_EXCEEDED",
        f"An artifact must have at most {limit_bytes} bytes, got {size_bytes}.",
        "Ask the farm's admin for a larger `etfarm serve --max-artifact-gib`.",
        limit_bytes=limit_bytes, size_bytes=size_bytes,
    )  # fmt: skip


def too_many_uploads(limit: int) -> EtfarmError:
    """Return the error of a holder with the maximum number of concurrent uploads."""
    return error_for(
        "LIMIT_EXCEEDED",
        f"A project may have at most {limit} uploads in progress.",
        "Wait until some of them finish.",
        limit=limit,
    )


def quota_exceeded(holder: str, limit_bytes: int, used_bytes: int, needed_bytes: int = 0) -> EtfarmError:
    """Return the error of a project or agent that would exceed its storage limit."""
    agent = holder.removeprefix("agent:") if holder.startswith("agent:") else ""
    what = f"The agent {agent!r}" if agent else f"The project {holder!r}"
    more = f" and needs {needed_bytes} more" if needed_bytes else ""
    remedy = (
        "Wait for running attempts: a result stops counting once the server has accepted it."
        if agent
        else "Ask the farm's admin for a larger storage limit of the project, or use another project."
    )
    return error_for(
        "QUOTA_EXCEEDED",
        f"{what} holds {used_bytes} bytes of artifacts{more}; its limit is {limit_bytes}.", remedy,
        limit_bytes=limit_bytes, used_bytes=used_bytes, needed_bytes=needed_bytes,
    )  # fmt: skip


class DiskFull(FarmError):
    """A disk without enough space for an upload."""

    reason = "DISK_FULL"
    kind = Kind.RESOURCE_EXHAUSTED
