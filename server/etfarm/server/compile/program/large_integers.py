"""Operators of int32 and int64 that ExecuTorch computes in floats: inexact for large integers, however small the examples are."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from etfarm.server.compile.program.descriptions import describe_node, list_first
from etfarm.server.compile.program.integer_ranges import OF_TENSORS, IntegerRanges
from etfarm.server.compile.program.places import all_nodes
from etfarm.server.compile.program.values import input_names
from etfarm.server.graphs.views import name_of

_WIDE: Final = (torch.int32, torch.int64)
"""Dtypes of integers that float32 cannot hold."""
_INSTEAD: Final = {
    "sum": (
        "The runtime sums one dim in float32, which is inexact where a sum is above 2**24 (16777216). Write "
        "x.sum(dim, dtype=torch.float64).long(), which is exact up to 2**53."
    ),
    "pow": (
        "The runtime raises integers to a power in float64, which is inexact where the result is above 2**53 (int32: where it "
        "overflows, 46341**2), and has other results than PyTorch where it overflows. Write x * x for x**2."
    ),
    "fmod": (
        "The runtime computes fmod in float64, which is inexact where an integer is above 2**53. "
        "Write x - torch.div(x, n, rounding_mode='trunc') * n."
    ),
}
"""What is inexact, and what works instead."""
_BOUNDING: Final = frozenset({
    "arange", "argmax", "argmin", "argsort", "bincount", "bucketize", "empty_like", "fmod", "full", "full_like",
    "new_empty", "new_full", "new_ones", "new_zeros", "nonzero", "one_hot", "ones", "ones_like", "randint", "remainder",
    "searchsorted", "sign", "topk", "zeros", "zeros_like",
})  # fmt: skip
"""Operators whose integers are indices, counts, remainders or constants, which are small."""
_SMALL: Final = 2**24
"""Integers up to this are small, if they are not more."""
_UPPER_BOUND_AT: Final = {"clamp": 2, "clamp_max": 1, "clip": 2, "minimum": 1}
"""The argument of operators that is an upper bound of their values."""
INDICES_AT: Final = {
    "embedding": 1, "gather": 2, "index": 1, "index_add": 2, "index_copy": 2, "index_fill": 2, "index_put": 1, "index_select": 2,
    "scatter": 2, "scatter_add": 2, "scatter_reduce": 2, "take": 1, "take_along_dim": 1,
}  # fmt: skip
"""The argument of operators that says where values are read or written, on which the values do not depend."""


def describe(program: Any) -> str:
    """Return which operators of an exported program are inexact for large integers, and what to do; empty without any.

    Only operators of integers that come from an input are named, and only if no operator between bounds them. An input that is
    0 or 1 in the example inputs counts as a mask.
    """
    large = _find_large(program)
    nodes_by_kind: dict[str, list[Any]] = defaultdict(list)
    for node in all_nodes(program):
        if (kind := _kind_of(node)) and any(each in large for each in node.all_input_nodes):
            nodes_by_kind[kind].append(node)
    return " ".join(f"{list_first(map(describe_node, nodes))}. {_INSTEAD[kind]}" for kind, nodes in nodes_by_kind.items())


def _kind_of(node: Any) -> str:
    """Return the key in `_INSTEAD` of an operator that is computed in floats; empty for others."""
    name, value = name_of(node).rstrip("_"), node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype not in _WIDE:
        return ""
    if name == "sum":
        # The kernel's fast path. Sums of several dims, and sums with another dtype than the input's, are of int64.
        dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        one = isinstance(dims, int) or (isinstance(dims, list | tuple) and len(dims) == 1)
        return "sum" if one and node.args[0].meta["val"].dtype == value.dtype else ""
    if name in ("pow", "square"):
        base = node.args[0]
        return "" if isinstance(base, int) and base.bit_count() == 1 else "pow"  # float64 holds powers of two exactly
    return "fmod" if name == "fmod" and value.dtype == torch.int64 else ""


def _find_large(program: Any) -> set[Any]:
    """Return the nodes of a program's graph whose integers come from an input, without operators between that bound them."""
    names = input_names(program)
    leaves = pytree.tree_leaves(program.example_inputs) if program.example_inputs else [None] * len(names)
    inputs = {name for name, leaf in zip(names, leaves, strict=True) if not _is_mask(leaf)}
    large: set[Any] = set()
    ranges = IntegerRanges(program)
    for node in program.graph.nodes:
        if getattr(node.meta.get("val"), "dtype", None) in _WIDE and (node.name in inputs or _is_large(node, large, ranges)):
            large.add(node)
    return large


def _is_large(node: Any, large: set[Any], ranges: IntegerRanges) -> bool:
    """Return whether an operator may give large integers, of operands of which some are."""
    name = OF_TENSORS.get(str(node.target)) or name_of(node).rstrip("_")
    if node.op == "placeholder" or name in _BOUNDING or max(map(abs, ranges.of(node))) <= _SMALL:
        return False
    arguments = dict(enumerate(node.args)) | node.kwargs
    if name in _UPPER_BOUND_AT:
        bound = arguments.get(_UPPER_BOUND_AT[name], arguments.get("max"))
        return arguments[0] in large and (bound is None or bound in large or _SMALL < ranges.of(bound)[1] < math.inf)
    arguments.pop(INDICES_AT.get(name), None)
    return not large.isdisjoint(pytree.tree_leaves(arguments))


def _is_mask(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and bool(((leaf == 0) | (leaf == 1)).all())
