"""How much the artifact store takes, and from whom."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StoreLimits:
    """Bounds of uploads, downloads and holdings."""

    artifact_bytes: int = 16 << 30
    """Size of one artifact."""
    project_bytes: int | None = None
    """Artifacts of a project without a limit of its own; None for no bound."""
    agent_bytes: int = 20 << 30
    """Uploads of an agent's principal that no result has been taken for yet."""
    reserve_bytes: int = 256 << 20
    """Disk that uploads leave free, so that the journal can always write."""
    uploads: int = 1024
    """Streams of one holder at a time: an agent with 300 phones fits."""
    parts: int = 256
    """Unfinished uploads that are kept for one holder to resume; beyond it the oldest goes."""
    upload_idle_s: float = 60.0
    """How long a stream may be silent; what came is kept to go on from."""
    part_age_s: float = 24 * 3600.0
    """How long an unfinished upload is kept."""
    agent_holding_age_s: float = 7 * 24 * 3600.0
    """How long an agent's uploads are kept without a result that names them: agents keep results for a server that is away."""
    downloads: int = 64
    """Streams of one principal at a time; more wait their turn."""
    download_idle_s: float = 120.0
    """How long a download's receiver may take no byte."""
    threads: int = 4
    """For the bytes of uploads and downloads."""
    verifiers: int = 2
    """For reading stored artifacts again."""
