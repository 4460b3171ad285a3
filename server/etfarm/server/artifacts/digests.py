"""Lists of digests: validation, and slices between which other tasks run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final

from etfarm.server.workers.pacing import Pace
from etfarm.wire import digest as digests
from etfarm.wire.errors import error_for

SLICE: Final = 20
"""Number of digests that are checked between two looks at the clock."""


async def slices(wanted: Sequence[str], size: int = SLICE) -> AsyncIterator[Sequence[str]]:
    """Yield `wanted` in slices; between slices the event loop can run other tasks."""
    pace = Pace()
    for start in range(0, len(wanted), size):
        yield wanted[start : start + size]
        await pace.pause()


def require_digest(digest: str) -> None:
    """Raise an error if `digest` is not a digest.

    Raises:
        DIGEST_MALFORMED: it is none.
    """
    if not digests.is_digest(digest):
        raise error_for("DIGEST_MALFORMED", f"A digest must be a sha256 in lower-case hex, got {digest!r}.")
