"""The deviation of a tensor from its reference: numbers, the ranges of both, and their histogram."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from etfarm.v1 import report_pb2
from etfarm.wire.sqnr import EXACT_DB, ratio_db

BINS: Final = 32

Array = NDArray[np.generic]


@dataclass(frozen=True)
class Deviation:
    """The deviation of `actual` from `expected` in float64, over the elements that are finite on both sides.

    Numbers are None if there are no such elements. If an element is NaN or infinite on one side only, `same_kind` is false.
    """

    snr_db: float | None
    """Signal to difference ratio, at most EXACT_DB; None if the expected values are all zero."""
    mse: float | None
    l1: float | None
    max_abs_error: float | None
    same_kind: bool
    """Whether both have the same NaNs and infinities at the same indices."""
    has_nan: bool

    @property
    def level_db(self) -> float:
        """The agreement as one number in dB: the SNR if it is defined.

        Otherwise EXACT_DB if there is no difference, and -EXACT_DB if only one side is NaN or infinite, or if values differ
        from an all-zero reference.
        """
        if not self.same_kind:
            return -EXACT_DB
        if self.snr_db is not None:
            return self.snr_db
        return -EXACT_DB if self.max_abs_error else EXACT_DB

    @property
    def rms_error(self) -> float:
        """The root mean square of the difference."""
        return math.sqrt(self.mse or 0.0)


def deviation(expected: Array, actual: Array) -> Deviation:
    """Return the deviation of `actual` from `expected`; both have one shape and any real dtypes."""
    e, a = expected.astype(np.float64).ravel(), actual.astype(np.float64).ravel()
    finite = np.isfinite(e) & np.isfinite(a)
    has_nan = bool(np.isnan(e).any() or np.isnan(a).any())
    if finite.all():
        same = True
    else:
        non_finite = ~finite
        same = bool(((e[non_finite] == a[non_finite]) | (np.isnan(e[non_finite]) & np.isnan(a[non_finite]))).all())
        e, a = e[finite], a[finite]
    if not e.size:
        return Deviation(None, None, None, None, same, has_nan)
    scale = float(np.abs(e).max())
    with np.errstate(over="ignore"):
        errors = np.abs(e - a)
        # Scale first: squares of large numbers overflow, and those of small ones underflow.
        noise = float(np.square(errors / scale).sum()) if scale else 0.0
        signal = float(np.square(e / scale).sum()) if scale else 0.0
        mse, l1, largest = float(np.square(errors).mean()), float(errors.sum()), float(errors.max())
    snr_db = None
    if scale and math.isfinite(noise):
        snr_db = ratio_db(signal, noise)
    return Deviation(snr_db, _finite(mse), _finite(l1), _finite(largest), same, has_nan)


def summary(values: Array, dtype: str) -> report_pb2.ValueSummary:
    """Return the range and the moments of a tensor's finite elements.

    Args:
        dtype: torch's name of the described dtype, which `values` may represent in another one.
    """
    v = values.astype(np.float64)
    finite = v[np.isfinite(v)]
    nan_count = int(np.isnan(v).sum())
    result = report_pb2.ValueSummary(
        dtype=dtype, shape=v.shape, nan_count=nan_count, infinite_count=v.size - finite.size - nan_count
    )
    if finite.size:
        with np.errstate(over="ignore", invalid="ignore"):
            numbers = {"min": finite.min(), "max": finite.max(), "mean": finite.mean(), "stddev": finite.std()}
        for name, number in numbers.items():
            if np.isfinite(number):
                setattr(result, name, float(number))
    return result


def histogram(expected: Array, actual: Array) -> report_pb2.ValueHistogram | None:
    """Return the histogram of both tensors' finite elements over the same bins; None if one has no finite elements."""
    e, a = (values.astype(np.float64).ravel() for values in (expected, actual))
    e, a = e[np.isfinite(e)], a[np.isfinite(a)]
    if not (e.size and a.size):
        return None
    low, high = float(min(e.min(), a.min())), float(max(e.max(), a.max()))
    # Equal bins need a width that float64 can distinguish from 0.
    if not high - low > 1e-9 * max(abs(low), abs(high)):
        around = max(0.5, abs(high) * 1e-3)
        low, high = low - around, high + around
    if not math.isfinite(high - low):
        return None
    counts = [np.histogram(values, BINS, (low, high))[0].tolist() for values in (e, a)]
    return report_pb2.ValueHistogram(low=low, high=high, expected=counts[0], actual=counts[1])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
