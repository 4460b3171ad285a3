"""Limits of the artifact store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StoreLimits:
    """Bounds of uploads, downloads and holdings."""

    artifact_bytes: int = 16 << 30
    """Maximum size of one artifact."""
    project_bytes: int | None = None
    """Storage limit of a project that has none of its own; None for no limit."""
    agent_bytes: int = 20 << 30
    """Maximum size of an agent's uploads whose results the server has not taken yet."""
    reserve_bytes: int = 256 << 20
    """Disk space that uploads leave free, so that the journal can always write."""
    uploads: int = 1024
    """Maximum number of concurrent upload streams of one holder; enough for an agent with 300 phones."""
    parts: int = 256
    """Maximum number of unfinished uploads that are kept for one holder to resume; the oldest is deleted first."""
    upload_idle_s: float = 60.0
    """How long an upload may be silent before it is aborted; the received bytes are kept."""
    part_age_s: float = 24 * 3600.0
    """How long an unfinished upload is kept."""
    agent_holding_age_s: float = 7 * 24 * 3600.0
    """How long an agent's uploads are kept without a result: agents keep results while the server is away."""
    downloads: int = 64
    """Maximum number of concurrent downloads of one principal; further ones wait."""
    download_idle_s: float = 120.0
    """How long a download's receiver may read nothing before the download is aborted."""
    threads: int = 4
    """Number of threads that move the bytes of uploads and downloads."""
    verifiers: int = 2
    """Number of threads that verify stored artifacts."""
