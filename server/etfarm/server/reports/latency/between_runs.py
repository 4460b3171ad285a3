"""How much medians of separate runs of a program vary, and the interval that this leaves for its median."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from etfarm.wire import timings
from etfarm.wire.comparison.uncertainty import MIN_RUNS

MAX_HISTORY: Final = 50
"""Maximum number of earlier medians, the newest ones: older ones describe another state of the device."""
MIN_PRIOR_FREEDOM: Final = 4
"""Minimum number of degrees of freedom of a spread that is pooled over other programs."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Earlier:
    """Medians of earlier valid reports, in nanoseconds."""

    history: tuple[float, ...] = ()
    """Those of the same execution, newest first, at most MAX_HISTORY."""
    similar: tuple[tuple[float, ...], ...] = ()
    """Those of other executions with a similar duration on devices of the same kind, grouped by execution."""


@dataclass(frozen=True)
class Median:
    """The median of one run with its interval within the run."""

    p50_ns: float
    ci95_ns: Interval | None = None

    @property
    def error(self) -> float:
        """The standard error of the logarithm of the median within the run; 0 if it is unknown."""
        if self.ci95_ns is None or self.ci95_ns[0] <= 0:
            return 0.0
        return math.log(self.ci95_ns[1] / self.ci95_ns[0]) / (2 * timings.NORMAL_QUANTILE)


@dataclass(frozen=True)
class Spread:
    """The standard deviation of the logarithms of medians of separate runs."""

    stddev: float
    runs: int
    """Number of runs that it was estimated from; 0 if it is an assumption."""
    freedom: float
    """Its degrees of freedom."""


def middle(medians: Sequence[Median]) -> float:
    """Return the median time of a program from the medians of its runs, of which there is at least one: their geometric mean.

    Each run counts once, however many samples it has. The mean of a few runs varies less than their median, by a quarter for
    five, and has an exact interval.
    """
    if any(median.p50_ns <= 0 for median in medians):
        return 0.0
    return math.exp(statistics.fmean(math.log(median.p50_ns) for median in medians))


def spread_of(medians_ns: Sequence[float], error: float = 0.0) -> Spread | None:
    """Return the spread of the medians of a program's runs; None below MIN_RUNS.

    Args:
        medians_ns: medians of separate runs, above 0.
        error: the standard error of a median within its run, as `Median.error`. The spread is at least that: a few runs may
            agree better than their samples allow.
    """
    if len(medians_ns) < MIN_RUNS:
        return None
    stddev = statistics.stdev(math.log(median) for median in medians_ns)
    return Spread(max(stddev, error), len(medians_ns), len(medians_ns) - 1)


def pooled(groups: Sequence[Sequence[float]], p50_ns: float, error: float = 0.0) -> Spread:
    """Return the spread to assume for a program with a median of `p50_ns`, from the runs of others; a constant without them."""
    known = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in known)
    if freedom < MIN_PRIOR_FREEDOM:
        return Spread(max(typical(p50_ns), error), 0, math.inf)
    squares = sum((len(group) - 1) * statistics.variance(map(math.log, group)) for group in known)
    return Spread(max(math.sqrt(squares / freedom), error), sum(map(len, known)), freedom)


def typical(p50_ns: float) -> float:
    """Return the spread to assume without any measurement: 5 % below a millisecond, else 3 %.

    An order of magnitude, not an estimate. The order of linking and the size of the environment alone, which move code and data
    in memory, change run times by several percent: Mytkowicz et al., "Producing wrong data without doing anything obviously
    wrong!" (2009). Short programs depend more on single cache sets and on the scheduler.
    """
    return 0.05 if p50_ns < 1e6 else 0.03


def interval(p50_ns: float, spread: Spread, averaged: int) -> Interval:
    """Return the 95 % interval of a median that is the geometric mean of `averaged` runs.

    It is Student's interval for the mean of logarithms: the medians' spread contains both the variation between and, as each
    median has its own error, within runs. With three runs it is five times as wide as the standard deviation. It covers the
    median of simulated runs that differ by 0 to 5 % in 94 to 100 % of cases. A bootstrap that resamples runs, and samples within
    them, covers it in only 75 % with 3 runs that differ by 5 %, 84 % with 5 and 90 % with 10: so few runs do not show the tails.
    """
    reach = timings.student_quantile(spread.freedom) * spread.stddev / math.sqrt(averaged)
    return p50_ns * math.exp(-reach), p50_ns * math.exp(reach)


def within(p50_ns: float, medians: Sequence[Median]) -> Interval | None:
    """Return the interval of the middle of medians that covers only the variation within runs; None if one has no interval."""
    if any(median.ci95_ns is None for median in medians):
        return None
    if len(medians) == 1:
        return medians[0].ci95_ns
    reach = timings.NORMAL_QUANTILE * math.sqrt(sum(median.error**2 for median in medians)) / len(medians)
    return p50_ns * math.exp(-reach), p50_ns * math.exp(reach)


def mean_error(medians: Sequence[Median]) -> float:
    """Return the root mean square of the medians' errors within runs."""
    return math.sqrt(statistics.fmean(median.error**2 for median in medians))
