"""Errors of copies of a farm."""

from __future__ import annotations

from etfarm.server.state.revisions import HEAD
from etfarm.wire.errors import FarmError, Kind, UserError


class TargetNotEmpty(UserError):
    """A database or a bucket that already has something else than what is to be copied there."""

    reason = "TARGET_NOT_EMPTY"
    kind = Kind.FAILED_PRECONDITION


class CopyDiffers(FarmError):
    """A copy that is not equal to what was copied."""

    reason = "COPY_DIFFERS"
    kind = Kind.DATA_LOSS


class RowRefused(FarmError):
    """A row that a database cannot store."""

    reason = "ROW_REFUSED"
    kind = Kind.FAILED_PRECONDITION


class OtherVersion(UserError):
    """A database of another version of etfarm than the one that is to copy it while its server runs."""

    reason = "OTHER_VERSION"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, database: object, revision: str | None) -> None:
        what = f"has revision {revision}" if revision else "has no farm"
        super().__init__(
            f"The database {database} {what}, this etfarm copies revision {HEAD} only.",
            "Run the command with the version of etfarm that its server has.", database=database,
        )  # fmt: skip
