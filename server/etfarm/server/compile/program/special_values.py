"""Infinities, NaN and huge numbers for which XNNPACK computes something else than PyTorch, where a model makes or looks for them.

Any sigmoid may get 1e30, and hardly one does. So an operator is named only if a constant of the model leads to it, such as that
of a mask which the example inputs need not apply, or if the model tests its result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from etfarm.server.compile.program.descriptions import describe_node, list_first
from etfarm.server.compile.program.places import all_nodes
from etfarm.server.compile.program.suspects import owned_names
from etfarm.server.graphs.views import name_of
from etfarm.v1.compile_pb2 import OperatorDelegation

PASSING: Final = frozenset({
    "add", "sub", "rsub", "mul", "div", "neg", "maximum", "where", "masked_fill", "view", "reshape", "unsqueeze", "squeeze",
    "expand", "expand_as", "repeat", "slice", "select", "permute", "transpose", "to", "_to_copy", "type_as", "clone",
    "contiguous", "detach", "alias", "flatten", "unflatten", "narrow", "_assert_tensor_metadata",
})  # fmt: skip
"""Names of operators that may be between a mask and the operator that it is for."""
_FILLING: Final = frozenset({"full", "full_like", "new_full", "scalar_tensor", "fill", "lift_fresh_copy"})
_COMPARISONS: Final = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_HUGE: Final = 1e26
"""The least number that makes XNNPACK's polynomials overflow."""


class _Value(Enum):
    INFINITE = 1
    HUGE = 2
    NAN = 3


@dataclass(frozen=True)
class _Case:
    """Operators that compute something else for a value."""

    names: frozenset[str]
    kernels: tuple[str, ...]
    """What the delegation calls the operators that XNNPACK computes them with."""
    leading: _Value | None
    """The value that a constant of the model leads to, if it is one that models have."""
    tested: _Value | None
    """The value of the result that the model tests and XNNPACK does not give."""
    what: str
    """The end of a sentence, with {} for the operators."""


_CASES: Final = (
    _Case(
        frozenset({"rsqrt"}), ("aten_rsqrt_",), None, _Value.INFINITE,
        "the reciprocal square root of 0 as NaN, and the model compares it with infinity, which it is in PyTorch: {}. Compare "
        "its input instead, torch.where(x > 0, torch.rsqrt(x), 0), or write x.pow(-0.5), which the portable kernels compute.",
    ),
    _Case(
        frozenset({"sqrt"}), ("aten_sqrt_",), _Value.INFINITE, _Value.INFINITE,
        "the square root of infinity as NaN, and the model has or looks for infinities there: {}. Write x.pow(0.5), which the "
        "portable kernels compute.",
    ),
    _Case(
        frozenset({"sigmoid", "silu"}), ("aten_sigmoid_",), _Value.HUGE, None,
        "the sigmoid of numbers from 1e26 on, positive or negative, as NaN, and a constant of the model leads to it: {}. Use a "
        "smaller one, such as -1e4 for -1e30.",
    ),
    _Case(
        frozenset({"exp", "softplus", "log_sigmoid", "maximum", "minimum"}), ("aten_exp_", "aten_maximum_", "aten_minimum_"),
        _Value.NAN, _Value.NAN,
        "a number of NaN, and the model has or looks for NaN there: {}. Set NaN behind these operators, "
        "torch.where(m, torch.nan, torch.exp(x)), and look for it before them, torch.isnan(x).",
    ),
    _Case(
        frozenset({"max_pool2d", "avg_pool2d"}), ("aten_max_pool2d_", "aten_avg_pool2d_"), _Value.NAN, _Value.NAN,
        "-inf of NaN in a pool, and the model has or looks for NaN there: {}. Set NaN behind the pool, torch.where(F.max_pool2d("
        "m.float(), 2) > 0, torch.nan, F.max_pool2d(x, 2)), and look for it before, F.max_pool2d(torch.isnan(x).float(), 2) > 0.",
    ),
)  # fmt: skip


def describe(program: Any, operators: Iterable[OperatorDelegation]) -> str:
    """Return which operators of an exported program differ for special values, and what to do; empty without any.

    Args:
        operators: the delegation to XNNPACK.
    """
    delegated = [row.op for row in operators if row.delegated]
    cases = [case for case in _CASES if any(op.startswith(case.kernels) for op in delegated)]
    values = _find_values(program) if cases else {}
    sentences = []
    for case in cases:
        nodes = [
            node for node in all_nodes(program)
            if name_of(node).rstrip("_") in case.names
            and (
                any(case.leading in values.get(each, ()) for each in node.all_input_nodes)
                or any(_tests(user, case.tested) for user in node.users)
            )
        ]  # fmt: skip
        if nodes:
            sentences.append(f"XNNPACK computes {case.what.format(list_first(map(describe_node, nodes)))}")
    return " ".join(sentences)


def _find_values(program: Any) -> dict[Any, frozenset[_Value]]:
    """Return the nodes of a program's graph that constants lead to, with the special ones among these."""
    owned, constants = owned_names(program), {**program.constants, **dict(program.named_buffers())}
    values: dict[Any, frozenset[_Value]] = {}
    for node in program.graph.nodes:
        reached: set[_Value] = set()
        name = name_of(node).rstrip("_")
        if node.op == "placeholder":
            reached.update(_values_of(constants.get(owned.get(node.name, ""))))
        elif name in PASSING or name in _FILLING:
            # Nothing divided by a huge number is huge.
            numbers = [] if name == "div" else [each for each in (*node.args, *node.kwargs.values()) if isinstance(each, float)]
            reached.update(value for value in map(_value_of, numbers) if value is not None)
            reached.update(value for each in node.all_input_nodes for value in values.get(each, ()))
        if reached:
            values[node] = frozenset(reached)
    return values


def _value_of(number: float) -> _Value | None:
    if math.isnan(number):
        return _Value.NAN
    if math.isinf(number):
        return _Value.INFINITE
    return _Value.HUGE if abs(number) >= _HUGE else None


def _values_of(tensor: Any) -> Iterable[_Value]:
    """Return the special values among a tensor's elements."""
    if tensor is None or not tensor.is_floating_point() or not tensor.numel():
        return ()
    elements = tensor.double()
    rows = {
        _Value.NAN: elements.isnan(), _Value.INFINITE: elements.isinf(),
        _Value.HUGE: elements.isfinite() & (elements.abs() >= _HUGE),
    }  # fmt: skip
    return [value for value, row in rows.items() if bool(row.any())]


def _tests(node: Any, value: _Value | None) -> bool:
    """Return whether a node tests its input for a value."""
    name = name_of(node).rstrip("_")
    if value is _Value.INFINITE:
        return name == "isinf" or (name in _COMPARISONS and node.args[1] in (math.inf, -math.inf))
    if value is _Value.NAN:
        return name in ("isnan", "isfinite") or (name in ("eq", "ne") and node.args[0] is node.args[1])
    return False
