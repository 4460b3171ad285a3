"""Reciprocal square roots that a model compares with infinity, which XNNPACK gives as NaN."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

from etfarm.server.compile.program.descriptions import describe_node, list_first
from etfarm.server.compile.program.places import all_nodes
from etfarm.server.graphs.views import name_of
from etfarm.v1.compile_pb2 import OperatorDelegation

_COMPARISONS: Final = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


def describe(program: Any, operators: Iterable[OperatorDelegation]) -> str:
    """Return which reciprocal square roots of an exported program miss infinity, and what to do; empty without any.

    Args:
        operators: the delegation to XNNPACK.
    """
    if not any(row.op.startswith("aten_rsqrt") and row.delegated for row in operators):
        return ""
    roots = [node for node in all_nodes(program) if name_of(node).rstrip("_") == "rsqrt"]
    shown = list_first(describe_node(node) for node in roots if any(map(_is_of_infinity, node.users)))
    if not shown:
        return ""
    return (
        f"XNNPACK computes the reciprocal square root of 0 as NaN, and the model compares it with infinity, which it is in "
        f"PyTorch: {shown}. Compare its input instead, torch.where(x > 0, torch.rsqrt(x), 0), or write "
        "x.pow(-0.5), which the portable kernels compute."
    )


def _is_of_infinity(node: Any) -> bool:
    """Return whether a node compares a value with infinity, and differs where the value is NaN."""
    name = name_of(node).rstrip("_")
    return name == "isinf" or (name in _COMPARISONS and node.args[1] in (math.inf, -math.inf))
