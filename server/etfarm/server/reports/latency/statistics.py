"""Statistics of a timed pass, computed from its samples in the order of measurement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from etfarm.server.reports.latency.thresholds import MIN_FOR_INTERVAL
from etfarm.wire import timings
from etfarm.wire.errors import error_for


@dataclass(frozen=True)
class Summary:
    """Statistics of durations; in the unit of the samples unless stated otherwise."""

    min: float
    p10: float | None
    p50: float
    p90: float | None
    p99: float | None
    mean: float
    stddev: float | None
    """Sample standard deviation (n - 1 in the denominator); None for a single sample."""
    p50_ci95: tuple[float, float] | None
    """95 % interval of the median; see `median_interval`."""
    drift: float | None
    """Relative change of the times over the pass; see the function `drift`."""
    effective_samples: float
    """Equivalent number of independent samples; see the function `effective_samples`."""


def read_samples(path: Path) -> NDArray[np.int64]:
    """Return the samples of a file: int64 [n], ns.

    Raises:
        BAD_SAMPLES: the file ends within a sample, or a sample is negative.
    """
    data = path.read_bytes()
    if len(data) % 8:
        raise error_for("BAD_SAMPLES", f"The samples have {len(data)} bytes, which is not a multiple of 8.", size_bytes=len(data))
    samples = np.frombuffer(data, dtype="<i8").astype(np.int64, copy=False)
    if samples.size and samples.min() < 0:
        raise error_for("BAD_SAMPLES", f"A sample is negative: {int(samples.min())} ns.", sample_ns=int(samples.min()))
    return samples


def split_runs(samples: NDArray[np.int64], runs: Sequence[int]) -> list[NDArray[np.int64]]:
    """Return the samples of each run.

    Args:
        samples: those of all runs in order, [n].
        runs: number of samples of each run.

    Raises:
        BAD_SAMPLES: a run has none, or the numbers do not add up to n.
    """
    if sum(runs) != samples.size or min(runs) < 1:
        raise error_for(
            "BAD_SAMPLES", f"The runs have {sum(runs)} of {samples.size} samples.", runs=sum(runs), samples=samples.size
        )
    return np.split(samples, np.cumsum(runs)[:-1])


def summarize(samples: NDArray[np.int64]) -> Summary | None:
    """Return statistics of `samples`, [n] in the order measured; None if n is 0. The result is deterministic.

    A percentile q lies at position (n - 1) q / 100 of the sorted samples, counted from 0, and is interpolated linearly
    between its two neighbours. It is None if less than one sample is expected beyond it (`timings.has_percentile`).

    Source: the percentile is definition 7 of Hyndman and Fan, "Sample Quantiles in Statistical Packages" (1996), numpy's default.
    """
    if samples.size == 0:
        return None
    ordered = np.sort(samples)
    p10, p50, p90, p99 = (float(value) for value in np.percentile(ordered, (10, 50, 90, 99)))
    count = ordered.size
    above = _above_median(samples, p50)
    return Summary(
        min=float(ordered[0]),
        p10=p10 if timings.has_percentile(10, count) else None,
        p50=p50,
        p90=p90 if timings.has_percentile(90, count) else None,
        p99=p99 if timings.has_percentile(99, count) else None,
        mean=float(ordered.mean(dtype=np.float64)),
        stddev=float(ordered.std(dtype=np.float64, ddof=1)) if count > 1 else None,
        p50_ci95=_interval(ordered, above),
        drift=drift(samples),
        effective_samples=count / _inefficiency(above),
    )


def median_interval(samples: NDArray[np.int64]) -> tuple[float, float] | None:
    """Return the 95 % interval of the median of the process that `samples`, [n] in order, are drawn from.

    None below 6 samples, and if they are worth fewer than 6 independent samples and the interval would exceed their range.

    Neighbouring samples are correlated (a clock frequency changes, a background load comes and goes), so n of them determine
    the median less precisely than n independent samples. A block bootstrap keeps neighbours together: a resample consists of
    blocks of consecutive samples, which wrap around the end of the series so that all samples are drawn equally often. The
    number of a resample's samples above the median varies, and its variance yields a pair of order statistics. No resample has
    to be drawn: blocks are independent, so the variance of their sum is that of one block times their number. Student's
    distribution accounts for a small number of blocks. On series of 100 to 2000 samples with autocorrelations of 0 to 0.6 it
    covers the true median in 90 to 97 % (an interval for independent samples: 65 % at 0.6).

    Source: Politis and Romano, "A circular block-resampling procedure for stationary data" (1992), which is the moving-block
    bootstrap of Künsch (1989) without its edges; from counts to order statistics: Woodruff, "Confidence intervals for medians
    and other position measures" (1952).
    """
    if samples.size == 0:
        return None
    return _interval(np.sort(samples), _above_median(samples, float(np.median(samples))))


def effective_samples(samples: NDArray[np.int64]) -> float:
    """Return the number of independent samples that determine the median as precisely as `samples`, [n] with n > 0; 1 to n.

    This is n over the integrated autocorrelation time of the indicator "above the median", which determines the median's
    error. An outlier of any size affects it no more than any other sample.

    Source: the initial monotone sequence estimator of Geyer, "Practical Markov Chain Monte Carlo" (1992), section 3.3.
    """
    return samples.size / _inefficiency(_above_median(samples, float(np.median(samples))))


def drift(samples: NDArray[np.int64]) -> float | None:
    """Return the drift of `samples`, [n] in the order measured; see `etfarm.wire.timings.drift`."""
    return timings.drift(samples, np.median)


def _above_median(samples: NDArray[np.int64] | NDArray[np.float64], median: float) -> NDArray[np.float64]:
    """Return 1 for samples above the median, 0 below and 1/2 at it, minus the mean of these values; [n]."""
    above: NDArray[np.float64] = np.where(samples > median, 1.0, np.where(samples < median, 0.0, 0.5))
    above -= above.mean()
    return above


def _autocovariance(series: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the autocovariance of a series with mean 0, [n] to [n]; divided by n at each lag, so it is positive definite."""
    size = series.size
    spectrum = np.fft.rfft(series, 1 << (2 * size - 1).bit_length())
    covariance: NDArray[np.float64] = np.fft.irfft((spectrum * spectrum.conj()).real)[:size] / size
    return covariance


def _inefficiency(series: NDArray[np.float64]) -> float:
    """Return the number of samples that are worth one independent sample, 1 to n, for a series with mean 0."""
    covariance = _autocovariance(series)
    if covariance[0] <= 0:
        return 1.0  # all samples are equal
    pairs = covariance[: covariance.size // 2 * 2].reshape(-1, 2).sum(axis=1)
    negative = np.flatnonzero(pairs <= 0)
    pairs = np.minimum.accumulate(pairs[: negative[0]] if negative.size else pairs)
    return float(np.clip(2 * pairs.sum() / covariance[0] - 1, 1, series.size))


def block_length(series: NDArray[np.float64]) -> int:
    """Return the block length for a block bootstrap of the mean of a series with mean 0, [n] with n > 1; 1 if independent.

    Source: Politis and White, "Automatic block-length selection for the dependent bootstrap" (2004), with the correction of
    Patton, Politis and White (2009): flat-top lag window, b = (2 G^2 / D)^(1/3) n^(1/3) for the circular bootstrap.
    """
    size = series.size
    covariance = _autocovariance(series)
    if covariance[0] <= 0:
        return 1
    longest = min(size, math.ceil(min(3 * math.sqrt(size), size / 3)))
    # The first lag after which a run of `run_length` correlations cannot be distinguished from 0.
    run_length = max(5, math.ceil(math.sqrt(math.log10(size))))
    limit = 2 * math.sqrt(math.log10(size) / size)
    most = min(size - 1, math.ceil(math.sqrt(size)) + run_length)
    significant = np.flatnonzero(np.abs(covariance[1 : most + 1] / covariance[0]) >= limit) + 1
    edges = np.concatenate(([0], significant, [most + run_length + 1]))
    lag = int(edges[np.flatnonzero(np.diff(edges) > run_length)[0]])
    if lag == 0:
        return 1
    lags = np.arange(1, min(2 * lag, size - 1) + 1)
    window = np.clip(2 * (1 - lags / (2 * lag)), 0, 1)
    weighted = window * covariance[lags]
    spread, density = 2 * float((lags * weighted).sum()), float(covariance[0] + 2 * weighted.sum())
    if density <= 0:
        return 1
    best = (2 * spread**2 / (4 / 3 * density**2)) ** (1 / 3) * size ** (1 / 3)
    return int(np.clip(math.ceil(best), 1, longest))


def resampling_block(samples: NDArray[np.int64] | NDArray[np.float64]) -> int:
    """Return the length of the blocks that keep neighbouring samples together when `samples`, [n] with n > 2, are resampled."""
    above = _above_median(samples, float(np.median(samples)))
    return _block(above, _inefficiency(above))


def _block(above: NDArray[np.float64], worth: float) -> int:
    # The optimal length is asymptotic: in short series it breaks up too much of the correlation.
    return min(max(block_length(above), math.ceil(3 * worth)), above.size // 3)


def _interval(ordered: NDArray[np.int64], above: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return `median_interval` for sorted samples.

    Args:
        ordered: [n], ascending.
        above: [n], `_above_median` of the samples as measured.
    """
    size = ordered.size
    if size < MIN_FOR_INTERVAL:
        return None
    worth = _inefficiency(above)
    length = _block(above, worth)
    blocks = size / length
    sums = np.concatenate(([0.0], np.cumsum(np.concatenate((above, above[: length - 1])))))
    half = timings.student_quantile(blocks - 1) * float(np.std(sums[length:] - sums[:-length])) * math.sqrt(blocks)
    if half > (size - 1) / 2 and size / worth < MIN_FOR_INTERVAL:
        return None
    # Round outwards to whole samples; the median lies between the ranks (n - 1) / 2 rounded down and up. As many independent
    # samples as these are worth would not reach further than their own extremes, and not to the slowest of all samples.
    extreme = math.floor(size / (size / worth + 1))
    low = max(extreme, math.floor((size - 1) / 2 - half))
    return float(ordered[low]), float(ordered[size - 1 - low])
