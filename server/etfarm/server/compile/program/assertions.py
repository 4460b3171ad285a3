"""Assertions on values in an exported program, which a lowered one does not check."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any, Final

import torch

from etfarm.server.compile.program.loading import bounds
from etfarm.server.compile.program.places import all_nodes
from etfarm.server.graphs.sources import source_of

_MAX_SHOWN: Final = 3
_ON_TENSORS: Final = ("_assert_async", "_functional_assert_async")
_ON_NUMBERS: Final = ("_assert_scalar", "_functional_assert_scalar")
_PREFIX: Final = "Runtime assertion failed for expression "
_CALLS: Final = ("_check", "assert")
"""What a line contains that states its assertion itself."""


def describe(program: Any, method: str) -> str:
    """Return which assertions of a method's values the device does not check; empty if there are none.

    Lowering drops all assertions. Those that torch adds by itself, for sizes that cannot be otherwise, are not named.
    """
    texts = list(dict.fromkeys(_find(program)))
    if not texts:
        return ""
    more = f"; and {len(texts) - _MAX_SHOWN} more" if len(texts) > _MAX_SHOWN else ""
    return (
        f"The program does not check what {method} asserts of values: {'; '.join(texts[:_MAX_SHOWN])}{more}. "
        "Where PyTorch would raise an error, the device goes on."
    )


def _find(program: Any) -> Iterator[str]:
    for node in all_nodes(program):
        name = getattr(node.target, "_schema", None) and node.target._schema.name.partition("::")[2]
        if name in _ON_TENSORS or (name in _ON_NUMBERS and not _is_of_torch(program, node.args[0])):
            yield _describe(node)


def _describe(node: Any) -> str:
    condition = str(node.args[1]).removeprefix(_PREFIX).partition(" on node ")[0] if len(node.args) > 1 else ""
    source = source_of(node.meta.get("stack_trace"))
    if source is None:
        return condition or "a value"
    place = f"{source.file}:{source.line} ({source.code})"
    return place if not condition or any(call in source.code for call in _CALLS) else f"{condition} at {place}"


def _is_of_torch(program: Any, condition: Any) -> bool:
    """Whether torch adds this condition by itself.

    It does on sizes that depend on values: that they lie between 0 and the elements that there are, and that sizes of operands
    are equal, at which kernels look themselves.
    """
    if not isinstance(condition, torch.fx.Node) or condition.target not in (operator.ge, operator.le, operator.eq):
        return False
    size, bound = condition.args
    if condition.target is operator.eq:
        return _is_size(size) and _is_size(bound)
    if not _is_size(size) or condition.target is operator.ge:
        return _is_size(size) and bool(bound == 0)
    return isinstance(bound, torch.fx.Node) or bound in {_elements(program, tensor) for tensor in size.args[0].all_input_nodes}


def _is_size(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and node.target is torch.ops.aten.sym_size.int


def _elements(program: Any, node: torch.fx.Node) -> int | None:
    """Return the largest number of elements of a tensor; None if it is unknown."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    sizes = [dim if isinstance(dim, int) else bounds(program, dim)[1] for dim in value.shape]
    return None if None in sizes else math.prod(sizes)  # type: ignore[arg-type]
