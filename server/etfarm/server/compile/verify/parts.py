"""Parts of outputs that the model joins with `cat` or `stack`, where quantization lost a part and the whole output hides it.

With static scales, an output has one quantization step, which follows its largest values: boxes of up to 600 leave nothing of the
scores beside them, and hardly change the SQNR of the whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from etfarm.server.compile.program import places
from etfarm.server.compile.program.descriptions import describe_node
from etfarm.server.compile.program.explain import returned_values
from etfarm.server.graphs.views import VIEWS, UnknownSize, is_view, move, name_of, shape_of
from etfarm.wire import tensors
from etfarm.wire.sqnr import QUANTIZED_DB, ROUNDING_ERROR, decibels, sqnr_db
from etfarm.wire.tensors import Tensor, Value

_JOINS: Final = frozenset({"cat", "concat", "concatenate", "stack", "hstack", "vstack"})
_FEW: Final = 4
"""Maximum number of differing elements that are no reason to warn."""
_NEAR_DB: Final = 20.0
"""SQNR in dB from which a part is near enough, also where only its mean is right: errors of a tenth of its values."""
_MAX_HOPS: Final = 32
_MAX_PARTS: Final = 1000
_NAMED: Final = 3
"""Maximum number of parts in a message."""


@dataclass(frozen=True)
class _Operand:
    """An operand of an operator that joins."""

    joins: tuple[Any, ...]
    """The nodes that join, from the output's to the one that has the operand."""
    index: int

    @property
    def words(self) -> str:
        """The operand for messages."""
        return f"operand {self.index} of {describe_node(self.joins[-1])}"

    @property
    def names(self) -> list[str]:
        """What names the operators that join in a recipe file."""
        return [_name_in_recipes(node) for node in self.joins if name_of(node) == "cat"]


@dataclass(frozen=True)
class LostPart:
    """A part of an output that is far from the model."""

    words: str
    """The part for messages, with its SQNR."""
    joins: tuple[str, ...]
    """What names the operators that join it in a recipe file; empty if not the output's quantization step is the cause."""
    is_below_step: bool
    """Whether the output's quantization step is the cause."""


def find_lost(original: Any, lowered: Any, at: int, expected: Value, actual: Value) -> list[LostPart]:
    """Return the parts of an output that are lost, for the example inputs.

    Args:
        original: the exported program before quantization.
        lowered: the program as it was lowered; None if unknown.
        at: the output's index.
        expected, actual: the output of the model and of the program.
    """
    returned = returned_values(original)
    if not (isinstance(expected, Tensor) and isinstance(actual, Tensor) and expected.shape == actual.shape):
        return []
    wanted = tensors.to_array(expected)
    if at >= len(returned) or not hasattr(returned[at], "meta") or wanted.dtype.kind in "biu":
        return []
    operands: list[_Operand] = []
    try:
        labels = _label(returned[at], (), 0, 0, operands).numpy()
    except UnknownSize:
        return []
    if len(operands) < 2 or labels.shape != wanted.shape:
        return []
    reference, output = (array.astype(np.float64) for array in (wanted, tensors.to_array(actual)))
    step = _find_step(lowered, at) if lowered is not None else math.nan
    largest = float(np.abs(reference).max(initial=0.0, where=np.isfinite(reference)))
    lost = []
    for label, elements in _elements(labels):
        r, a = reference.ravel()[elements], output.ravel()[elements]
        level = _level(r, a)
        if level:
            operand = operands[label]
            finite = r[np.isfinite(r)]
            is_below_step = float(finite.std()) <= step
            name = f"{expected.name or at}{_slices(labels == label)}"
            words = f"{name}, {operand.words}, with values up to {np.abs(finite).max():.3g}, has {level}"
            if is_below_step:
                words += f" (the output has values up to {largest:.3g}, and therefore a quantization step of {step:.2g})"
            lost.append(LostPart(words, tuple(operand.names) if is_below_step else (), is_below_step))
    return lost


def describe(method: str, lost: Sequence[LostPart], otherwise: str) -> str:
    """Return the warning of lost parts.

    Args:
        otherwise: what to do about a part for which the step of the whole output is not the reason.
    """
    more = f"; and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
    advice = []
    if any(part.is_below_step for part in lost):
        advice.append("Return parts of such different ranges as outputs of their own, each with its own quantization step.")
        if names := list(dict.fromkeys(name for part in lost for name in part.joins)):
            listed = ", ".join(f'"{name}"' for name in names[:_NAMED])
            advice.append(f"Or join them in fp32: skip_operators = [{listed}] in a recipe file.")
    if not all(part.is_below_step for part in lost):
        advice.append(otherwise)
    shown = "; ".join(part.words for part in lost[:_NAMED])
    return f"{method} loses parts of outputs that are near the model as a whole: {shown}{more}. {' '.join(advice)}"


def _label(node: Any, joins: tuple[Any, ...], index: int, hops: int, operands: list[_Operand]) -> torch.Tensor:
    """Return for each element of a node's value which operand it comes from, by moving numbers as the model moves values."""
    name = name_of(node)
    if node.op == "call_function" and node.args and hops < _MAX_HOPS and len(operands) < _MAX_PARTS:
        if name in _JOINS:
            parts = [_label(each, (*joins, node), place, hops + 1, operands) for place, each in enumerate(node.args[0])]
            return node.target(parts, *node.args[1:], **node.kwargs)
        if is_view(node):
            return move(node, _label(node.args[0], joins, index, hops + 1, operands))
    operands.append(_Operand(joins, index))
    return torch.full(shape_of(node), len(operands) - 1, dtype=torch.int32)


def _elements(labels: NDArray[np.int32]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Yield each label with the flat indices of its elements."""
    order = np.argsort(labels, axis=None, kind="stable")
    present, starts = np.unique(labels.ravel()[order], return_index=True)
    yield from zip(map(int, present), np.split(order, starts[1:]), strict=True)


def _level(reference: NDArray[np.float64], actual: NDArray[np.float64]) -> str:
    """Return the SQNR of a part that is lost; empty if it is not, or has a single value only."""
    finite = np.isfinite(reference) & np.isfinite(actual)
    r, a = reference[finite], actual[finite]
    if np.count_nonzero(np.abs(r - a) > ROUNDING_ERROR) <= _FEW or np.ptp(r) <= 1e-6 * np.abs(r).max():
        return ""
    db, varying_db = sqnr_db(r, a), sqnr_db(r, a, r - r.mean())
    if db is None or varying_db is None or db >= _NEAR_DB or varying_db >= QUANTIZED_DB:
        return ""
    return decibels(db) + (f", but only {decibels(varying_db)} without the mean of its values" if db >= QUANTIZED_DB else "")


def _find_step(lowered: Any, at: int) -> float:
    """Return the quantization step of an output with a static scale; NaN if it has none."""
    returned = returned_values(lowered)
    node: Any = returned[at] if at < len(returned) else None
    for _ in range(_MAX_HOPS):
        if str(getattr(node, "target", "")).startswith("quantized_decomposed.dequantize_per_tensor.default"):
            return float(node.args[1])
        if name_of(node) not in VIEWS:
            break
        node = node.args[0]
    return math.nan


def _slices(mask: NDArray[np.bool_]) -> str:
    """Return the slices that a part consists of, like `[:, 4:14]`; empty if it is none of slices."""
    ranges = []
    for dim, size in enumerate(mask.shape):
        at = np.flatnonzero(mask.any(axis=tuple(other for other in range(mask.ndim) if other != dim)))
        ranges.append((int(at[0]), int(at[-1]) + 1, size))
    if mask.sum() != math.prod(end - start for start, end, _ in ranges):
        return ""
    shown = [":" if end - start == size else str(start) if end - start == 1 else f"{start}:{end}" for start, end, size in ranges]
    while shown and shown[-1] == ":":
        shown.pop()
    return f"[{', '.join(shown)}]"


def _name_in_recipes(node: Any) -> str:
    """Return the name of an operator for a recipe file, like `head:cat#1`."""
    module, name = _module(node), name_of(node)
    same = [other for other in node.graph.nodes if name_of(other) == name and _module(other) == module]
    return f"{module}:{name}" + (f"#{same.index(node)}" if len(same) > 1 else "")


def _module(node: Any) -> str:
    return re.sub(r"@[0-9]+", "", places.module_path(node) or "")  # a second call of a module is NAME@1
