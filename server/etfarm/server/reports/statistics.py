"""Step 9: the numbers of a timed pass, from its samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from etfarm.wire.errors import DeviceError, Kind

CONFIDENCE = 0.95
"""Of the median's interval."""


class BadSamples(DeviceError):
    """What a runner sent as samples is no list of durations."""

    reason = "BAD_SAMPLES"
    kind = Kind.INVALID_ARGUMENT


@dataclass(frozen=True)
class Summary:
    """Statistics of durations; all in the unit of the samples."""

    min: float
    p50: float
    p90: float
    p99: float
    mean: float
    stddev: float | None
    """Of the sample (n - 1 in the denominator); None for a single one."""
    p50_ci95: tuple[float, float] | None
    """See `median_interval`."""


def read_samples(path: Path) -> NDArray[np.int64]:
    """The samples of a file: int64 [n], ns.

    Raises:
        BadSamples: the file ends within a sample, or a sample is negative.
    """
    data = path.read_bytes()
    if len(data) % 8:
        raise BadSamples(f"The samples have {len(data)} bytes, no multiple of 8.", size_bytes=len(data))
    samples = np.frombuffer(data, dtype="<i8").astype(np.int64, copy=False)
    if samples.size and samples.min() < 0:
        raise BadSamples(f"A sample is negative: {int(samples.min())} ns.", sample_ns=int(samples.min()))
    return samples


def summarize(samples: NDArray[np.int64]) -> Summary | None:
    """Statistics of `samples`, [n] in any order; None where n is 0.

    A percentile q lies at position (n - 1) q / 100 of the sorted samples, counted from 0, and is interpolated linearly
    between its two neighbours.

    Source: the percentile is definition 7 of Hyndman and Fan, "Sample Quantiles in Statistical Packages" (1996), numpy's default.
    """
    if samples.size == 0:
        return None
    ordered = np.sort(samples)
    p50, p90, p99 = (float(value) for value in np.percentile(ordered, (50, 90, 99)))
    return Summary(
        min=float(ordered[0]),
        p50=p50,
        p90=p90,
        p99=p99,
        mean=float(ordered.mean(dtype=np.float64)),
        stddev=float(ordered.std(dtype=np.float64, ddof=1)) if ordered.size > 1 else None,
        p50_ci95=median_interval(ordered),
    )


def median_interval(ordered: NDArray[np.int64]) -> tuple[float, float] | None:
    """The narrowest symmetric pair of order statistics that covers the median with at least 95 %; None below 6 samples.

    The number of samples below the true median is Binomial(n, 1/2) whatever the distribution, so the pair of the l-th
    smallest and the l-th largest misses it with probability 2 P(B < l). Samples are taken as independent; on a device that
    drifts the true interval is wider.

    Args:
        ordered: [n], ascending.

    Source: David and Nagaraja, "Order Statistics" (3rd ed., 2003), section 7.1.
    """
    rank = _rank(ordered.size)
    return None if rank == 0 else (float(ordered[rank - 1]), float(ordered[-rank]))


def _rank(count: int) -> int:
    """The largest l with 2 P(Binomial(count, 1/2) < l) <= 0.05; 0 where there is none."""
    # Below ten standard deviations lies less than 1e-22: the sum may start there, which keeps a million samples cheap.
    start = max(0, math.floor(count / 2 - 5 * math.sqrt(count)))
    k = np.arange(start, count // 2 + 1)
    if k.size == 0:
        return 0
    first = math.lgamma(count + 1) - math.lgamma(start + 1) - math.lgamma(count - start + 1) - count * math.log(2)
    steps = np.log(count - k[:-1]) - np.log(k[:-1] + 1)
    below = np.cumsum(np.exp(first + np.concatenate(([0.0], np.cumsum(steps)))))
    # below[i] = P(B <= start + i), so l = start + i + 1 is allowed while below[i] is at most 0.025.
    allowed = int(np.searchsorted(below, (1 - CONFIDENCE) / 2 * (1 + 1e-12), side="right"))
    return start + allowed if allowed else 0
