"""The signal to quantization noise ratio: one definition and one rounding, for servers and for what users read.

numpy is imported only by the functions that take arrays.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EXACT_DB: Final = 300.0
"""Maximum SQNR, also that of an exact match; float64 itself resolves some 320 dB."""

QUANTIZED_DB: Final = 10.0
"""Minimum SQNR of a useful quantized program; good int8 has 20 to 45 dB."""

ROUNDING_ERROR: Final = 1e-6
"""Maximum absolute error that is always accepted: outputs that should cancel to 0 consist of rounding errors."""

FAR_FROM_QUANTIZED_GRAPH: Final = "FAR_FROM_QUANTIZED_GRAPH"
"""Code of the warning about a program whose outputs are far from those of its own quantized graph."""

PART_LOST: Final = "PART_LOST"
"""Code of the warning about parts of outputs that a quantized program loses."""


def decibels(value_db: float) -> str:
    """Return `41.2 dB`; a ratio that rounds to zero has no sign."""
    return f"{value_db:.1f} dB" if abs(value_db) >= 0.05 else "0.0 dB"


def level(value_db: float) -> str:
    """Return an SQNR, `exact` for an exact match."""
    return "exact" if value_db >= EXACT_DB else decibels(value_db)


def ratio_db(power: float, noise: float) -> float:
    """Return 10 log10(power / noise) in dB, at most EXACT_DB, which no noise has."""
    return EXACT_DB if noise == 0 else min(EXACT_DB, 10 * math.log10(power / noise))


def sqnr_db(
    reference: NDArray[np.float64], actual: NDArray[np.float64], signal: NDArray[np.float64] | None = None
) -> float | None:
    """Return the signal to quantization noise ratio, 10 log10(sum s^2 / sum (r - a)^2), in dB; at most EXACT_DB.

    All arrays are float64 of one shape. Elements that are NaN in both, or have the same infinity, are left out: of the rest,
    equal arrays have EXACT_DB. None if the rest has NaN or infinity, if its signal is all zero, and if nothing is left.

    Args:
        signal: the part of the reference that counts; all of it by default.

    Source: torchao.quantization.utils.compute_error computes the same with norms.
    """
    sums = energies(reference, actual, signal)
    return None if sums is None else ratio_db(*sums)


def energies(
    reference: NDArray[np.float64], actual: NDArray[np.float64], signal: NDArray[np.float64] | None = None
) -> tuple[float, float] | None:
    """Return the sums of the squares of the signal and of the difference, scaled alike; None if `sqnr_db` is None."""
    import numpy as np

    counts = ~has_same_infinity(reference, actual)
    signal = (reference if signal is None else signal)[counts]
    reference, actual = reference[counts], actual[counts]
    if not (np.isfinite(reference).all() and np.isfinite(actual).all() and signal.any()):
        return None
    if np.array_equal(reference, actual):
        return 1.0, 0.0
    # Scale first: squares of large float64 overflow, and those of small ones underflow.
    scale = float(np.abs(signal).max())
    with np.errstate(over="ignore", invalid="ignore"):
        power = float(np.square(signal / scale).sum())
        noise = float(np.square((reference - actual) / scale).sum())
    return (power, noise) if math.isfinite(power) and math.isfinite(noise) else None


def has_same_infinity(reference: NDArray[np.float64], actual: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return at which elements both are NaN, or the same infinity, as in masked logits: neither signal nor noise."""
    import numpy as np

    masked: NDArray[np.bool_] = (np.isinf(reference) & (reference == actual)) | (np.isnan(reference) & np.isnan(actual))
    return masked
