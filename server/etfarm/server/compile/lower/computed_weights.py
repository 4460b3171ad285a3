"""Convolutions whose weights are no constants, which XNNPACK takes in fp32 only: in int8, the runtime crashes on them.

What a model computes of its parameters alone, as weight standardization does, becomes a constant when the quantized program is
made, but only if nothing in between is quantized. So it stays in fp32, and the convolution has int8 weights. Weights that depend
on inputs, that the model creates (`torch.full`) or that come from a state leave their convolution in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx.graph import _PyTreeCodeGen

from etfarm.server.compile.program.fp32_layers import VIEWS, name_of


def find_unquantized(graph: Any) -> list[Any]:
    """Return the nodes of a model's graph that the quantizer has to leave in fp32.

    The graphs of branches and loop bodies get their weights as arguments, and are not changed.
    """
    if not isinstance(graph._codegen, _PyTreeCodeGen):
        return []
    nodes = []
    for node in graph.nodes:
        weight = node.args[1] if node.op == "call_function" and str(node.target).startswith("aten.conv") else None
        if isinstance(weight, torch.fx.Node):
            sources = list(_sources(weight))
            if all(map(_is_constant, (source for source in sources if not source.all_input_nodes))):
                # The quantizer takes the weight itself with the convolution, or not at all.
                nodes += [source for source in sources if source.op == "call_function" and source is not weight]
            else:  # XNNPACK would take what is quantized for a weight that is
                nodes += [node, *_views(weight)]
    return nodes


def _views(node: Any) -> Iterator[Any]:
    """Yield a node and the nodes that it is a view of."""
    yield node
    while name_of(node) in VIEWS:
        node = node.args[0]
        yield node


def _sources(node: Any) -> Iterator[Any]:
    """Yield a node and all that it is computed from."""
    seen = {node}
    queue = [node]
    while queue:
        node = queue.pop()
        yield node
        queue += [each for each in node.all_input_nodes if each not in seen]
        seen.update(node.all_input_nodes)


def _is_constant(node: Any) -> bool:
    """Return whether a node that has no inputs is a tensor that the model does not change."""
    return node.op == "get_attr" and not any(_changes(user) for user in node.users)


def _changes(user: Any) -> bool:
    schema = getattr(user.target, "_schema", None)
    return schema is not None and schema.is_mutable
