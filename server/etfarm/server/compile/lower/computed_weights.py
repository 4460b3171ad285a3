"""Convolutions and linear layers whose weights or biases are no constants: in int8, XNNPACK fails or the runtime crashes on them.

What a model computes of its parameters alone, as weight standardization does, becomes a constant when the quantized program is
made, but only if nothing in between is quantized. So it stays in fp32, and the layer has int8 weights. Weights that depend on
inputs, that the model creates (`torch.full`) or that come from a state, also of another method, leave their layer in fp32, and so
do biases that are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from etfarm.server.graphs.views import VIEWS, name_of
from etfarm.wire.shared_state import PREFIX


def find_unquantized(graph: Any) -> list[Any]:
    """Return the nodes of a model's graph that the quantizer has to leave in fp32."""
    nodes = []
    for node in graph.nodes:
        if node.op != "call_function" or not str(node.target).startswith(("aten.conv", "aten.linear")):
            continue
        weight, *bias = [each for each in node.args[1:3] if isinstance(each, torch.fx.Node)]
        if "linear" in str(node.target) and weight.op == "get_attr" and any(map(_changes, weight.users)):
            continue  # the runtime crashes on it in fp32, too: it is refused by name
        computed = [source for source in _sources(weight) if source.op == "call_function"]
        is_constant = _is_of_constants(weight)
        if is_constant and all(_is_constant(each) for each in bias):
            # The quantizer takes the weight itself with the layer, or not at all.
            nodes += [source for source in computed if source is not weight]
        else:  # XNNPACK would take what is quantized for a weight that is
            nodes += [node, *(computed if is_constant else _views(weight))]
            nodes += [view for each in bias for view in _views(each)]
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


def _is_of_constants(node: Any) -> bool:
    """Return whether a node is computed of tensors alone that no method of the model changes."""
    return all(_is_constant(source) for source in _sources(node) if not source.all_input_nodes)


def _is_constant(node: Any) -> bool:
    """Return whether a node that has no inputs is a tensor that no method of the model changes."""
    is_shared = str(node.target).startswith(PREFIX)  # by methods, of which one changes it
    return node.op == "get_attr" and not is_shared and not any(_changes(user) for user in node.users)


def _changes(user: Any) -> bool:
    schema = getattr(user.target, "_schema", None)
    return schema is not None and schema.is_mutable
