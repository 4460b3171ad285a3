"""Whether a pass has two paces: a slower group of samples, as when something interrupts many of the iterations.

The median is that of the undisturbed program while less than half of the iterations are interrupted, and the mean over the middle
half, the time of operators, while less than a quarter are. Counters do not show every interruption: a hypervisor or a neighbour
on the same physical core leaves no trace but the times themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

MIN_SAMPLES: Final = 20
"""Minimum number of samples: the groups of fewer can be far apart by chance."""

MAX_POINTS: Final = 10_000
"""Maximum number of quantiles to split at; more samples than that are represented by as many quantiles."""

MIN_FAST: Final = 0.15
"""Minimum fraction of the faster group. A few fast samples are no pace of their own."""

MIN_FAST_SAMPLES: Final = 5
"""Minimum number of samples of the faster group, whose width a few samples do not show."""

MIN_SLOW: Final = 0.05
"""Minimum fraction of the slower group, well below what a verdict allows; fewer samples are outliers."""

MIN_RATIO: Final = 1.1
"""Minimum ratio of the groups' medians, the drift beyond which a pass has no single median."""

MIN_WIDTH: Final = 0.01
"""Minimum width of a group to assume, relative to its times. Equal times would be infinitely far from any others."""

COUNTER_STEP_NS: Final = 52.0
"""Step of a clock to assume, that of the counters of phones, at 19.2 MHz. Rounding splits the times of tiny programs."""

MAX_STEP_NS: Final = 1_000.0
"""Maximum step of a clock that is recognized in the samples: some boards count microseconds."""

_STEPS: Final = 2.0
"""Minimum width of a group to assume, in steps of the clock: equal durations are rounded to either of two neighbours."""

MIN_SEPARATION: Final = 2.0
"""Minimum distance of the slower group from the middle of the faster one, in widths of the latter. See `find`."""

_FEW: Final = 2.0
"""Part of MIN_SEPARATION that is added for a faster group of k samples, times 1 / sqrt(k): few samples are close by chance."""

_TRIM: Final = 0.1
"""Part of a group on either side that does not count for its width or its beginning."""


@dataclass(frozen=True)
class SlowGroup:
    """The slower of two groups of samples."""

    share: float
    """Its fraction of all samples, 0 to 1."""
    ratio: float
    """Its median relative to that of the faster group."""


def find(samples: NDArray[np.int64] | NDArray[np.float64], processes: Sequence[int] = ()) -> SlowGroup | None:
    """Return the slower of two groups that `samples`, [n] in the order measured, consist of; None if they are one group.

    The samples are split where the groups are farthest apart: the distance is that from the faster group's median to the slower
    group's 10 % quantile, and the unit is the width of the faster group without 10 % on either side, all of it in logarithms. It
    is at most 1.5 for any split of a uniform, normal or exponential distribution of logarithms. Only the faster group's width
    counts, since an interruption may take any time.

    The first eighth of each process is left out. A pace that changes once is a drift, and a pass that drifts is continued until
    the change is within its first eighth (etfarm.device_agents.attempts.drift).

    Args:
        samples: durations in nanoseconds.
        processes: the number of samples of each process, in order, if there were several. Processes of one program may have
            different paces of their own, so each is taken relative to a quantile within its faster group.
    """
    logarithms = np.log(np.maximum(samples, 1).astype(np.float64))
    parts = [part[part.size // 8 :] for part in _split(logarithms, processes)]
    kept = [part - np.quantile(part, MIN_FAST / 2) for part in parts] if len(parts) > 1 else parts
    ordered = np.sort(np.concatenate(kept))
    if ordered.size > MAX_POINTS:
        ordered = ordered[np.linspace(0, ordered.size - 1, MAX_POINTS).astype(np.int64)]
    size = ordered.size
    if size < MIN_SAMPLES:
        return None
    fewest = max(MIN_FAST_SAMPLES, math.ceil(MIN_FAST * size))
    splits = np.arange(fewest, size - max(1, math.ceil(MIN_SLOW * size)) + 1)
    if not splits.size:
        return None
    last = size - 1
    fast_middle = ordered[(splits - 1) // 2]
    width = ordered[_at(0, splits - 1, 1 - _TRIM)] - ordered[_at(0, splits - 1, _TRIM)]
    slow_begin, slow_middle = ordered[_at(splits, last, _TRIM)], ordered[(splits + last) // 2]
    typical_ns = math.exp(float(np.median(np.concatenate(parts))))
    width += max(MIN_WIDTH, _STEPS * _find_step(samples) / typical_ns)
    distance = (slow_begin - fast_middle) / width
    apart = (distance >= MIN_SEPARATION * (1 + _FEW / np.sqrt(splits))) & (slow_middle - fast_middle >= math.log(MIN_RATIO))
    if not apart.any():
        return None
    best = int(np.argmax(np.where(apart, distance, 0.0)))
    # The best split leaves a part of the faster group out, since a narrower one is farther away.
    boundary = (slow_begin[best] + ordered[splits[best] - 1]) / 2
    share = float((ordered > boundary).mean())
    return SlowGroup(share, math.exp(float(slow_middle[best] - fast_middle[best])))


def _find_step(samples: NDArray[np.int64] | NDArray[np.float64]) -> float:
    """Return the step of the clock in nanoseconds, which is the least gap between samples; at least COUNTER_STEP_NS.

    Both ends of a duration are rounded to nanoseconds, so durations of equally many steps differ by up to 2 ns.
    """
    gaps = np.diff(np.unique(samples))
    gaps = gaps[gaps > 2]
    return min(MAX_STEP_NS, max(COUNTER_STEP_NS, float(gaps.min()))) if gaps.size else COUNTER_STEP_NS


def _split(logarithms: NDArray[np.float64], processes: Sequence[int]) -> list[NDArray[np.float64]]:
    if len(processes) < 2:
        return [logarithms]
    return [part for part in np.split(logarithms, np.cumsum(processes)[:-1]) if part.size]


def _at(first: NDArray[np.int64] | int, last: NDArray[np.int64] | int, part: float) -> NDArray[np.int64]:
    """Return the index at a part of the way from the first to the last index of each group, rounded."""
    index: NDArray[np.int64] = np.rint(first + (np.asarray(last) - first) * part).astype(np.int64)
    return index
