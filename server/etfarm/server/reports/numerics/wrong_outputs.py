"""The warning of a device's outputs that count as wrong, by the same limits as the check of the compiled program."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from etfarm.server.graphs import differences
from etfarm.server.graphs.differences import Difference
from etfarm.wire.tensors import Value

_NAMED: Final = 3
"""Maximum number of outputs in a message."""

_FULL_PRECISION: Final = frozenset({"XnnpackBackend"})
"""Backends that compute floats in the model's dtype, as ExecuTorch's own kernels do."""

_QUANTIZED_REMEDY: Final = (
    "Calibrate static scales with inputs like these, or keep more in fp32. --numerics names the operators that differ."
)


def describe(
    method: str,
    outputs: Mapping[int, tuple[str, Sequence[tuple[Value, Value]]]],
    repeat: Callable[[], Sequence[Value]],
    round_in_half: Callable[[bool], Iterable[Sequence[Value]]],
    *,
    quantized: bool,
    backends: Collection[str] = (),
    known: Sequence[str] = (),
) -> str:
    """Return the warning of outputs that are far from the model's; empty if there are none.

    Args:
        outputs: names by index, each with pairs of what the model and the device gave for each sample.
        repeat: runs the model again on the first sample; an output that it does not repeat is wrong only if it is farther off.
        round_in_half: runs it on the first sample with other rounding in half precision, also of float32 if that is true.
        backends: ids of the backends that compute parts of the method.
        known: messages of warnings that name wrong outputs already, which are not repeated. NaN and infinity are, unless they
            are what is known.
    """
    compared = {index: differences.difference_of_samples(name, pairs) for index, (name, pairs) in outputs.items()}
    in_half = bool(set(backends) - _FULL_PRECISION)
    if in_half:
        compared = {index: _in_half_precision(output) for index, output in compared.items()}
    problems = {
        index: problem
        for index, output in compared.items()
        if (problem := differences.find_problem(output, quantized=quantized))
        and not _is_known(output.report.output, problem, known)
    }
    again = repeat() if problems else ()
    for index in list(problems):
        if differences.is_chance(compared[index], _find_chance(outputs[index][1][0][0], again[index])):
            del problems[index]
    if problems and not quantized:
        wrong = {index: compared[index] for index in problems}
        first = {index: outputs[index][1][0][0] for index in problems}
        for index in differences.find_choices(wrong, first, round_in_half(in_half)):
            del problems[index]
    if not problems:
        return ""
    more = f" and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
    listed = "; ".join(list(problems.values())[:_NAMED])
    remedy = _QUANTIZED_REMEDY if quantized else differences.advise_floats(delegates=bool(backends))
    return f"On the device, {method} is far from the model: {listed}{more}. {remedy}"


def _in_half_precision(output: Difference) -> Difference:
    """Return the difference as one of float16, by which floats of a backend that may compute in it are judged."""
    if output.dtype not in ("float32", "float64"):
        return output
    return replace(output, dtype="float16", other_dtype="" if output.other_dtype == "float16" else output.other_dtype)


def _find_chance(first: Value, again: Value) -> Difference | None:
    """Return the difference of a second run of the model; None if it repeats the output up to rounding."""
    chance = differences.difference("", first, again)
    return None if chance.report.equal or differences.is_rounding(first, chance) else chance


def _is_known(name: str, problem: str, known: Sequence[str]) -> bool:
    """Return whether messages name an output's problem: as `find_problem` does, or in a list with numbers in parentheses."""
    matches = [re.search(rf"[:;,] {re.escape(name)} (has|is|agrees|\()[^;]*", message) for message in known]
    known_problems = [match[0] for match in matches if match is not None]
    return any(_is_of_infinity(words) for words in known_problems) or bool(known_problems and not _is_of_infinity(problem))


def _is_of_infinity(words: str) -> bool:
    return "NaN" in words or "infinity" in words
