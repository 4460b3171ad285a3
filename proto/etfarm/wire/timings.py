"""Statistics of iteration times that agents and server share: drift, and the number of samples that percentiles need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

MIN_FOR_DRIFT: Final = 30
"""Minimum number of samples for a drift: a third of fewer has less than ten samples, whose median depends on single ones."""


class Samples(Protocol):
    """Times in the order of measurement: a list, an `array.array` or a numpy array."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, part: slice, /) -> Any:
        """Return consecutive samples."""
        ...


def has_percentile(percent: int, count: int) -> bool:
    """Return whether `count` samples include one beyond a percentile on average: p10 and p90 need 10, p1 and p99 need 100."""
    return count * min(percent, 100 - percent) >= 100


def drift(samples: Samples, median: Callable[[Any], float]) -> float | None:
    """Return the change from the first third's median to the last third's, relative to the first: 0.1 is 10 % slower.

    None below `MIN_FOR_DRIFT` samples, and if the first third's median is 0. Medians are robust to single outliers.

    Args:
        median: function that returns the median of samples, `statistics.median` or `numpy.median`.
    """
    if len(samples) < MIN_FOR_DRIFT:
        return None
    third = len(samples) // 3
    first, last = float(median(samples[:third])), float(median(samples[-third:]))
    return last / first - 1 if first > 0 else None
