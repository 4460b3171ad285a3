"""The values that integers of an exported program may have, as far as its operators bound them: a counter is never negative."""

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
_FIRST: Final = frozenset(
    {"embedding", "gather", "index", "index_select", "take", "take_along_dim", "repeat", "roll", "flip", "amax", "amin"}
)
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
        if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex():
            return ALL
        limits = (0, 1) if value.dtype == torch.bool else (0, inf) if not value.dtype.is_signed else ALL
        own = self._held[node][1] if node in self._held else self._of_operator(node)
        return _both(limits, _either(own, self._written[node]) if node in self._written else own)

    def _of_operator(self, node: Any) -> Range:
        name, arguments = name_of(node).rstrip("_"), [self.of(each) for each in node.args]
        if node.op != "call_function" or node.kwargs.get("alpha", 1) != 1:
            return ALL
        if name in VIEWS or name in _FIRST:
            return arguments[0] if _is_of_integers(node.args[0]) else ALL
        if name in _OF_ONE:
            return _OF_ONE[name](*arguments[0])
        if name in _OF_TWO:
            return _OF_TWO[name](*arguments[:2])
        if name in _WRITING and len(arguments) > max(_WRITING[name]) and not (name == "index_put" and True in node.args[3:]):
            first, second = _WRITING[name]
            return _either(arguments[first], arguments[second])
        if name in ("cat", "stack"):
            return _union(self.of(each) for each in node.args[0])
        if name == "clamp":
            bounds = [*node.args[1:], *[None] * (3 - len(node.args))]
            low, high = (node.kwargs.get(key, bound) for key, bound in zip(("min", "max"), bounds, strict=True))
            low, high = -inf if low is None else self.of(low)[0], inf if high is None else self.of(high)[1]
            return min(max(arguments[0][0], low), high), max(min(arguments[0][1], high), low)
        if name == "arange":
            start, end = (0, arguments[0][1]) if len(arguments) == 1 else (arguments[0][0], arguments[1][1])
            return (start, end - 1) if len(arguments) < 3 else ALL
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


def _both(one: Range, other: Range) -> Range:
    return max(one[0], other[0]), min(one[1], other[1])


def _either(one: Range, other: Range) -> Range:
    return min(one[0], other[0]), max(one[1], other[1])


def _union(ranges: Any) -> Range:
    lows, highs = zip(*ranges, strict=True)
    return min(lows), max(highs)


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


_OF_ONE: Final[Mapping[str, Callable[[float, float], Range]]] = {
    "neg": lambda low, high: (-high, -low),
    "abs": lambda low, high: (0, max(-low, high)),
    "square": lambda low, high: (0, inf),
    **dict.fromkeys(("sum", "cumsum", "prod"), lambda low, high: (0 if low >= 0 else -inf, inf)),
}
_OF_TWO: Final[Mapping[str, Callable[[Range, Range], Range]]] = {
    "add": lambda one, other: (one[0] + other[0], one[1] + other[1]),
    "sub": lambda one, other: (one[0] - other[1], one[1] - other[0]),
    "mul": _product,
    "remainder": _remainder,
    "fmod": _remainder,
    "floor_divide": lambda one, other: (0, one[1]) if one[0] >= 0 and other[0] >= 1 else ALL,
    "minimum": lambda one, other: (min(one[0], other[0]), min(one[1], other[1])),
    "maximum": lambda one, other: (max(one[0], other[0]), max(one[1], other[1])),
    "clamp_min": lambda one, low: (max(one[0], low[0]), max(one[1], low[1])),
    "clamp_max": lambda one, high: (min(one[0], high[0]), min(one[1], high[1])),
}
"""The ranges of operators' results by those of their first arguments."""
