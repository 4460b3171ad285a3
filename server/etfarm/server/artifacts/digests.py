"""Lists of digests: validation, and slices between which other tasks run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from etfarm.server.artifacts.errors import BadUpload
from etfarm.server.workers.pacing import Pace
from etfarm.wire import digest as digests

_SLICE = 20
"""Number of digests that are processed between two checks of the clock; each takes a system call."""


async def slices(wanted: Sequence[str]) -> AsyncIterator[Sequence[str]]:
    """Yield `wanted` in slices; between slices the event loop can run other tasks."""
    pace = Pace()
    for start in range(0, len(wanted), _SLICE):
        yield wanted[start : start + _SLICE]
        await pace.pause()


def require_digest(digest: str) -> None:
    """Raise an error if `digest` is not a digest.

    Raises:
        BadUpload: with the reason DIGEST_MALFORMED.
    """
    if not digests.is_digest(digest):
        error = BadUpload(f"A digest must be a sha256 in lower-case hex, got {digest!r}.")
        error.reason = "DIGEST_MALFORMED"
        raise error
