"""The positions of operator rows on the timeline of one iteration. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Place = tuple[float, float]
"""Start relative to the start of the method, and duration; ns."""


def within(inner: Place, outer: Place) -> bool:
    """Return whether `inner` neither starts before `outer` nor ends after it."""
    return inner[0] >= outer[0] and inner[0] + inner[1] <= outer[0] + outer[1]


def lay(kernels: Sequence[Place | None], delegate: Place | None, *, has_starts: bool) -> tuple[list[Place | None], bool]:
    """Return the positions of a delegate's kernels, and whether their starts are reconstructed.

    They are reconstructed if the backend reports no starts (`has_starts` is False) or impossible ones: a kernel that overlaps
    another or lies outside of the delegate. The kernels are then placed one after the other from the delegate's start, each
    shortened in proportion if, by rounding, they take longer together than the delegate.
    """
    known = [kernel for kernel in kernels if kernel is not None]
    if delegate is None or len(known) < len(kernels):
        return [None] * len(kernels), False
    disjoint = all(earlier[0] + earlier[1] <= later[0] for earlier, later in pairwise(known))
    if has_starts and disjoint and all(within(kernel, delegate) for kernel in known):
        return [*known], False
    total = sum(duration for _, duration in known)
    scale = min(1.0, delegate[1] / total) if total > 0 else 1.0
    places: list[Place | None] = []
    # Integer nanoseconds add up exactly.
    at, end = delegate[0], delegate[0] + delegate[1]
    for _, duration in known:
        length = float(int(min(duration * scale, end - at)))
        places.append((at, length))
        at += length
    return places, True
