"""Special numbers for which XNNPACK computes something else than PyTorch, where a model makes or looks for them.

Any sigmoid may get 1e30, and hardly one does. So an operator is named only if a constant of the model leads to it, such as that
of a mask which the example inputs need not apply, or if the model tests its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

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
_SUMS: Final = frozenset({"add", "sub", "rsub", "maximum"})
_COMPARISONS: Final = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_HUGE: Final = 1e26
"""The least number that makes XNNPACK's polynomials overflow."""
_MOST: Final = 2.0**126
"""The least number whose square root XNNPACK scales wrongly; it has no logarithm of twice as much."""
_WIDE: Final = 1e8
"""The least angle that XNNPACK has other sines of, by more than 1e-4."""
_TINY: Final = 2.0**-126
"""The least number that XNNPACK does not take for 0."""


def _is_huge(number: float) -> bool:
    return _HUGE <= abs(number) < math.inf


def _is_tiny(number: float) -> bool:
    return 0 < abs(number) < _TINY


@dataclass(frozen=True)
class _Case:
    """Operators that compute something else for a value."""

    names: frozenset[str]
    kernels: tuple[str, ...]
    """What the delegation calls the operators that XNNPACK computes them with."""
    leads: Callable[[float], bool] | None
    """Whether they do so for a number that a constant of the model leads to; None if models have no such constants."""
    tests: Callable[[float], bool] | None
    """Whether the model tests for a result that XNNPACK does not give, by an infinity or NaN that it compares it with."""
    what: str
    """The end of a sentence, with {} for the operators."""
    at: int | None = None
    """The argument whose value counts; None for all."""


_CASES: Final = (
    _Case(
        frozenset({"rsqrt"}), ("aten_rsqrt_",), None, math.isinf,
        "the reciprocal square root of 0 as NaN, and the model compares it with infinity, which it is in PyTorch: {}. Compare "
        "its input instead, torch.where(x > 0, torch.rsqrt(x), 0), or write x.pow(-0.5), which the portable kernels compute.",
    ),
    _Case(
        frozenset({"sqrt"}), ("aten_sqrt_",), lambda number: abs(number) >= _MOST, math.isinf,
        "the square root of infinity as NaN and of numbers from 8e37 on as half as large again, and the model has or looks for "
        "infinities there: {}. Write x.pow(0.5), which the portable kernels compute.",
    ),
    _Case(
        frozenset({"log"}), ("aten_log_",), lambda number: 2 * _MOST <= number < math.inf, None,
        "the logarithm of numbers from 1.7e38 on as infinity, and a constant of the model leads to it: {}. Use a smaller one, "
        "such as 1e38 for torch.finfo(torch.float32).max.",
    ),
    _Case(
        frozenset({"sin", "cos"}), ("aten_sin_", "aten_cos_"), lambda number: _WIDE <= abs(number) < math.inf, None,
        "sines and cosines of angles from 1e8 on as other numbers, which may be above 1000, and a constant of the model leads to "
        "it: {}. Write torch.sin(x.double()).float(), which the portable kernels compute.",
    ),
    _Case(
        frozenset({"sigmoid", "silu", "glu"}), ("aten_sigmoid_",), _is_huge, None,
        "the sigmoid of numbers from 1e26 on, positive or negative, as NaN, and a constant of the model leads to it: {}. Use a "
        "smaller one, such as -1e4 for -1e30.",
    ),
    _Case(
        frozenset({"log", "log2", "log10", "rsqrt", "reciprocal"}),
        ("aten_add_", "aten_clamp_", "aten_mul_", "aten_log_", "aten_rsqrt_"), _is_tiny, None,
        "with 0 in place of numbers below 1.2e-38, of which a constant of the model is one that it takes the logarithm of or "
        "divides by: {}. Use a larger one, such as 1e-37 for 1e-45.",
    ),
    _Case(
        frozenset({"div"}), ("aten_add_", "aten_clamp_", "aten_mul_", "aten_div_"), _is_tiny, None,
        "with 0 in place of numbers below 1.2e-38, of which a constant of the model is one that it divides by: {}. Use a larger "
        "one, such as 1e-37 for 1e-45.", at=1,
    ),
    _Case(
        frozenset({"exp", "softplus", "log_sigmoid", "maximum", "minimum"}), ("aten_exp_", "aten_maximum_", "aten_minimum_"),
        math.isnan, math.isnan,
        "a number of NaN, and the model has or looks for NaN there: {}. Set NaN behind these operators, "
        "torch.where(m, torch.nan, torch.exp(x)), and look for it before them, torch.isnan(x).",
    ),
    _Case(
        frozenset({"max_pool2d", "avg_pool2d"}), ("aten_max_pool2d_", "aten_avg_pool2d_"), math.isnan, math.isnan,
        "-inf of NaN in a pool, and the model has or looks for NaN there: {}. Set NaN behind the pool, torch.where(F.max_pool2d("
        "m.float(), 2) > 0, torch.nan, F.max_pool2d(x, 2)), and look for it before, F.max_pool2d(torch.isnan(x).float(), 2) > 0.",
    ),
    _Case(
        frozenset({"upsample_bilinear2d"}), ("aten_upsample_bilinear2d_",), math.isinf, math.isinf,
        "NaN where it interpolates infinity, and the model has or looks for infinities there: {}. Set them behind it, "
        "torch.where(F.interpolate(m.float(), ...) > 0, -torch.inf, F.interpolate(x, ...)).",
    ),
)  # fmt: skip
_OF_TWO: Final = {"aten.max.other": "maximum", "aten.min.other": "minimum"}
"""Other names of operators between two tensors."""


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
            if (_OF_TWO.get(str(node.target)) or name_of(node).rstrip("_")) in case.names
            and (
                (case.leads is not None and any(map(case.leads, _find_leading(node, case.at, values))))
                or (case.tests is not None and any(map(case.tests, _find_tested(node))))
            )
        ]  # fmt: skip
        if nodes:
            sentences.append(f"XNNPACK computes {case.what.format(list_first(map(describe_node, nodes)))}")
    return " ".join(sentences)


def _find_values(program: Any) -> dict[Any, frozenset[float]]:
    """Return the nodes of a program's graph that constants lead to, with the special numbers among these."""
    owned, constants = owned_names(program), {**program.constants, **dict(program.named_buffers())}
    values: dict[Any, frozenset[float]] = {}
    for node in program.graph.nodes:
        reached: set[float] = set()
        name = name_of(node).rstrip("_")
        if node.op == "placeholder":
            reached.update(_numbers_of(constants.get(owned.get(node.name, ""))))
        elif name in PASSING or name in _FILLING:
            # Nothing divided by a huge number is huge, and nothing added to 1 is tiny.
            numbers = [] if name == "div" else _numbers_among(node)
            reached.update(filter(_is_special, numbers))
            reached.update(
                number for each in node.all_input_nodes for number in values.get(each, ())
                if not (_is_tiny(number) and (name == "div" or (name in _SUMS and any(abs(one) >= _TINY for one in numbers))))
            )  # fmt: skip
        elif name in ("clamp", "clamp_min"):
            reached.update(filter(_is_tiny, _numbers_among(node)))
        if reached:
            values[node] = frozenset(reached)
    return values


def _find_leading(node: Any, at: int | None, values: Mapping[Any, frozenset[float]]) -> Iterable[float]:
    """Return the special numbers that lead to an operator, or to one argument of it."""
    nodes = node.all_input_nodes if at is None else node.args[at : at + 1]
    return [number for each in nodes if isinstance(each, torch.fx.Node) for number in values.get(each, ())]


def _numbers_among(node: Any) -> list[float]:
    return [each for each in (*node.args, *node.kwargs.values()) if isinstance(each, float)]


def _is_special(number: float) -> bool:
    return not (abs(number) < _WIDE) or _is_tiny(number)


def _numbers_of(tensor: Any) -> Iterable[float]:
    """Return special numbers among a tensor's elements: of each kind the one that is farthest from others, by their sign."""
    if tensor is None or not tensor.is_floating_point() or not tensor.numel():
        return ()
    elements = tensor.double().ravel()
    finite = elements[elements.isfinite()]
    tiny = finite[(finite != 0) & (finite.abs() < _TINY)]
    ends = [finite.min(), finite.max()] if finite.numel() else []
    return [float(each) for each in (*elements[~elements.isfinite()].unique(), *ends, *tiny[:1]) if _is_special(float(each))]


def _find_tested(node: Any) -> Iterable[float]:
    """Return the infinities that users of a node compare it with, and NaN if one looks for NaN."""
    for user in node.users:
        name = name_of(user).rstrip("_")
        if name == "isinf":
            yield math.inf
        elif name in ("isnan", "isfinite") or (name in ("eq", "ne") and user.args[0] is user.args[1]):
            yield math.nan
        elif name in _COMPARISONS and isinstance(user.args[1], float):
            yield user.args[1]
