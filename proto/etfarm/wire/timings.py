"""Statistics of iteration times that several roles share: drift, the number of samples that percentiles need, and quantiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

MIN_FOR_DRIFT: Final = 30
"""Minimum number of samples for a drift: a third of fewer has less than ten samples, whose median depends on single ones."""


NORMAL_QUANTILE: Final = 1.959964
"""The 97.5 % quantile of the normal distribution: half the width of a 95 % interval, in standard errors."""


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


def median(samples: Iterable[float]) -> float:
    """Return the median of samples, of which there is at least one.

    Not `statistics.median`: that module loads `decimal` and `fractions`, half a megabyte of an agent's memory.
    """
    ordered = sorted(samples)
    middle = len(ordered) // 2
    return float(ordered[middle]) if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def drift(samples: Samples, median: Callable[[Any], float]) -> float | None:
    """Return the change from the first third's median to the last third's, relative to the first: 0.1 is 10 % slower.

    None below `MIN_FOR_DRIFT` samples, and if the first third's median is 0. Medians are robust to single outliers.

    Args:
        median: function that returns the median of samples, such as `median` or `numpy.median`.
    """
    if len(samples) < MIN_FOR_DRIFT:
        return None
    third = len(samples) // 3
    first, last = float(median(samples[:third])), float(median(samples[-third:]))
    return last / first - 1 if first > 0 else None


def student_quantile(freedom: float, normal: float = NORMAL_QUANTILE) -> float:
    """Return a quantile of Student's distribution with `freedom` degrees, of which there is 1 at least.

    From 2 degrees on, the error is at most 1 % for the quantile of 97.5 %, and at most 5 % for that of 99.5 %.

    Args:
        normal: the same quantile of the normal distribution.

    Source: Abramowitz and Stegun, "Handbook of Mathematical Functions" (1964), 26.7.5.
    """
    z = normal
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
