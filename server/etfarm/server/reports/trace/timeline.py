"""Step 9: where rows lie within one iteration. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Place = tuple[float, float]
"""When something began, since the method did, and how long it took; ns."""


def within(inner: Place, outer: Place) -> bool:
    """Whether `inner` neither begins before `outer` nor ends behind it."""
    return inner[0] >= outer[0] and inner[0] + inner[1] <= outer[0] + outer[1]


def lay(kernels: Sequence[Place | None], delegate: Place | None, *, told: bool) -> tuple[list[Place | None], bool]:
    """Where a delegate's kernels lie in it, and whether their starts are made up.

    They are where the backend told no starts (`told` is False) or told some that cannot be: one kernel within another, or outside
    of the delegate. The kernels then lie one behind the other from the delegate's beginning, and where by rounding they are
    longer than it together, each is shorter in proportion.
    """
    known = [kernel for kernel in kernels if kernel is not None]
    if delegate is None or len(known) < len(kernels):
        return [None] * len(kernels), False
    apart = all(one[0] + one[1] <= other[0] for one, other in pairwise(known))
    if told and apart and all(within(kernel, delegate) for kernel in known):
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
