"""Powers of integers that ExecuTorch computes in float64: inexact for large integers, however small the examples are."""

from __future__ import annotations

import math
from typing import Any, Final

import torch

from etfarm.server.compile.program.descriptions import describe_node, list_first
from etfarm.server.compile.program.integer_ranges import IntegerRanges
from etfarm.server.compile.program.places import all_nodes
from etfarm.server.graphs.views import name_of

_INSTEAD: Final = (
    "The runtime raises integers to a power that is a tensor in float64, which is inexact where the result is above 2**53, and "
    "has other results than PyTorch where it overflows (int32: 46341**2). Where the power is a number, write x**2, which is "
    "exact; else multiply: torch.where(n > 1, x * x, x) for powers n of 1 and 2."
)
"""What is inexact, and what works instead."""


def describe(program: Any) -> str:
    """Return which powers of an exported program are inexact for large integers, and what to do; empty without any.

    Powers that operators bound are left out. Those with a number are multiplied; see `lower.arithmetic`.
    """
    powers = [node for node in all_nodes(program) if _is_power(node)]
    ranges = IntegerRanges(program) if powers else None
    named = [describe_node(node) for node in powers if _may_exceed(node, ranges)]
    return f"{list_first(named)}. {_INSTEAD}" if named else ""


def _is_power(node: Any) -> bool:
    """Return whether an operator computes powers of integers in float64, which holds powers of two exactly."""
    dtype = getattr(node.meta.get("val"), "dtype", None)
    if name_of(node).rstrip("_") != "pow" or dtype is None or dtype.is_floating_point or dtype.is_complex:
        return False
    base, exponent = node.args
    return isinstance(exponent, torch.fx.Node) and not (isinstance(base, int) and base.bit_count() == 1)


def _may_exceed(node: Any, ranges: Any) -> bool:
    """Return whether a power may be more than float64 holds, or than an int32, of which narrower integers are cut."""
    base, exponent = node.args
    largest, highest = max(map(abs, ranges.of(base))), ranges.of(exponent)[1]
    bits = 53 if node.meta["val"].dtype == torch.int64 else 31
    return bool(largest > 1 and highest > 0 and highest * math.log2(largest) >= bits)
