"""Differences of a program's outputs from eager PyTorch's, and which of them count: pure functions of values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from etfarm.v1.compile_pb2 import OutputCheck
from etfarm.wire import rounding, tensors
from etfarm.wire.sqnr import EXACT_DB, QUANTIZED_DB, ROUNDING_ERROR, decibels, has_same_infinity, sqnr_db
from etfarm.wire.tensors import Scalar, Value

_USUAL: Final = {"bfloat16": "30 to 45", "float16": "45 to 65"}
"""SQNR in dB that outputs of a float program mostly have, by dtype; wider ones have over 100."""

EQUAL_SHARE: Final = 0.99
"""Minimum fraction of equal integers of a correct float program: rounding changes a class only where two are nearly equal."""

QUANTIZED_EQUAL_SHARE: Final = 0.5
"""Minimum fraction of equal integers of a useful quantized program."""

_NOT_ZERO: Final = 1e-3
"""Maximum absolute error of a float program where the model's output is zero."""

_NOT_ZERO_QUANTIZED: Final = 0.1
"""The same of a quantized program: a step of 8 bits for values up to 25 in all."""

_LARGEST_INDEX: Final = 2**20
"""Integers up to this may be classes or indices, of which nearly equal floats choose another one."""

_BEYOND_CHANCE_DB: Final = 20.0
"""How much lower the SQNR of a program must be than that of a second run of a model that does not repeat its outputs, to count as
inaccurate: errors ten times as large as those by chance."""

_BEYOND_CHANCE_SHARE: Final = 10.0
"""How many times as many integers must differ as in such a second run."""

_BEYOND_ROUNDING: Final = 2.0
"""The same for a run with other rounding."""

_LOST_DB: Final = 3.0
"""SQNR without the means of channels below which a quantized program has lost how they vary."""

_FEWEST: Final = 5
"""Minimum number of values of a channel in a sample."""


@dataclass(frozen=True)
class Difference:
    """The comparison of one output: what is reported, and what decides the verdict."""

    report: OutputCheck
    judged_db: float | None
    """The SQNR in dB of the reference without its mean, so that a bias does not count as signal; None if undefined.

    That of the whole reference if all of its values are equal."""
    channels_db: float | None = None
    """The same without the mean of each channel of each sample; None if undefined, or if channels have few values."""
    dtype: str = ""
    """The dtype of the reference; empty for a scalar."""
    wrong: str = ""
    """Why the outputs cannot be compared: different shapes, or NaN in one of them; empty if they can."""
    other_dtype: str = ""
    """The dtype of the output if it is not that of the reference; empty for a scalar."""
    unlike: int = 0
    """Number of integers that neither rounding nor a choice between nearly equal floats explains."""
    size: int = 0
    """Number of elements."""


def find_problem(output: Difference, *, quantized: bool) -> str:
    """Return why an output counts as wrong; empty if it does not."""
    problem = output.wrong or _find_wrong_values(output, quantized=quantized)
    if not problem and output.other_dtype:
        problem = f"has the dtype {output.other_dtype} where the model gives {output.dtype}"
    return f"{output.report.output} {problem}" if problem else ""


def _find_wrong_values(output: Difference, *, quantized: bool) -> str:
    reported = output.report
    error, share, ratio_db = (_known(reported, name) for name in ("max_abs_error", "equal_share", "sqnr_db"))
    if share is not None:
        if share < (QUANTIZED_EQUAL_SHARE if quantized else EQUAL_SHARE):
            return f"agrees in {share:.0%} of its integers only"
        if output.unlike and not quantized:
            return f"has {output.unlike} of {output.size} integers that rounding does not explain, off by up to {error:g}"
        return ""
    if reported.equal or (error is not None and error <= ROUNDING_ERROR):
        return ""
    if ratio_db is None and error is not None:
        limit = _NOT_ZERO_QUANTIZED if quantized else _NOT_ZERO
        return f"is up to {error:g} where the model gives zeros" if error > limit else ""
    # A float64 that overflows in between has no ratio.
    whole_db = -EXACT_DB if ratio_db is None else ratio_db
    return _find_low_ratio(whole_db, output, quantized=quantized)


def _find_low_ratio(whole_db: float, output: Difference, *, quantized: bool) -> str:
    if not quantized:
        if whole_db >= rounding.least_sqnr_db(output.dtype):
            return ""
        usual = f"where a {output.dtype or 'float'} output mostly has {_USUAL.get(output.dtype, 'over 100')}"
        return f"has {decibels(whole_db)}, {usual}"
    db = whole_db if output.judged_db is None else output.judged_db
    if db >= QUANTIZED_DB and output.channels_db is not None and output.channels_db < _LOST_DB:
        varies = f"but only {decibels(output.channels_db)} without the mean of each channel"
        return f"has {decibels(whole_db)}, {varies}: the program loses how its values vary"
    if db >= QUANTIZED_DB:
        return ""
    # The report shows the SQNR of the whole output, so this is the number to name, unless only the other one decides.
    shown = decibels(whole_db)
    if whole_db >= QUANTIZED_DB:
        shown += f", but only {decibels(db)} without the mean of its values"
    return f"has {shown}, less than the {QUANTIZED_DB:g} dB that quantization should keep"


def is_rounding(expected: Value, output: Difference) -> bool:
    """Return whether rounding explains the difference from the expected value."""
    error = _known(output.report, "max_abs_error")
    if output.wrong or error is None or isinstance(expected, Scalar):
        return False
    values = np.abs(tensors.to_array(expected).astype(np.float64))
    limit = rounding.tolerance(expected.dtype, float(values.max(initial=0.0, where=np.isfinite(values))))
    return limit is not None and error <= limit


def is_chance(output: Difference, chance: Difference | None) -> bool:
    """Return whether an output is hardly further from the reference than the reference from itself."""
    if chance is None or output.wrong:
        return False
    share, chance_share = (_known(each.report, "equal_share") for each in (output, chance))
    if share is not None and chance_share is not None:
        return 1 - share <= _BEYOND_CHANCE_SHARE * (1 - chance_share)
    if output.judged_db is None or chance.judged_db is None:
        return True
    return output.judged_db > chance.judged_db - _BEYOND_CHANCE_DB


def find_choices(
    outputs: Mapping[int, Difference], expected: Mapping[int, Value], runs: Iterable[Sequence[Value]]
) -> frozenset[int]:
    """Return which outputs differ about as much as those of the model itself with other rounding, as where scores are near ties.

    Args:
        outputs: the differences by the outputs' indices.
        expected: what the model gives, likewise.
        runs: all outputs in such runs, see `rounding.run_in_half`; no more are taken than needed.
    """
    choices: set[int] = set()
    open_ = {index for index, output in outputs.items() if not (output.wrong or output.unlike or output.other_dtype)}
    for run in runs if open_ else ():
        for index in open_ - choices:
            if _is_as_near(outputs[index].report, difference("", expected[index], run[index]).report):
                choices.add(index)
        if choices == open_:
            break
    return frozenset(choices)


def _is_as_near(report: OutputCheck, run: OutputCheck) -> bool:
    """Return whether an output is hardly further from the model's than that of another run."""
    if report.HasField("equal_share"):
        return 1 - report.equal_share <= _BEYOND_ROUNDING * (1 - run.equal_share)
    if not (report.HasField("sqnr_db") and run.HasField("sqnr_db")):
        return False
    return report.sqnr_db >= run.sqnr_db - 20 * math.log10(_BEYOND_ROUNDING)


def difference(name: str, expected: Value, actual: Value) -> Difference:
    """Compare one output of the program with eager PyTorch's, in float64."""
    return difference_of_samples(name, [(expected, actual)])


def difference_of_samples(name: str, pairs: Sequence[tuple[Value, Value]]) -> Difference:
    """Compare one output over several samples together, each a pair of what PyTorch and the program gave; at least one."""
    for expected, actual in pairs:
        nothing = [isinstance(value, Scalar) and value.value is None for value in (expected, actual)]
        if any(nothing):
            wrong = "" if all(nothing) else "is None on one side only"
            return Difference(_output_check(name, not wrong), None, wrong=wrong)
        shapes = [list(_array(value).shape) for value in (expected, actual)]
        if shapes[0] != shapes[1]:
            wrong = f"has the shape {shapes[1]} where the model gives {shapes[0]}"
            return Difference(_output_check(name, False), None, wrong=wrong)
    reference, output = (np.concatenate([_array(value).ravel() for value in side]) for side in zip(*pairs, strict=True))
    expected, actual = pairs[0]
    dtype, other = ("" if isinstance(value, Scalar) else value.dtype for value in (expected, actual))
    if reference.dtype.kind in "biu":
        compared = _of_integers(name, reference, output)
    else:
        compared = replace(_of_floats(name, reference, output), channels_db=_channels_db(pairs))
    return replace(compared, dtype=dtype, other_dtype=other if dtype and other != dtype else "", size=reference.size)


def _of_integers(name: str, reference: NDArray[np.generic], output: NDArray[np.generic]) -> Difference:
    r, a = reference.astype(np.float64), output.astype(np.float64)
    # float64 cannot represent int64 above 2^53, so integers are compared directly.
    same_at = reference == output if reference.dtype == output.dtype else r == a
    if not np.isfinite(a).all():
        return Difference(_output_check(name, False), None, wrong=_describe_not_finite(r, a))
    share = float(same_at.mean()) if r.size else None
    error = float(np.abs(r - a).max(initial=0.0, where=~same_at)) if r.size else None
    largest = float(np.abs(r).max(initial=0.0))
    r, a = r[~same_at], a[~same_at]
    is_index = (np.maximum(np.abs(r), np.abs(a)) <= _LARGEST_INDEX) & ((a >= 0) | bool((reference < 0).any()))  # type: ignore[operator]
    is_rounded = np.abs(r - a) <= largest * rounding.RELATIVE["float32"]
    unlike = int((~(is_index | is_rounded)).sum())
    return Difference(_output_check(name, bool(same_at.all()), error, equal_share=share), None, unlike=unlike)


def _of_floats(name: str, reference: NDArray[np.generic], output: NDArray[np.generic]) -> Difference:
    r, a = reference.astype(np.float64), output.astype(np.float64)
    if not (counts := ~has_same_infinity(r, a)).all():
        r, a = r[counts], a[counts]
    equal = bool((r == a).all())
    if not (np.isfinite(r).all() and np.isfinite(a).all()):
        return Difference(_output_check(name, equal), None, wrong=_describe_not_finite(r, a, reference.size))
    with np.errstate(over="ignore"):
        largest = float(np.abs(r - a).max()) if r.size else math.nan
    ratio_db = sqnr_db(r, a)
    reported = _output_check(name, equal, largest if math.isfinite(largest) else None, ratio_db)
    # float32 noise around a single value is not a signal, and cannot be used to judge a quantizer.
    is_constant = r.size < 2 or float(np.ptp(r)) <= 1e-6 * float(np.abs(r).max())
    return Difference(reported, ratio_db if is_constant else sqnr_db(r, a, r - r.mean()))


def _channels_db(pairs: Sequence[tuple[Value, Value]]) -> float | None:
    """Return the lower SQNR in dB of all samples without the means of their channels, which are along the second or the last dim.

    Offsets of channels, such as pressures beside temperatures, are no signal: a program that gives nothing else has lost it.
    """
    samples = [tuple(_array(value).astype(np.float64) for value in pair) for pair in pairs]
    samples = [sample for sample in samples if sample[0].size]
    rank = samples[0][0].ndim if samples else 0
    if rank < 3 or not all(np.isfinite(side).all() for sample in samples for side in sample):
        return None
    ratios = []
    for axis in {1, rank - 1}:
        others = tuple(each for each in range(1, rank) if each != axis)
        varying = [reference - reference.mean(axis=others, keepdims=True) for reference, _ in samples]
        has_few = any(reference.size < _FEWEST * reference.shape[0] * reference.shape[axis] for reference, _ in samples)
        is_constant = any(np.abs(part).max() <= 1e-6 * np.abs(r).max() for part, (r, _) in zip(varying, samples, strict=True))
        if not has_few and not is_constant:
            sides = ([r for r, _ in samples], [a for _, a in samples], varying)
            ratios.append(sqnr_db(*(np.concatenate([each.ravel() for each in side]) for side in sides)))
    return min((ratio for ratio in ratios if ratio is not None), default=None)


def _describe_not_finite(reference: NDArray[np.float64], actual: NDArray[np.float64], size: int | None = None) -> str:
    """Return where only one of two arrays has NaN or an infinity, or both have different ones.

    Args:
        size: number of elements, with those that are left out of the arrays.
    """
    is_other = ~(np.isfinite(reference) & np.isfinite(actual)) & ~has_same_infinity(reference, actual)
    r, a = reference[is_other], actual[is_other]
    kinds = {"NaN": np.isnan(a), "infinity": np.isinf(a), "a number": np.isfinite(a)}
    counts = [f"{kind} in {count}" for kind, at in kinds.items() if (count := int(at.sum()))]
    model = "numbers" if np.isfinite(r).all() else "NaN or infinity" if np.isfinite(a).all() else "others"
    return f"has {' and '.join(counts)} of {size or reference.size} elements where the model gives {model}"


def _output_check(
    name: str, equal: bool, error: float | None = None, sqnr_db: float | None = None, equal_share: float | None = None
) -> OutputCheck:
    return OutputCheck(output=name, equal=equal, max_abs_error=error, sqnr_db=sqnr_db, equal_share=equal_share)


def _known(report: OutputCheck, name: Literal["max_abs_error", "sqnr_db", "equal_share"]) -> float | None:
    value: float = getattr(report, name)
    return value if report.HasField(name) else None


def _array(value: Value) -> NDArray[np.generic]:
    return np.asarray(value.value) if isinstance(value, Scalar) else tensors.to_array(value)


def advise_floats(*, delegates: bool) -> str:
    """Return what to do about a float program that differs from eager PyTorch.

    Args:
        delegates: whether a backend computes a part of it.
    """
    numerics = "--numerics (numerics=True) of a benchmark names the operators that differ, with their lines"
    if delegates:
        return f"Compile it with the recipe portable too: if that agrees, the backend is the reason. {numerics}."
    return f"No delegate takes part, so one of ExecuTorch's kernels or its memory plan is the cause: {numerics}."
