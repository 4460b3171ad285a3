"""The places of operator rows within one iteration. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Place = tuple[float, float]
"""The start since the method began, and the duration; ns."""


def within(inner: Place, outer: Place) -> bool:
    """Return whether `inner` neither begins before `outer` nor ends behind it."""
    return inner[0] >= outer[0] and inner[0] + inner[1] <= outer[0] + outer[1]


def lay(kernels: Sequence[Place | None], delegate: Place | None, *, has_starts: bool) -> tuple[list[Place | None], bool]:
    """Return where a delegate's kernels lie in it, and whether their starts are made up.

    They are made up if the backend reports no starts (`has_starts` is False) or impossible ones: a kernel within another, or
    outside of the delegate. The kernels then lie one after the other from the delegate's beginning, each shortened in
    proportion if by rounding they are longer than it together.
    """
    known = [kernel for kernel in kernels if kernel is not None]
    if delegate is None or len(known) < len(kernels):
        return [None] * len(kernels), False
    apart = all(one[0] + one[1] <= other[0] for one, other in pairwise(known))
    if has_starts and apart and all(within(kernel, delegate) for kernel in known):
        return [*known], False
    total = sum(took for _, took in known)
    scale = min(1.0, delegate[1] / total) if total > 0 else 1.0
    found: list[Place | None] = []
    # Whole nanoseconds, which add up exactly.
    at, end = delegate[0], delegate[0] + delegate[1]
    for _, took in known:
        length = float(int(min(took * scale, end - at)))
        found.append((at, length))
        at += length
    return found, True
