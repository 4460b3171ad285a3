"""Errors of copies of a farm."""

from __future__ import annotations

from etfarm.server.state.revisions import HEAD
from etfarm.wire.errors import EtfarmError, FarmError, Kind, error_for


class CopyDiffers(FarmError):
    """A copy that is not equal to what was copied."""

    reason = "COPY_DIFFERS"
    kind = Kind.DATA_LOSS


class RowRefused(FarmError):
    """A row that a database cannot store."""

    reason = "ROW_REFUSED"
    kind = Kind.FAILED_PRECONDITION


def other_version(database: object, revision: str | None) -> EtfarmError:
    """Return the error of a database of another version of etfarm than the one that is to copy it while its server runs."""
    what = f"has revision {revision}" if revision else "has no farm"
    return error_for(
        "OTHER_VERSION",
        f"The database {database} {what}, this etfarm copies revision {HEAD} only.",
        "Run the command with the version of etfarm that its server has.", database=database,
    )  # fmt: skip
