"""The values that numbers of an exported program may have, as far as its operators bound them: a counter is never negative.

Floats count as far as integers come from them, such as `(x.sigmoid() * 4).long()`; NaN, which is no integer, does not.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, Final

import torch

from etfarm.server.graphs.views import VIEWS, name_of

Range = tuple[float, float]
"""The least and the greatest value."""

ALL: Final[Range] = (-inf, inf)
_MAX_PASSES: Final = 4
"""Number of passes over the graph after which a bound that still moves, such as a counter's, is taken for none."""
_ROUNDED: Final = 2.0**-16
"""How far bounds of floats may be off by rounding, relative to them."""
_FIRST: Final = frozenset(
    {"embedding", "gather", "index", "index_select", "take", "take_along_dim", "repeat", "roll", "flip", "amax", "amin",
     "lift_fresh_copy", "any", "all"}
)  # fmt: skip
"""Operators that give values of their first argument; with VIEWS."""
_INDICES: Final = frozenset({"argmax", "argmin", "argsort"})
_WITH_INDICES: Final = frozenset({"max", "min", "topk", "sort", "kthvalue", "median", "mode"})
"""Operators that give indices along a dim beside values."""
_WRITING: Final = {"copy": (0, 1), "fill": (0, 1), "masked_fill": (0, 2), "where": (1, 2), "scatter": (0, 3), "index_put": (0, 2),
                   "index_copy": (0, 3), "index_fill": (0, 3), "slice_scatter": (0, 1), "select_scatter": (0, 1)}  # fmt: skip
"""Operators whose values come from either of two arguments."""
_FILLED_AT: Final = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}
_CONSTANT: Final = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}


class IntegerRanges:
    """The ranges of the integers in a program's outermost graph, in calls after the first one, too."""

    def __init__(self, program: Any) -> None:
        self._held = _held_values(program)
        self._ranges: dict[Any, Range] = {}
        self._written: dict[Any, Range] = {}
        """What operators in place write, by the node whose memory they write to."""
        for number in range(2 * _MAX_PASSES):
            before, after = self._written, self._run(program)
            if all(node in before and _either(before[node], new) == before[node] for node, new in after.items()):
                self._written = after  # a remainder of a counter has bounds, also if the counter seemed to have none
                self._run(program)
                return
            self._written = {node: _either(before.get(node, new), new) for node, new in after.items()}
            if number >= _MAX_PASSES:
                self._written = {node: _without_moving(before.get(node), new) for node, new in self._written.items()}
        self._ranges.clear()

    def _run(self, program: Any) -> dict[Any, Range]:
        """Compute the ranges by what is written; return what is written by these."""
        written: dict[Any, Range] = {}

        def write(memory: Any, value: Any) -> None:
            written[memory] = _either(written.get(memory, self.of(value)), self.of(value))

        buffers = {name: node for node, (name, _) in self._held.items()}
        for node in program.graph.nodes:
            self._ranges[node] = self._compute(node)
            if _is_in_place(node):
                write(_memory_of(node), node)
            for spec, value in (
                zip(program.graph_signature.output_specs, node.args[0], strict=True) if node.op == "output" else ()
            ):
                if spec.target in buffers:
                    write(buffers[spec.target], value)
        return written

    def of(self, value: Any) -> Range:
        """Return the range of a node's integers, or of a number."""
        if isinstance(value, bool | int | float):
            return value, value
        return self._ranges.get(value, ALL) if isinstance(value, torch.fx.Node) else ALL

    def _compute(self, node: Any) -> Range:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            return (0, inf) if name_of(node) == "sym_size" else ALL
        if node.target is operator.getitem and name_of(node.args[0]) in _WITH_INDICES and node.args[1] == 1:
            return _along(node.args[0])
        if not isinstance(value, torch.Tensor) or value.is_complex():
            return ALL
        own = self._held[node][1] if node in self._held else self._of_operator(node)
        if node in self._written:
            own = _either(own, self._written[node])
        if math.isnan(own[0]) or math.isnan(own[1]):  # of infinities that cancel
            own = ALL
        if value.is_floating_point():
            return own
        low, high = limits = _limits(value.dtype)
        return own if low <= own[0] and own[1] <= high else limits

    def _of_operator(self, node: Any) -> Range:
        name, arguments = name_of(node).rstrip("_"), [self.of(each) for each in node.args]
        if node.op != "call_function" or node.kwargs.get("alpha", 1) != 1:
            return ALL
        is_of_integers = _is_of_integers(node)
        if name in VIEWS or name in _FIRST:
            return _truncated(arguments[0]) if is_of_integers and not _is_of_integers(node.args[0]) else arguments[0]
        if name in ("sum", "count_nonzero"):
            return _sum(node, arguments[0] if name == "sum" else (0, 1))
        if name in _OF_ONE:
            return _OF_ONE[name](*arguments[0])
        if name in _OF_FLOATS and not is_of_integers:
            return _OF_FLOATS[name](*arguments[0])
        if (name := OF_TENSORS.get(str(node.target), name)) in _OF_TWO:
            return _OF_TWO[name](*arguments[:2])
        if is_of_integers and name in _OF_INTEGERS:
            return _OF_INTEGERS[name](*arguments[:2])
        if name == "div" and is_of_integers and node.kwargs.get("rounding_mode"):
            return _quotient(*arguments[:2])
        if name == "hardtanh":
            bounds = [float(bound) for bound in node.args[1:]]
            return _within(arguments[0], *bounds, *(-1.0, 1.0)[len(bounds) :])
        if name in _WRITING and len(arguments) > max(_WRITING[name]) and not (name == "index_put" and True in node.args[3:]):
            first, second = _WRITING[name]
            return _either(arguments[first], arguments[second])
        if name in ("cat", "stack"):
            return _union(self.of(each) for each in node.args[0])
        if name == "clamp":
            limits = [*node.args[1:], *[None] * (3 - len(node.args))]
            low, high = (node.kwargs.get(key, limit) for key, limit in zip(("min", "max"), limits, strict=True))
            low, high = -inf if low is None else self.of(low)[0], inf if high is None else self.of(high)[1]
            return _within(arguments[0], low, high)
        if name == "arange":
            start, end = (0, arguments[0][1]) if len(arguments) == 1 else (arguments[0][0], arguments[1][1])
            return (start, end - 1) if is_of_integers and (len(arguments) < 3 or arguments[2][0] > 0) else ALL
        if name in _FILLED_AT and len(arguments) > _FILLED_AT[name]:
            return arguments[_FILLED_AT[name]]
        if name in _CONSTANT:
            return _CONSTANT[name], _CONSTANT[name]
        return _along(node) if name in _INDICES else (0, 1) if name == "one_hot" else (0, inf) if name == "nonzero" else ALL


def _held_values(program: Any) -> dict[Any, tuple[str, Range]]:
    """Return the names of buffers and constants, and the range of what they are in the program, by their placeholders."""
    values: Mapping[str, Any] = {**program.constants, **program.state_dict}
    targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs if spec.target is not None}
    held = {}
    for node in program.graph.nodes:
        value = values.get(targets.get(node.name, "")) if node.op == "placeholder" else None
        if isinstance(value, torch.Tensor):
            is_known = value.numel() and not value.is_floating_point() and not value.is_complex()
            held[node] = targets[node.name], (float(value.min()), float(value.max())) if is_known else ALL
    return held


def _is_in_place(node: Any) -> bool:
    return name_of(node).endswith("_") and not name_of(node).endswith("__") and bool(node.args)


def _memory_of(value: Any) -> Any:
    """Return the node that made the memory of a value, which views and operators in place share."""
    while value.args and (name_of(value) in VIEWS or _is_in_place(value)):
        value = value.args[0]
    return value


def _is_of_integers(value: Any) -> bool:
    tensor = value.meta.get("val") if isinstance(value, torch.fx.Node) else None
    return isinstance(tensor, torch.Tensor) and not (tensor.is_floating_point() or tensor.is_complex())


def _along(node: Any) -> Range:
    """Return the range of indices along the dim of an operator, or of flat indices without one."""
    shape = node.args[0].meta["val"].shape
    at = {"topk": 2, "kthvalue": 2}.get(name_of(node), 1)
    dim = node.args[at] if len(node.args) > at else -1 if name_of(node) in ("topk", "sort", "argsort", "kthvalue") else None
    size = math.prod(shape) if dim is None else shape[dim] if shape else 1
    return 0, size - 1 if isinstance(size, int) else inf


def _either(one: Range, other: Range) -> Range:
    return min(one[0], other[0]), max(one[1], other[1])


def _union(ranges: Any) -> Range:
    lows, highs = zip(*ranges, strict=True)
    return min(lows), max(highs)


def _limits(dtype: torch.dtype) -> Range:
    """Return the values of a dtype of integers that may be what a program computes with: of a wide one, all."""
    if dtype == torch.bool:
        return 0, 1
    if dtype.itemsize > 2:
        return (-inf if dtype.is_signed else 0), inf
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def _within(values: Range, low: float, high: float) -> Range:
    return min(max(values[0], low), high), max(min(values[1], high), low)


def _truncated(values: Range) -> Range:
    """Return the integers that floats become, whose bounds may be off by rounding."""
    low, high = values[0] - abs(values[0]) * _ROUNDED, values[1] + abs(values[1]) * _ROUNDED
    return math.trunc(low) if math.isfinite(low) else low, math.trunc(high) if math.isfinite(high) else high


def _rounded(low: float, high: float) -> Range:
    """Return the whole numbers around a range."""
    return math.floor(low) if math.isfinite(low) else low, math.ceil(high) if math.isfinite(high) else high


def _sum(node: Any, values: Range) -> Range:
    """Return the range of a sum of values."""
    sizes = [tensor.numel() for tensor in (node.args[0].meta["val"], node.meta["val"])]
    is_known = all(isinstance(size, int) for size in sizes) and sizes[1]
    terms = sizes[0] / sizes[1] if is_known else inf
    return _product(values, (terms, terms)) if is_known else (0 if values[0] >= 0 else -inf, inf if values[1] > 0 else 0)


def _compare(is_true: bool, is_false: bool) -> Range:
    return (1, 1) if is_true else (0, 0) if is_false else (0, 1)


def _without_moving(before: Range | None, after: Range) -> Range:
    """Return a range without the bounds that are others than before."""
    old = after if before is None else before
    return after[0] if after[0] == old[0] else -inf, after[1] if after[1] == old[1] else inf


def _product(one: Range, other: Range) -> Range:
    products = [0.0 if 0 in (a, b) else a * b for a in one for b in other]
    return min(products), max(products)


def _remainder(dividend: Range, divisor: Range) -> Range:
    """Return the range of a remainder as the runtime computes it, with the sign of the dividend."""
    largest = max(abs(divisor[0]), abs(divisor[1])) - 1
    return max(dividend[0], -largest) if dividend[0] < 0 else 0, min(max(dividend[1], 0), largest)


def _quotient(dividend: Range, divisor: Range) -> Range:
    if dividend[0] < 0 or divisor[0] < 1:
        return ALL
    return 0, dividend[1] // divisor[0] if math.isfinite(dividend[1]) else inf


def _common_bits(one: Range, other: Range) -> Range:
    """Return the range of the bits that integers have in common with others: of one that is not negative, some."""
    bounds = [high for low, high in (one, other) if low >= 0]
    return (0, min(bounds)) if bounds else ALL


_OF_ONE: Final[Mapping[str, Callable[[float, float], Range]]] = {
    "neg": lambda low, high: (-high, -low),
    "abs": lambda low, high: (0, max(-low, high)),
    "square": lambda low, high: (0, inf),
    **dict.fromkeys(("cumsum", "prod"), lambda low, high: (0 if low >= 0 else -inf, inf)),
    "relu": lambda low, high: (max(low, 0), max(high, 0)),
    "logical_not": lambda low, high: _compare(low == high == 0, low > 0 or high < 0),
}
_OF_FLOATS: Final[Mapping[str, Callable[[float, float], Range]]] = {
    **dict.fromkeys(("sigmoid", "softmax", "_softmax", "hardsigmoid"), lambda low, high: (0, 1)),
    **dict.fromkeys(("tanh", "sin", "cos", "erf"), lambda low, high: (-1, 1)),
    **dict.fromkeys(("floor", "ceil", "round", "trunc"), lambda low, high: _rounded(low, high)),
}
"""Operators that are bounded or rounded, by the range of their argument."""
_OF_TWO: Final[Mapping[str, Callable[[Range, Range], Range]]] = {
    "add": lambda one, other: (one[0] + other[0], one[1] + other[1]),
    "sub": lambda one, other: (one[0] - other[1], one[1] - other[0]),
    "mul": _product,
    "ge": lambda one, other: _compare(one[0] >= other[1], one[1] < other[0]),
    "gt": lambda one, other: _compare(one[0] > other[1], one[1] <= other[0]),
    "le": lambda one, other: _compare(one[1] <= other[0], one[0] > other[1]),
    "lt": lambda one, other: _compare(one[1] < other[0], one[0] >= other[1]),
    "minimum": lambda one, other: (min(one[0], other[0]), min(one[1], other[1])),
    "maximum": lambda one, other: (max(one[0], other[0]), max(one[1], other[1])),
    "clamp_min": lambda one, low: (max(one[0], low[0]), max(one[1], low[1])),
    "clamp_max": lambda one, high: (min(one[0], high[0]), min(one[1], high[1])),
}
"""The ranges of operators' results by those of their first arguments."""
OF_TENSORS: Final = {
    "aten.max.other": "maximum", "aten.min.other": "minimum", "aten.__and__.Scalar": "bitwise_and",
    "aten.__and__.Tensor": "bitwise_and", "aten.__rshift__.Scalar": "shift", "aten.__rshift__.Tensor": "shift",
}  # fmt: skip
"""Other names of operators on two tensors."""
_OF_INTEGERS: Final[Mapping[str, Callable[[Range, Range], Range]]] = {
    "remainder": _remainder,
    "fmod": _remainder,
    "floor_divide": _quotient,
    "bitwise_and": _common_bits,
    **dict.fromkeys(
        ("shift", "bitwise_right_shift"), lambda one, by: _quotient(one, (2.0 ** by[0], inf)) if 0 <= by[0] < 64 else ALL
    ),
}
"""The same of operators of integers only."""
