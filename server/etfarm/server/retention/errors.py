"""Errors of retention."""

from __future__ import annotations

from collections.abc import Sequence

from etfarm.wire.errors import Kind, UserError


class ArtifactInUse(UserError):
    """An artifact that something refers to, or that was used a short time ago."""

    reason = "ARTIFACT_IN_USE"
    kind = Kind.FAILED_PRECONDITION

    @classmethod
    def of_referrers(cls, digest: str, referrers: Sequence[str]) -> ArtifactInUse:
        """Return the error for an artifact that something refers to."""
        names = ", ".join(referrers)
        return cls(
            f"Artifact {digest[:12]} is used by {names}.",
            "Delete that first: `etfarm jobs delete`; cached results go with `etfarm retention`.", digest=digest, referrers=names,
        )  # fmt: skip

    @classmethod
    def of_lease(cls, digest: str, used_s: float, lease_s: float) -> ArtifactInUse:
        """Return the error for an artifact that was used `used_s` seconds ago."""
        return cls(
            f"Artifact {digest[:12]} was used {max(0, used_s) / 60:.0f} minutes ago; a job may be about to name it.",
            f"Try again {lease_s / 60:.0f} minutes after its last use, or use --force.", digest=digest,
        )  # fmt: skip
