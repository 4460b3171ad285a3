"""Differences of a program's outputs from eager PyTorch's, and which of them count: pure functions of values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, TypedDict

import numpy as np
from numpy.typing import NDArray

from etfarm.wire import rounding, tensors
from etfarm.wire.sqnr import QUANTIZED_DB, ROUNDING_ERROR, decibels, sqnr_db
from etfarm.wire.tensors import Scalar, Value

_USUAL: Final = {"bfloat16": "30 to 45", "float16": "45 to 65"}
"""SQNR in dB that outputs of a float program mostly have, by dtype; wider ones have over 100."""

EQUAL_SHARE: Final = 0.99
"""Minimum fraction of equal integers of a correct float program: rounding changes a class only where two are nearly equal."""

QUANTIZED_EQUAL_SHARE: Final = 0.5
"""Minimum fraction of equal integers of a useful quantized program."""

_NOT_ZERO: Final = 1e-3
"""Maximum absolute error of a float program where the model's output is zero."""

_BEYOND_CHANCE_DB: Final = 20.0
"""How much lower the SQNR of a program must be than that of a second run of a model that does not repeat its outputs, to count as
inaccurate: errors ten times as large as those by chance."""

_BEYOND_CHANCE_SHARE: Final = 10.0
"""How many times as many integers must differ as in such a second run."""


class OutputCheck(TypedDict):
    """A comparison of one output with eager PyTorch; OutputCheck in `compile.proto`."""

    output: str
    equal: bool
    max_abs_error: float | None
    sqnr_db: float | None
    """The SQNR in dB, capped at 300; None for NaN, an all-zero reference, and integers and bools."""
    equal_share: float | None
    """The fraction of equal elements, 0 to 1; None for floats."""


@dataclass(frozen=True)
class Difference:
    """The comparison of one output: what is reported, and what decides the verdict."""

    report: OutputCheck
    judged_db: float | None
    """The SQNR in dB of the reference without its mean, so that a bias does not count as signal; None if undefined."""
    is_constant: bool = False
    """Whether all values of the reference are equal, so that a quantizer cannot be judged by it."""
    dtype: str = ""
    """The dtype of the reference; empty for a scalar."""
    wrong: str = ""
    """Why the outputs cannot be compared: different shapes, or NaN in one of them; empty if they can."""


def find_problem(output: Difference, *, quantized: bool) -> str:
    """Return why an output counts as wrong; empty if it does not."""
    if output.wrong:
        return f"{output.report['output']} {output.wrong}"
    reported, db = output.report, output.judged_db
    share = reported["equal_share"]
    if share is not None:
        least = QUANTIZED_EQUAL_SHARE if quantized else EQUAL_SHARE
        return "" if share >= least else f"{reported['output']} agrees in {share:.0%} of its integers only"
    if quantized:
        if output.is_constant or db is None or db >= QUANTIZED_DB:
            return ""
        # The report shows the SQNR of the whole output, so this is the number to name, unless only the other one decides.
        whole_db = reported["sqnr_db"]
        shown = decibels(db if whole_db is None else whole_db)
        if whole_db is not None and whole_db >= QUANTIZED_DB:
            shown += f", but only {decibels(db)} without the mean of its values"
        return f"{reported['output']} has {shown}, less than the {QUANTIZED_DB:g} dB that quantization should keep"
    error = reported["max_abs_error"] or 0.0
    if reported["equal"] or error <= ROUNDING_ERROR:
        return ""
    if reported["sqnr_db"] is None:
        return f"{reported['output']} is up to {error:g} where the model gives zeros" if error > _NOT_ZERO else ""
    if reported["sqnr_db"] >= rounding.least_sqnr_db(output.dtype):
        return ""
    usual = f"where a {output.dtype or 'float'} output mostly has {_USUAL.get(output.dtype, 'over 100')}"
    return f"{reported['output']} has {decibels(reported['sqnr_db'])}, {usual}"


def is_rounding(expected: Value, output: Difference) -> bool:
    """Return whether rounding explains the difference from the expected value."""
    error = output.report["max_abs_error"]
    if output.wrong or error is None or isinstance(expected, Scalar):
        return False
    values = np.abs(tensors.to_array(expected).astype(np.float64))
    limit = rounding.tolerance(expected.dtype, float(values.max(initial=0.0, where=np.isfinite(values))))
    return limit is not None and error <= limit


def is_chance(output: Difference, chance: Difference | None) -> bool:
    """Return whether an output is hardly further from the reference than the reference from itself."""
    if chance is None or output.wrong:
        return False
    share, chance_share = output.report["equal_share"], chance.report["equal_share"]
    if share is not None and chance_share is not None:
        return 1 - share <= _BEYOND_CHANCE_SHARE * (1 - chance_share)
    if output.judged_db is None or chance.judged_db is None:
        return True
    return output.judged_db > chance.judged_db - _BEYOND_CHANCE_DB


def difference(name: str, expected: Value, actual: Value) -> Difference:
    """Compare one output of the program with eager PyTorch's, in float64."""
    if (isinstance(expected, Scalar) and expected.value is None) or (isinstance(actual, Scalar) and actual.value is None):
        same = isinstance(expected, Scalar) and isinstance(actual, Scalar) and expected.value == actual.value
        return Difference(_output_check(name, same), None, wrong="" if same else "is None on one side only")
    reference_, output = _array(expected), _array(actual)
    if reference_.shape != output.shape:
        shapes = f"has the shape {list(output.shape)} where the model gives {list(reference_.shape)}"
        return Difference(_output_check(name, False), None, wrong=shapes)
    r, a = reference_.astype(np.float64).ravel(), output.astype(np.float64).ravel()
    is_integer = reference_.dtype.kind in "biu"
    exact = reference_.dtype == output.dtype and is_integer
    # float64 cannot represent int64 above 2^53, so integers are compared directly.
    same_at = (reference_ == output).ravel() if exact else (r == a) | (np.isnan(r) & np.isnan(a))
    equal = bool(same_at.all())
    with np.errstate(invalid="ignore", over="ignore"):
        largest = float(np.where(same_at, 0.0, np.abs(r - a)).max()) if r.size else math.nan
    error = largest if math.isfinite(largest) else None
    if is_integer:
        return Difference(_output_check(name, equal, error, equal_share=float(same_at.mean()) if r.size else None), None)
    reported = _output_check(name, equal, error, sqnr_db(r, a))
    if not equal and (np.isfinite(r) != np.isfinite(a)).any():
        return Difference(reported, None, wrong="has NaN or infinity where the model has none, or none where it has some")
    spread = float(np.ptp(r)) if r.size and np.isfinite(r).all() else 0.0
    # float32 noise around a single value is not a signal, and cannot be used to judge a quantizer.
    is_constant = spread <= 1e-6 * float(np.abs(r).max(initial=0.0)) and r.size != 1
    varying = r - r.mean() if r.size > 1 and np.isfinite(r).all() else r
    dtype = "" if isinstance(expected, Scalar) else expected.dtype
    return Difference(reported, sqnr_db(r, a, varying), is_constant, dtype)


def _output_check(
    name: str, equal: bool, error: float | None = None, sqnr_db: float | None = None, equal_share: float | None = None
) -> OutputCheck:
    return {"output": name, "equal": equal, "max_abs_error": error, "sqnr_db": sqnr_db, "equal_share": equal_share}


def _array(value: Value) -> NDArray[np.generic]:
    return np.asarray(value.value) if isinstance(value, Scalar) else tensors.to_array(value)
