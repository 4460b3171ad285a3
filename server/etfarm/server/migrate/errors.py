"""Errors of the move of a farm."""

from __future__ import annotations

from collections.abc import Sequence

from etfarm.wire.errors import EtfarmError, error_for


def artifacts_lost(lost: Sequence[str]) -> EtfarmError:
    """Return the error of artifacts of a farm that are missing or damaged where they are to be moved from."""
    names = ", ".join(digest[:12] for digest in lost[:5]) + (", ..." if len(lost) > 5 else "")
    return error_for(
        "ARTIFACTS_LOST",
        f"Missing or damaged in the farm: {len(lost)} of its artifacts ({names}). Everything else is copied.",
        "Put them back from a backup, or leave them behind with --skip-damaged; then run it again.",
        digests=",".join(lost[:100]),
    )  # fmt: skip


def move_failed(folder: object, why: str) -> EtfarmError:
    """Return the error of a move that ended because files of the data folder could not be read or written."""
    return error_for(
        "MOVE_FAILED",
        f"The farm of {folder} was not moved, since its files cannot be read or written: {why}.",
        "Correct that, for example free disk space, and run it again: it continues.",
        why=why,
    )  # fmt: skip
