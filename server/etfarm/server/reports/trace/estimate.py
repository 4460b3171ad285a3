"""The estimator of a traced pass's times: one for the method and for all of its rows, with intervals.

A time is the mean over the typical iterations, those in the middle half by the method's time, between its quartiles. The first
execution after a load, or one that another process interrupted, would otherwise dominate the mean of a small model. All rows are
averaged over the same iterations, so unlike medians their times add up.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from etfarm.server.reports.latency import statistics
from etfarm.server.reports.latency.thresholds import MIN_FOR_INTERVAL
from etfarm.server.reports.trace.etdump import Times
from etfarm.wire import timings

RESAMPLES: Final = 500
"""Number of resamples: the standard error of an interval's width is then 3 %."""

_SEED: Final = 0
"""A constant, so that the same trace always has the same intervals."""


class Estimator:
    """The times of rows over the typical iterations, and the half widths of their 95 % intervals.

    The interval comes from a circular block bootstrap over the iterations: a resample consists of blocks of consecutive ones,
    since neighbouring iterations resemble each other, and its typical iterations are chosen anew. The standard deviation over the
    resamples times Student's quantile for the number of blocks is half the interval's width. It covers the variation within this
    pass, not that between processes.

    Args:
        method_ns: the time of the method in each iteration.
    """

    def __init__(self, method_ns: Times) -> None:
        size = method_ns.size
        self.typical = _typical(method_ns[None, :])[0]
        """Whether each iteration is typical."""
        self._weights: NDArray[np.float64] | None = None
        if size < MIN_FOR_INTERVAL:
            return
        length = statistics.resampling_block(method_ns)
        blocks = math.ceil(size / length)
        generator = np.random.Generator(np.random.PCG64(_SEED))
        starts = generator.integers(size, size=(RESAMPLES, blocks))
        drawn = ((starts[:, :, None] + np.arange(length)) % size).reshape(RESAMPLES, -1)[:, :size]
        weights = np.zeros((RESAMPLES, size))
        np.add.at(weights, (np.arange(RESAMPLES)[:, None], drawn), _typical(method_ns[drawn]))
        self._weights = weights / weights.sum(axis=1, keepdims=True)
        self._quantile = timings.student_quantile(max(1.0, size / length - 1))

    def mean(self, times_ns: Times) -> float:
        """Return the mean over the typical iterations, ns."""
        return float(times_ns[self.typical].mean())

    def half_width(self, times_ns: Times) -> float | None:
        """Return half the width of the 95 % interval of `mean`, ns; None below 6 iterations."""
        if self._weights is None:
            return None
        return self._quantile * float((self._weights @ times_ns).std())

    def rounding_error(self, times_ns: Times, resolution_ns: float) -> float:
        """Return by how much a clock that rounds may shift the mean, ns, beyond the half step by which it shifts every mean.

        Equal times may be anywhere within a step: half a step either way. Times that vary smoothly, so that the clock reads them
        as two values or more, average their rounding out, the better the more evenly they do.
        """
        counts = np.unique(times_ns[self.typical], return_counts=True)[1]
        return resolution_ns * max(0.0, float(counts.max() / counts.sum()) - 0.5)


def _typical(method_ns: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return whether each iteration is between the quartiles of its row; [rows, n] to [rows, n]."""
    low, high = np.percentile(method_ns, (25, 75), axis=1, keepdims=True, method="closest_observation")
    typical: NDArray[np.bool_] = (method_ns >= low) & (method_ns <= high)
    return typical
