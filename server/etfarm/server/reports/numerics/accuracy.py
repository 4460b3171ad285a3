"""The accuracy of a device's outputs against the program before quantization, and the quantized graph that was lowered."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etfarm.wire import tensors
from etfarm.wire.errors import UserError
from etfarm.wire.tensors import Scalar, Value

REFERENCE = "program before quantization"
"""What `OutputAccuracy.reference` says: the exported program, run by torch on the host with the same inputs."""

QUANTIZED = "quantized program"
"""The same of the graph that was lowered, where something quantized it: what is left is the kernels' difference, not int8's."""

EXACT_DB = 300.0
"""Cap of the SQNR, which an exact match has: float64 itself resolves some 320 dB."""

LEAST_CLASSES = 3
"""An output of fewer is rather a pair of numbers than scores of classes."""


class OutputsDoNotMatch(UserError):
    """The program's outputs cannot be compared with the model's: another number of them, or another shape."""

    reason = "OUTPUTS_DO_NOT_MATCH"


@dataclass(frozen=True)
class Difference:
    """One output against its reference, computed in float64. None where a number does not exist (NaN, empty outputs)."""

    equal: bool
    """Whether all elements are equal; NaN equals NaN."""
    max_abs_error: float | None
    mean_abs_error: float | None
    cosine: float | None
    """Between the two as vectors, -1 to 1; None where one is all zero."""
    sqnr_db: float | None
    """See `sqnr_db`."""
    relative_error: float | None = None
    """The error's norm over the reference's; None as `sqnr_db` is."""
    top1_agreement: float | None = None
    """See `top1_agreement`."""
    nan_count: int | None = None
    reference_nan_count: int | None = None
    """Both are None where one side is None."""


def pair(references: list[Value], outputs: list[Value]) -> list[tuple[Value, Value]]:
    """Return each reference with its output, by position.

    Raises:
        OutputsDoNotMatch: their numbers differ.
    """
    if len(references) != len(outputs):
        raise OutputsDoNotMatch(
            f"The program gave {len(outputs)} outputs where the model gives {len(references)}.",
            outputs=len(outputs), expected=len(references),
        )  # fmt: skip
    return list(zip(references, outputs, strict=True))


def compare(name: str, reference: Value, output: Value) -> Difference:
    """Return how far `output` is from `reference`. bool counts as 0 and 1.

    Raises:
        OutputsDoNotMatch: their shapes differ, or one is None.
    """
    if (isinstance(reference, Scalar) and reference.value is None) or (isinstance(output, Scalar) and output.value is None):
        if reference == output or (
            isinstance(reference, Scalar) and isinstance(output, Scalar) and reference.value == output.value
        ):
            return Difference(True, None, None, None, None)
        raise OutputsDoNotMatch(f"Output {name!r} is None on one side only.", output=name)
    r, a = array_of(reference), array_of(output)
    if r.shape != a.shape:
        raise OutputsDoNotMatch(
            f"Output {name!r} has the shape {list(a.shape)} where the model gives {list(r.shape)}.",
            output=name, shape=list(a.shape), expected=list(r.shape),
        )  # fmt: skip
    return difference(r, a)


def array_of(value: Value) -> NDArray[np.generic]:
    """Return a value's elements: [shape] of its own dtype; a scalar is [] of bool, int64 or float64."""
    return np.asarray(value.value) if isinstance(value, Scalar) else tensors.to_array(value)


def dtype_of(value: Value) -> str | None:
    """Return a value's dtype by torch's name; None for None."""
    if isinstance(value, Scalar):
        return None if value.value is None else np.asarray(value.value).dtype.name
    return value.dtype


def shape_of(value: Value) -> tuple[int, ...]:
    """Return a value's shape; that of a scalar is ()."""
    return () if isinstance(value, Scalar) else value.shape


def difference(reference: NDArray[np.generic], actual: NDArray[np.generic]) -> Difference:
    """Return the numbers for two arrays of one shape and any real dtypes."""
    exact = reference.dtype == actual.dtype and reference.dtype.kind in "biu"
    r, a = reference.astype(np.float64).ravel(), actual.astype(np.float64).ravel()
    # int64 above 2^53 is no float64: equality is asked of the integers themselves.
    same = (reference == actual).ravel() if exact else (r == a) | (np.isnan(r) & np.isnan(a))
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.where(same, 0.0, np.abs(r - a))
        errors[np.isnan(r) | np.isnan(a)] = np.nan
        return Difference(
            equal=bool(same.all()),
            max_abs_error=_finite(errors.max()) if errors.size else None,
            mean_abs_error=_finite(errors.mean()) if errors.size else None,
            cosine=_cosine(r, a),
            sqnr_db=sqnr_db(r, a),
            relative_error=relative_error(r, a),
            top1_agreement=top1_agreement(reference, actual),
            nan_count=int(np.isnan(a).sum()),
            reference_nan_count=int(np.isnan(r).sum()),
        )


def sqnr_db(reference: NDArray[np.float64], actual: NDArray[np.float64]) -> float | None:
    """Return the signal to quantization noise ratio, 10 log10(sum r^2 / sum (r - a)^2), in dB; at most 300, as for equal ones.

    Both are float64 of one shape. None where either has a NaN, where the reference is all zero or has an infinity that the
    other does not share, and where there is nothing to compare.

    Source: torchao.quantization.utils.compute_error computes the same with norms.
    """
    energies = _energies(reference, actual)
    if energies is None:
        return None
    signal, noise = energies
    return EXACT_DB if noise == 0 else min(EXACT_DB, 10 * math.log10(signal / noise))


def relative_error(reference: NDArray[np.float64], actual: NDArray[np.float64]) -> float | None:
    """Return the difference's norm over the reference's, 0 if they are equal; None as `sqnr_db`. Both: float64, one shape."""
    energies = _energies(reference, actual)
    return None if energies is None else math.sqrt(energies[1] / energies[0])


def top1_agreement(reference: NDArray[np.generic], actual: NDArray[np.generic]) -> float | None:
    """Return the part of the rows whose largest element is at the same place, 0 to 1, for floating-point scores, [classes] or
    [N, classes] with LEAST_CLASSES or more; None for others. The first of equal elements counts, and NaN is the largest."""
    few = reference.ndim not in (1, 2) or reference.shape[-1] < LEAST_CLASSES
    if few or reference.dtype.kind in "biu" or not reference.size:
        return None
    rows = [np.atleast_2d(array.astype(np.float64)).argmax(-1) for array in (reference, actual)]
    return float((rows[0] == rows[1]).mean())


def _energies(reference: NDArray[np.float64], actual: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the sums of the squares of the reference and of the difference, scaled alike; None where `sqnr_db` is."""
    if np.isnan(reference).any() or np.isnan(actual).any() or not reference.any():
        return None
    if np.array_equal(reference, actual):
        return 1.0, 0.0
    # Scaled first, since squares of large float64 overflow and of small ones vanish.
    scale = float(np.abs(reference).max())
    with np.errstate(over="ignore", invalid="ignore"):
        signal = float(np.square(reference / scale).sum())
        noise = float(np.square((reference - actual) / scale).sum())
    return (signal, noise) if math.isfinite(signal) and math.isfinite(noise) else None


def _cosine(r: NDArray[np.float64], a: NDArray[np.float64]) -> float | None:
    if not (r.any() and a.any()):
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        r, a = r / np.abs(r).max(), a / np.abs(a).max()
        cosine = float(np.dot(r, a) / (np.linalg.norm(r) * np.linalg.norm(a)))
    return None if math.isnan(cosine) else max(-1.0, min(1.0, cosine))


def _finite(value: np.floating) -> float | None:
    return float(value) if np.isfinite(value) else None
