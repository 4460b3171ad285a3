"""Whether a device has become slower than itself: its latest health runs against its own first ones. Pure.

Compared are medians of VALID health runs of one series: the same health program, runner, threads, cpus and governor. A new
runner or another governor begins a new series, and so does an admin who clears the device's health.

The baseline is the median of the first 14 runs, two weeks at one run a day, and the device's pace is the median of the last 7
that are not part of them: a device is judged from its 21st run on. The device is slower than itself if its pace exceeds the
baseline by more than the limit, and at least 5 of the 7 runs exceed it by more than half of the limit. The limit is 10 %, or 5
times the standard error of the comparison if the device's own first runs scatter more. It is no longer slower once the excess is
below half of the limit.

Why these numbers: an aged thermal paste, a weak power supply and a firmware with lower clocks cost 10 % and more. Single slow
runs, which something beside them has slowed down, come in any number, so it takes five of seven.

False alarms: in a simulation of devices whose runs scatter by 3 % (standard deviation), and of whose runs every 20th is slower by
another 5 to 30 %, 1 of 250 device years has one; at 8 % scatter it is 15 of 250, since 14 runs do not always show how much a
device scatters. A false alarm costs little: a suspect device is still used where no other matches. A slowdown by 15 % is detected
after 5 days by half of the devices that scatter by 3 %, after 6 by nine of ten; one by 20 % after 5 days by all.
`tests/unit/server/devices/health/test_health_baseline.py` repeats it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

BASELINE_RUNS: Final = 14
"""Number of runs, from the first one on, whose median is the baseline."""
RECENT_RUNS: Final = 7
"""Number of runs, up to the last one, whose median is the present pace."""
MIN_SLOW_RUNS: Final = 5
"""Number of these that must be slow by themselves."""
MIN_EXCESS: Final = 0.1
"""Minimum excess over the baseline that makes a device SUSPECT."""
ERRORS: Final = 5.0
"""The same in standard errors of the comparison, for a device whose runs scatter much."""

_MAD_TO_SIGMA: Final = 1.4826
"""Ratio of a normal distribution's standard deviation to its median absolute deviation."""
_MEDIAN_EFFICIENCY: Final = math.pi / 2
"""Ratio of the variance of a median to that of a mean, for many normally distributed values."""


@dataclass(frozen=True)
class Pace:
    """The median of one health run."""

    at: datetime
    p50_ns: float


@dataclass(frozen=True)
class Comparison:
    """A device's present pace against its baseline."""

    baseline_ns: float
    recent_ns: float
    limit: float
    """Fraction by which the pace may exceed the baseline."""
    slow_runs: int
    """Number of recent runs that exceed the baseline by more than half of the limit."""
    slow_since: datetime
    """When the last uninterrupted sequence of runs over half of the limit began; meaningful if the device is slower."""

    @property
    def excess(self) -> float:
        """The fraction by which the present pace exceeds the baseline."""
        return self.recent_ns / self.baseline_ns - 1

    def is_slower(self, *, was_slower: bool) -> bool:
        """Return whether the device is slower than itself.

        Args:
            was_slower: whether it already was, so that its state does not flap at the limit.
        """
        if was_slower:
            return self.excess > self.limit / 2
        return self.excess > self.limit and self.slow_runs >= MIN_SLOW_RUNS

    @property
    def reason(self) -> str:
        """A clause for people."""
        baseline, recent = _duration(self.baseline_ns), _duration(self.recent_ns)
        return f"slower than itself: {recent} against {baseline}, since {self.slow_since:%Y-%m-%d}"


def usual_ns(runs: Sequence[Pace]) -> float | None:
    """Return the baseline of a series in order; None as long as it has fewer than BASELINE_RUNS."""
    if len(runs) < BASELINE_RUNS:
        return None
    return statistics.median(run.p50_ns for run in runs[:BASELINE_RUNS])


def compare(runs: Sequence[Pace]) -> Comparison | None:
    """Return the comparison of a series in order, oldest first; None while there are too few runs."""
    baseline_ns = usual_ns(runs)
    if baseline_ns is None or baseline_ns <= 0 or len(runs) < BASELINE_RUNS + RECENT_RUNS:
        return None
    first = [run.p50_ns for run in runs[:BASELINE_RUNS]]
    recent_ns = statistics.median(run.p50_ns for run in runs[-RECENT_RUNS:])
    sigma = _MAD_TO_SIGMA * statistics.median(abs(value - baseline_ns) for value in first) / baseline_ns
    error = sigma * math.sqrt(_MEDIAN_EFFICIENCY * (1 / BASELINE_RUNS + 1 / RECENT_RUNS))
    limit = max(MIN_EXCESS, ERRORS * error)
    slow_ns = baseline_ns * (1 + limit / 2)
    slow_runs = sum(run.p50_ns > slow_ns for run in runs[-RECENT_RUNS:])
    slow_since = runs[-1].at
    for run in reversed(runs[BASELINE_RUNS:]):
        if run.p50_ns <= slow_ns:
            break
        slow_since = run.at
    return Comparison(baseline_ns, recent_ns, limit, slow_runs, slow_since)


def _duration(value_ns: float) -> str:
    """Return a duration with three digits and its unit, such as "41.2 us"."""
    for unit, size_ns in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if value_ns >= size_ns:
            return f"{value_ns / size_ns:.3g} {unit}"
    return f"{value_ns:.3g} ns"
