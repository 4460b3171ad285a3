"""Limits of the artifact store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StoreLimits:
    """Limits of uploads, downloads and holdings."""

    artifact_bytes: int = 16 << 30
    """Maximum size of one artifact."""
    project_bytes: int | None = None
    """Storage limit of a project without a limit of its own; None for no limit."""
    agent_bytes: int = 20 << 30
    """Maximum size of an agent's uploads that belong to results which the server has not accepted yet."""
    idle_agent_bytes: int = 256 << 20
    """The same for an agent without an attempt, which has no results to upload."""
    reserve_bytes: int = 256 << 20
    """Disk space that uploads leave free, so that the journal can always be written."""
    work_bytes: int | None = None
    """Free disk space below which new work is refused; None for `reserve_bytes`."""
    uploads: int = 1024
    """Maximum number of concurrent upload streams of one holder; sufficient for an agent with 300 phones."""
    parts: int = 256
    """Maximum number of unfinished uploads kept for one holder to resume; the oldest is deleted first."""
    upload_idle_s: float = 60.0
    """Time without data after which an upload is aborted; the received bytes are kept."""
    part_age_s: float = 24 * 3600.0
    """Time for which an unfinished upload is kept."""
    agent_holding_age_s: float = 7 * 24 * 3600.0
    """Time for which an agent's uploads are kept without a result: agents keep results while the server is unreachable."""
    idle_agent_age_s: float = 3600.0
    """Time for which they are kept once the agent has no attempt."""
    downloads: int = 64
    """Maximum number of concurrent downloads of one principal; further ones wait."""
    download_idle_s: float = 120.0
    """Time without a read by the receiver after which a download is aborted."""
    threads: int = 4
    """Number of threads that transfer the bytes of uploads and downloads."""
    verifiers: int = 2
    """Number of threads that verify stored artifacts."""
    cache_bytes: int = 50 << 30
    """Size up to which copies of the artifacts of a bucket are kept on the server's disk."""

    @property
    def floor_bytes(self) -> int:
        """Free disk space below which such copies are deleted."""
        return 2 * (self.reserve_bytes if self.work_bytes is None else self.work_bytes)
