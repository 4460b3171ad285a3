"""Zero points of quantized weights, which XNNPACK ignores where each channel or group has its own. Stdlib only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from etfarm.server.compile.errors import zero_points_ignored
from etfarm.server.compile.program.descriptions import describe_node, list_first, schema_name
from etfarm.server.compile.program.fp32_layers import OPERANDS
from etfarm.server.compile.program.places import all_nodes, module_path
from etfarm.server.compile.program.suspects import owned_names
from etfarm.server.graphs.views import VIEWS, name_of

_ZERO_POINTS: Final = {
    "torchao.dequantize_affine.default": 3,
    "quantized_decomposed.dequantize_per_channel.default": 2,
    "quantized_decomposed.dequantize_per_channel_group.default": 2,
}
"""Operators that dequantize weights, with the index of their zero points."""


def check(program: Any, method: str) -> None:
    """Check that the weights of a program for XNNPACK have no zero points other than 0.

    Raises:
        UNSUPPORTED_QUANTIZED_OP: some have.
    """
    owned, values = owned_names(program), {**program.constants, **program.state_dict}
    layers: list[Any] = []
    for node in all_nodes(program):
        index = _ZERO_POINTS.get(str(node.target))
        points = values.get(owned.get(getattr(node.args[index], "name", ""), "")) if index is not None else None
        if points is not None and bool(points.count_nonzero()):
            layers.extend(_layers(node))
    if layers:
        names = ", ".join(sorted({schema_name(layer) or layer.name for layer in layers}))
        raise zero_points_ignored(method, list_first(map(_describe, layers)), names)


def _describe(layer: Any) -> str:
    """Return a layer's module with its operator, like `head, aten::linear at net.py:31 (self.head(x))`."""
    return ", ".join(filter(None, (module_path(layer), describe_node(layer))))


def _layers(node: Any) -> Iterator[Any]:
    """Yield the heavy operators that take a node's value or a view of it."""
    for user in node.users:
        if name_of(user) in OPERANDS:
            yield user
        elif name_of(user) in VIEWS:
            yield from _layers(user)
