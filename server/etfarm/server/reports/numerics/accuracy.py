"""The accuracy of a device's outputs against the program before quantization and against the lowered, quantized graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from etfarm.wire import tensors
from etfarm.wire.errors import UserError
from etfarm.wire.sqnr import energies, has_same_infinity, sqnr_db
from etfarm.wire.tensors import Scalar, Value

LEAST_CLASSES = 3
"""Minimum number of classes; a smaller output is more likely a pair of numbers than class scores."""


class OutputsDoNotMatch(UserError):
    """Outputs that cannot be compared with the model's because their number or a shape differs."""

    reason = "OUTPUTS_DO_NOT_MATCH"


@dataclass(frozen=True)
class Difference:
    """The difference of one output from its reference, in float64.

    Numbers are None where they are undefined: for empty outputs, and for NaN or infinity that only one side has.
    """

    equal: bool
    """Whether all elements are equal; NaN equals NaN."""
    max_abs_error: float | None
    mean_abs_error: float | None
    cosine: float | None
    """Cosine similarity of the two as vectors, -1 to 1; None if one of them is all zero."""
    sqnr_db: float | None
    """Signal to quantization noise ratio in dB; see `etfarm.wire.sqnr`. None for integers and bools."""
    relative_error: float | None = None
    """Norm of the error over the norm of the reference; None if `sqnr_db` is None."""
    top1_agreement: float | None = None
    """Fraction of rows with the same top class; see the function `top1_agreement`."""
    nan_count: int | None = None
    reference_nan_count: int | None = None
    """Numbers of NaN in the output and in its reference; None if one of them is None."""
    equal_share: float | None = None
    """Fraction of equal elements, 0 to 1, of integers and bools, which are classes, indices or flags; None for floats."""


def pair(references: list[Value], outputs: list[Value]) -> list[tuple[Value, Value]]:
    """Return each reference with its output, by position.

    Raises:
        OutputsDoNotMatch: their numbers differ.
    """
    if len(references) != len(outputs):
        raise OutputsDoNotMatch(
            f"The program returned {len(outputs)} outputs, but the model returns {len(references)}.",
            outputs=len(outputs), expected=len(references),
        )  # fmt: skip
    return list(zip(references, outputs, strict=True))


def compare(name: str, reference: Value, output: Value) -> Difference:
    """Return the difference of `output` from `reference`. bool counts as 0 and 1.

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


@dataclass(frozen=True)
class Together:
    """The difference of one output from its reference over several samples."""

    difference: Difference
    """Over all elements of all samples."""
    samples: int
    sqnr_db_min: float | None
    sqnr_db_max: float | None
    """The lowest and the highest SQNR of a single sample in dB; None if no sample has one."""


def compare_samples(name: str, pairs: Sequence[tuple[Value, Value]]) -> Together:
    """Return the difference over all samples, given as pairs of a reference and an output; at least one.

    Raises:
        OutputsDoNotMatch: as `compare`, for any of them.
    """
    single = [compare(name, reference, output) for reference, output in pairs]
    levels = [each.sqnr_db for each in single if each.sqnr_db is not None]
    whole = single[0]
    if len(pairs) > 1 and not (isinstance(pairs[0][0], Scalar) and pairs[0][0].value is None):
        r, a = (np.concatenate([array_of(value).ravel() for value in values]) for values in zip(*pairs, strict=True))
        whole = replace(difference(r, a), top1_agreement=_mean_agreement(pairs, single))
    return Together(whole, len(pairs), min(levels, default=None), max(levels, default=None))


def _mean_agreement(pairs: Sequence[tuple[Value, Value]], single: Sequence[Difference]) -> float | None:
    """Return the fraction of all samples' rows whose largest element is at the same index; None if it is undefined for one."""
    rows = [shape_of(reference)[0] if len(shape_of(reference)) > 1 else 1 for reference, _ in pairs]
    agreements = [each.top1_agreement for each in single]
    known = [agreement for agreement in agreements if agreement is not None]
    return sum(share * count for share, count in zip(known, rows, strict=True)) / sum(rows) if len(known) == len(rows) else None


def array_of(value: Value) -> NDArray[np.generic]:
    """Return a value's elements, [shape] in its own dtype; a scalar has the shape [] and is bool, int64 or float64."""
    return np.asarray(value.value) if isinstance(value, Scalar) else tensors.to_array(value)


def dtype_of(value: Value) -> str | None:
    """Return torch's name of a value's dtype; None for None."""
    if isinstance(value, Scalar):
        return None if value.value is None else np.asarray(value.value).dtype.name
    return value.dtype


def shape_of(value: Value) -> tuple[int, ...]:
    """Return a value's shape; () for a scalar."""
    return () if isinstance(value, Scalar) else value.shape


def difference(reference: NDArray[np.generic], actual: NDArray[np.generic]) -> Difference:
    """Return the difference of two arrays of one shape and any real dtypes."""
    is_integer = reference.dtype.kind in "biu"
    exact = reference.dtype == actual.dtype and is_integer
    r, a = reference.astype(np.float64).ravel(), actual.astype(np.float64).ravel()
    # float64 cannot represent all int64 above 2^53, so integers are compared as integers.
    same = (reference == actual).ravel() if exact else (r == a) | (np.isnan(r) & np.isnan(a))
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.where(same, 0.0, np.abs(r - a))
        return Difference(
            equal=bool(same.all()),
            max_abs_error=_finite(errors.max()) if errors.size else None,
            mean_abs_error=_finite(errors.mean()) if errors.size else None,
            cosine=_cosine(r, a),
            sqnr_db=None if is_integer else sqnr_db(r, a),
            relative_error=None if is_integer else relative_error(r, a),
            top1_agreement=top1_agreement(reference, actual),
            nan_count=int(np.isnan(a).sum()),
            reference_nan_count=int(np.isnan(r).sum()),
            equal_share=float(same.mean()) if is_integer and same.size else None,
        )


def relative_error(reference: NDArray[np.float64], actual: NDArray[np.float64]) -> float | None:
    """Return the norm of the difference over that of the reference, both float64 of one shape; None as in `sqnr_db`."""
    sums = energies(reference, actual)
    return None if sums is None else math.sqrt(sums[1] / sums[0])


def top1_agreement(reference: NDArray[np.generic], actual: NDArray[np.generic]) -> float | None:
    """Return the fraction of rows, 0 to 1, whose largest element is at the same index.

    Defined for floating-point scores, [classes] or [N, classes] with at least LEAST_CLASSES classes; None otherwise. Of equal
    elements the first counts, and NaN is the largest.
    """
    few = reference.ndim not in (1, 2) or reference.shape[-1] < LEAST_CLASSES
    if few or reference.dtype.kind in "biu" or not reference.size:
        return None
    rows = [np.atleast_2d(array.astype(np.float64)).argmax(-1) for array in (reference, actual)]
    return float((rows[0] == rows[1]).mean())


def _cosine(r: NDArray[np.float64], a: NDArray[np.float64]) -> float | None:
    counts = ~has_same_infinity(r, a)
    r, a = r[counts], a[counts]
    if not (r.any() and a.any()):
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        r, a = r / np.abs(r).max(), a / np.abs(a).max()
        cosine = float(np.dot(r, a) / (np.linalg.norm(r) * np.linalg.norm(a)))
    return None if math.isnan(cosine) else max(-1.0, min(1.0, cosine))


def _finite(value: np.floating) -> float | None:
    return float(value) if np.isfinite(value) else None
