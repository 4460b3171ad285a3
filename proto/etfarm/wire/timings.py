"""Rules that both ends apply to the times of iterations: drift, and the samples that it and percentiles need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

MIN_FOR_DRIFT: Final = 30
"""Minimum number of samples of a drift: with fewer, a third has fewer than ten, and its median depends on single samples."""


class Samples(Protocol):
    """Times in the order in which they were measured: a list, an `array.array` or a numpy array."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, part: slice, /) -> Any:
        """Return consecutive samples."""
        ...


def has_percentile(percent: int, count: int) -> bool:
    """Return whether one of `count` samples is expected beyond a percentile: p10 and p90 need 10, p1 and p99 need 100."""
    return count * min(percent, 100 - percent) >= 100


def drift(samples: Samples, median: Callable[[Any], float]) -> float | None:
    """Return how far the median of the last third lies from that of the first: 0.1 is 10 % slower, -0.1 faster.

    None below `MIN_FOR_DRIFT` samples, and if the first third's median is 0. Single outliers do not move medians.

    Args:
        median: of consecutive samples, `statistics.median` or `numpy.median`.
    """
    if len(samples) < MIN_FOR_DRIFT:
        return None
    third = len(samples) // 3
    first, last = float(median(samples[:third])), float(median(samples[-third:]))
    return last / first - 1 if first > 0 else None
