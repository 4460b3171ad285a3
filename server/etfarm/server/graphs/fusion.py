"""Operators of a graph that XNNPACK computes together or with common weights. For children."""

from __future__ import annotations

from typing import Any, Final

import torch

_ATEN: Final = torch.ops.aten

LAYERS: Final = frozenset(
    {
        _ATEN.linear.default, _ATEN.conv1d.default, _ATEN.conv2d.default, _ATEN.conv2d.padding, _ATEN.conv1d.padding,
        _ATEN.convolution.default, _ATEN.conv_transpose1d.default, _ATEN.conv_transpose2d.input,
    }
)  # fmt: skip
"""Operators with weights, which are arguments after the input."""

ACTIVATIONS: Final = frozenset(
    {
        _ATEN.relu.default,
        _ATEN.relu_.default,
        _ATEN.relu6.default,
        _ATEN.relu6_.default,
        _ATEN.hardtanh.default,
        _ATEN.hardtanh_.default,
    }
)
"""Operators that XNNPACK fuses with the layer before them.

Source: FuseActivationPass of executorch/backends/xnnpack/_passes/fuse_activation_pass.py 1.5.1.
"""


def shared_layers(graph: torch.fx.Graph) -> list[tuple[torch.fx.Node, list[torch.fx.Node]]]:
    """Return the parameters that several layers use, each with these layers; quantized parameters count as well."""
    shared = []
    for node in graph.nodes:
        if node.op in ("get_attr", "placeholder"):
            layers = [layer for user in node.users for layer in _layers(user) if node is not layer.args[0]]
            if len(layers) > 1:
                shared.append((node, layers))
    return shared


def takes_quantized(layer: torch.fx.Node) -> bool:
    """Return whether a layer's input is quantized."""
    return isinstance(layer.args[0], torch.fx.Node) and _is_quantization(layer.args[0])


def split_activations(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Return the layers whose output is quantized with other scales before the activation that XNNPACK fuses with them."""
    split = []
    for node in graph.nodes:
        source: Any = node.args[0] if node.target in ACTIVATIONS else None
        scales: Any = None
        while isinstance(source, torch.fx.Node) and _is_quantization(source) and len(source.users) == 1:
            scales, source = source.args[1:3], source.args[0]
        after = next((user for user in node.users if _is_quantization(user)), None)
        is_same = after is not None and after.args[1:3] == scales
        if scales is not None and not is_same and isinstance(source, torch.fx.Node) and source.target in LAYERS:
            split.append(source)
    return split


def _layers(user: torch.fx.Node) -> list[torch.fx.Node]:
    """Return a user that is a layer, or the layers behind one that dequantizes."""
    if user.target in LAYERS:
        return [user]
    return [layer for layer in user.users if layer.target in LAYERS] if _is_quantization(user) else []


def _is_quantization(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and str(node.target).startswith("quantized_decomposed.")
