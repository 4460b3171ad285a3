"""Errors of backups."""

from __future__ import annotations

from etfarm.wire.errors import FarmError, UserError


class BackupRefused(UserError):
    """A backup that cannot be made or used: a wrong folder, another program's files, or a newer etfarm's."""

    reason = "BACKUP_REFUSED"


class BackupDamaged(FarmError):
    """A backup whose files are missing or have other contents than its manifest says."""

    reason = "BACKUP_DAMAGED"
