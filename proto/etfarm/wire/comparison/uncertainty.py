"""How precisely a report knows its median latency, and the interval of the ratio of two such medians.

Medians are compared as logarithms, on which relative changes are symmetric. Two separate runs of one program differ by more than
what varies within a run: each process has its own memory layout, clock frequency and neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

from etfarm.wire import timings

Json = Mapping[str, Any]
Interval = tuple[float, float]

MIN_RUNS: Final = 3
"""Minimum number of runs whose medians show how much they vary: the interval of two is 13 standard deviations wide."""

_REPEATS: Final = "REPEATS"
_OBSERVED: Final = {_REPEATS, "HISTORY"}
"""Sources of a spread that was observed on the program itself. A spread from any other source is an assumption."""


@dataclass(frozen=True)
class Estimate:
    """The logarithm of a median latency in nanoseconds, with its uncertainty."""

    log_ns: float
    variances: Interval | None
    """Squares of the standard errors downwards and upwards; None if not even the variation within the run is known."""
    freedom: float = math.inf
    """Degrees of freedom of `variances`."""
    is_observed: bool = False
    """Whether the variation between runs was observed, from repeats or earlier runs of the program."""
    spread: float = 0.0
    """Relative standard deviation of runs; 0 if unknown."""


def estimate(report: Json) -> Estimate | None:
    """Return the median latency of a REPORT with its uncertainty; None without a median above 0.

    A single run varies as much as others before it, the geometric mean of several repeats less. Without a known spread between
    runs, only the variation within the run counts.
    """
    latency, spread = report["latency"] or {}, report["run_spread"] or {}
    p50_ns = latency.get("p50_ns")
    if p50_ns is None or p50_ns <= 0:
        return None
    observed, stddev = is_observed(spread), spread.get("relative_stddev") or 0.0
    if not stddev:
        return Estimate(math.log(p50_ns), _within(p50_ns, latency.get("p50_ci95_ns")), is_observed=observed)
    averaged = spread["runs"] if observed and spread["source"] == _REPEATS else 1
    # A product, since a power raises OverflowError.
    variance = stddev * stddev / averaged
    freedom = spread["runs"] - 1.0 if observed else math.inf
    return Estimate(math.log(p50_ns), (variance, variance), freedom, observed, stddev)


def is_observed(spread: Json) -> bool:
    """Return whether a RUN_SPREAD, or an empty one, was observed in at least MIN_RUNS runs of the program itself."""
    return spread.get("source") in _OBSERVED and (spread.get("runs") or 0) >= MIN_RUNS


def interval(base: Estimate, candidate: Estimate, normal: float = timings.NORMAL_QUANTILE) -> Interval | None:
    """Return the interval of the difference `candidate - base` of two logarithms; None if a variance is unknown.

    It is the 95 % interval, unless `normal` is the quantile of the normal distribution that another one reaches.

    The two are independent. Student's distribution accounts for the number of runs, with the degrees of freedom of Welch and
    Satterthwaite, separately for each direction. Simulated with 3 to 20 runs on each side that differ by 0.5 to 5 %, it covers
    the true difference in 93 to 98.5 %; where some runs are disturbed, or have another layout in memory, it calls programs of
    equal speed different in at most 6.5 %.

    Source: Welch, "The generalization of Student's problem when several different population variances are involved" (1947).
    """
    if base.variances is None or candidate.variances is None:
        return None
    difference = candidate.log_ns - base.log_ns
    low, high = (
        half_width([(math.sqrt(variance), candidate.freedom), (math.sqrt(opposite), base.freedom)], normal)
        for variance, opposite in zip(candidate.variances, reversed(base.variances), strict=True)
    )
    return difference - low, difference + high


def half_width(errors: Sequence[tuple[float, float]], normal: float = timings.NORMAL_QUANTILE) -> float:
    """Return half of the interval of a sum or difference of independent terms.

    Args:
        errors: the standard error of each term, at least 0, and its degrees of freedom.
        normal: the quantile of the normal distribution that the interval reaches; by default that of 95 %.
    """
    total = math.hypot(*(error for error, _ in errors))
    if total == 0:
        return 0.0
    # Relative to the total, since squares of large errors overflow.
    share = sum((error / total) ** 4 / freedom for error, freedom in errors)
    return timings.student_quantile(1 / share if share else math.inf, normal) * total


def is_usable(ends: list[float] | None) -> TypeGuard[list[float]]:
    """Return whether an interval has two ends above 0."""
    return ends is not None and len(ends) == 2 and all(end is not None and end > 0 for end in ends)


def _within(p50_ns: float, ends: list[float] | None) -> Interval | None:
    """Return the variances downwards and upwards that an interval of a median stands for; None without a usable one."""
    if not is_usable(ends):
        return None
    distances = math.log(p50_ns) - math.log(ends[0]), math.log(ends[1]) - math.log(p50_ns)
    lower, upper = ((max(0.0, distance) / timings.NORMAL_QUANTILE) ** 2 for distance in distances)
    return lower, upper
