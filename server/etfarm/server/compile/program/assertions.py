"""Assertions on values in an exported program, which a lowered one does not check."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from etfarm.server.compile.program.integer_ranges import IntegerRanges
from etfarm.server.compile.program.loading import bounds
from etfarm.server.compile.program.places import all_nodes
from etfarm.server.graphs.sources import source_of

_MAX_SHOWN: Final = 3
_MAX_CONDITIONS: Final = 6
"""Maximum number of conditions that are shown of one line."""
_ON_TENSORS: Final = ("_assert_async", "_functional_assert_async")
_ON_NUMBERS: Final = ("_assert_scalar", "_functional_assert_scalar")
_PREFIX: Final = "Runtime assertion failed for expression "
_SYMBOL: Final = re.compile(r"\b[a-z]+\d+\b")
_NOTATIONS: Final = (
    (re.compile(r"Mod\(([^(), ]+), ([^(), ]+)\)"), r"\1 % \2"),
    (re.compile(r"Mod\(([^(),]+), ([^(),]+)\)"), r"(\1) % (\2)"),
    (re.compile(r"Eq\(([^,]+), ([^,]+)\)(?=$| [&|])"), r"\1 == \2"),
    (re.compile(r"Ne\(([^,]+), ([^,]+)\)(?=$| [&|])"), r"\1 != \2"),
)
"""Patterns of sympy's notation with Python's."""
_CALLS: Final = ("_check", "assert")
"""What a line contains that states its assertion itself."""


def describe(program: Any, method: str) -> str:
    """Return which conditions on a method's values the device does not check; empty if there are none.

    Lowering drops all of them: those that the model asserts, and those under which operators are right, such as a start of
    `narrow` that lies inside. Sizes that cannot be otherwise, which torch asserts too, are left out. Some operators look at their
    values in PyTorch and not in ExecuTorch, such as `one_hot`.
    """
    conditions: dict[str, list[str]] = {}
    names, ranges = _names(program), IntegerRanges(program)
    for node in all_nodes(program):
        name = getattr(node.target, "_schema", None) and node.target._schema.name.partition("::")[2]
        if name in _ON_TENSORS and ranges.of(node.args[0]) == (1, 1):
            continue
        if name in _ON_TENSORS or (name in _ON_NUMBERS and not _always_holds(program, node.args[0])):
            place, condition = _describe(node, names)
            conditions.setdefault(place, []).append(condition)
        elif condition := _demand_of(program, ranges, node, name):
            conditions.setdefault(_place_of(node), []).append(condition)
    if not conditions:
        return ""
    texts = [" at ".join(filter(None, (_joined(each), place))) for place, each in conditions.items()]
    more = f"; and {len(texts) - _MAX_SHOWN} more" if len(texts) > _MAX_SHOWN else ""
    return (
        f"The program does not check what {method} asserts or assumes about values: {'; '.join(texts[:_MAX_SHOWN])}{more}. "
        "Where PyTorch would raise an error, the device may continue."
    )


def _joined(conditions: Iterable[str]) -> str:
    """Return the conditions of one line in words."""
    known = list(filter(None, dict.fromkeys(conditions)))
    more = f" and {len(known) - _MAX_CONDITIONS} more" if len(known) > _MAX_CONDITIONS else ""
    return f"{' and '.join(known[:_MAX_CONDITIONS])}{more}"


def _names(program: Any) -> dict[str, str]:
    """Return what symbols of torch stand for, as far as that is a size of an input, or the value of an input or buffer."""
    names: dict[str, str] = {}
    buffers = program.graph_signature.inputs_to_buffers
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            shape = enumerate(getattr(value, "shape", ()))
            names.update({str(size): f"{node.name}.shape[{dim}]" for dim, size in shape if not isinstance(size, int)})
        elif node.target is torch.ops.aten.item.default and node.args[0].op == "placeholder":
            names.setdefault(str(value), f"{buffers.get(node.args[0].name, node.args[0].name)}.item()")
    return {symbol: name for symbol, name in names.items() if symbol.isidentifier()}


def _readable(condition: str, names: Mapping[str, str]) -> str:
    """Return a condition in Python's notation: sympy writes `Eq(Mod(u0, 4), 0)` for `u0 % 4 == 0`."""
    for pattern, text in _NOTATIONS:
        condition = pattern.sub(text, condition)
    return _SYMBOL.sub(lambda symbol: names.get(symbol[0], symbol[0]), condition)


def _demand_of(program: Any, ranges: IntegerRanges, node: Any, name: str | None) -> str:
    """Return what an operator demands of a tensor's values, which only PyTorch looks at; empty if nothing, or if it is so."""
    value = node.meta.get("val")
    if name == "one_hot":
        return _of_indices(program, ranges, node.args[0], node.args[1])
    if name == "index_add":
        return _of_indices(program, ranges, node.args[2], value.shape[node.args[1]])
    if name == "fmod" and isinstance(divisor := node.args[1], torch.fx.Node) and not value.is_floating_point():
        low, high = ranges.of(divisor)
        return "" if low > 0 or high < 0 else f"{_name_of_values(program, divisor)} other than 0"
    return ""


def _of_indices(program: Any, ranges: IntegerRanges, indices: Any, size: Any) -> str:
    """Return that indices are to be within a size; empty if they always are."""
    low, high = ranges.of(indices)
    if low >= 0 and high < (size if isinstance(size, int) else bounds(program, size)[0]):
        return ""
    within = f"from 0 to {size - 1}" if isinstance(size, int) else "within the dim"
    return f"{_name_of_values(program, indices)} {within}"


def _name_of_values(program: Any, values: Any) -> str:
    is_input = values.op == "placeholder" and values.graph is program.graph
    return str(values.name) if is_input else "values"


def _place_of(node: Any) -> str:
    source = source_of(node.meta.get("stack_trace"))
    return "" if source is None else f"{source.file}:{source.line} ({source.code})"


def _is_stated(node: Any) -> bool:
    """Return whether the line of an assertion states its condition."""
    source = source_of(node.meta.get("stack_trace"))
    return source is not None and any(call in source.code for call in _CALLS)


def _describe(node: Any, names: Mapping[str, str]) -> tuple[str, str]:
    """Return the line of an assertion, and its condition if the line does not state it."""
    condition = str(node.args[1]).removeprefix(_PREFIX).partition(" on node ")[0] if len(node.args) > 1 else ""
    condition = _readable(condition, names)
    place = _place_of(node)
    return place, "" if _is_stated(node) else condition if place else condition or "a value"


def _always_holds(program: Any, condition: Any) -> bool:
    """Whether torch adds a condition on a size that depends on values, and that cannot be otherwise.

    Such a size lies between 0 and the elements of the tensors that it comes from. Kernels themselves look whether the sizes of
    their operands are equal.
    """
    if not isinstance(condition, torch.fx.Node) or condition.target not in (operator.ge, operator.le, operator.eq):
        return False
    size, bound = condition.args
    if condition.target is operator.eq:
        return _is_size(size) and _is_size(bound) and not _results(size.args[0]).isdisjoint(_results(bound.args[0]))
    if condition.target is operator.ge:
        return _is_size(size) and bool(bound == 0)
    if not _is_size(size):
        return False
    sources = _sources(size.args[0])
    if isinstance(bound, torch.fx.Node):
        return _sizes(bound) <= sources
    return bound in {_elements(program, tensor) for tensor in sources}


def _is_size(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and node.target is torch.ops.aten.sym_size.int


def _sources(tensor: torch.fx.Node) -> set[torch.fx.Node]:
    """Return all nodes that a tensor comes from."""
    return _reach(tensor, lambda node: node.all_input_nodes)


def _results(tensor: torch.fx.Node) -> set[torch.fx.Node]:
    """Return all tensors that a tensor is used for."""
    return _reach(tensor, lambda node: [user for user in node.users if isinstance(user.meta.get("val"), torch.Tensor)])


def _reach(start: torch.fx.Node, step: Callable[[torch.fx.Node], Iterable[torch.fx.Node]]) -> set[torch.fx.Node]:
    reached: set[torch.fx.Node] = set()
    waiting = [start]
    while waiting:
        new = {*step(waiting.pop())} - reached
        reached |= new
        waiting += new
    return reached


def _sizes(number: torch.fx.Node) -> set[torch.fx.Node]:
    """Return the tensors whose sizes a number is computed from, and everything else that it is."""
    if _is_size(number):
        return set(number.all_input_nodes)
    return set().union(*map(_sizes, number.all_input_nodes)) if number.all_input_nodes else {number}


def _elements(program: Any, node: torch.fx.Node) -> int | None:
    """Return the largest number of elements of a tensor; None if it is unknown."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    sizes = [dim if isinstance(dim, int) else bounds(program, dim)[1] for dim in value.shape]
    return None if None in sizes else math.prod(sizes)  # type: ignore[arg-type]
