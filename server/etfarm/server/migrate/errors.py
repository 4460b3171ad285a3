"""Errors of the move of a farm."""

from __future__ import annotations

from collections.abc import Sequence

from etfarm.wire.errors import FarmError, Kind, UserError


class NothingToMove(UserError):
    """A move from a place without a farm, or to the place where it is."""

    reason = "NOTHING_TO_MOVE"


class ArtifactsLost(FarmError):
    """Artifacts of a farm that are missing or damaged where they are to be moved from."""

    reason = "ARTIFACTS_LOST"
    kind = Kind.DATA_LOSS

    def __init__(self, lost: Sequence[str]) -> None:
        names = ", ".join(digest[:12] for digest in lost[:5]) + (", ..." if len(lost) > 5 else "")
        super().__init__(
            f"Missing or damaged in the farm: {len(lost)} of its artifacts ({names}). Everything else is copied.",
            "Put them back from a backup, or leave them behind with --skip-damaged; then run it again.",
            digests=",".join(lost[:100]),
        )  # fmt: skip


class MoveFailed(FarmError):
    """A move that ended because files of the data folder could not be read or written, such as for lack of space."""

    reason = "MOVE_FAILED"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, folder: object, why: str) -> None:
        super().__init__(
            f"The farm of {folder} was not moved, since its files cannot be read or written: {why}.",
            "Correct that, for example free disk space, and run it again: it continues.",
            why=why,
        )  # fmt: skip
