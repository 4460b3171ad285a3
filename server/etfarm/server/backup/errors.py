"""Errors of backups."""

from __future__ import annotations

from etfarm.wire.errors import FarmError


class BackupDamaged(FarmError):
    """A backup whose files are missing or have other contents than its manifest says."""

    reason = "BACKUP_DAMAGED"
