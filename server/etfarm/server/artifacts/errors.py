"""Errors of the artifact store."""

from __future__ import annotations

from etfarm.wire.errors import EtfarmError, FarmError, Kind, error_for


def artifact_not_found(digest: str) -> EtfarmError:
    """Return the error of a digest that the store does not hold, or that none of the caller's holders holds."""
    return error_for("ARTIFACT_NOT_FOUND", f"The store does not hold {digest[:12]}.", "Upload it again.", digest=digest)


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
