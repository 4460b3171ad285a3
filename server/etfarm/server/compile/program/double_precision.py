"""Operators of float64 that ExecuTorch's kernels compute in float32.

Source: native_layer_norm, native_group_norm, _adaptive_avg_pool2d and _upsample_bilinear2d_aa of kernels/portable/cpu, of
executorch 1.5.1.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from etfarm.server.compile.program.descriptions import describe_node, list_first
from etfarm.server.compile.program.places import all_nodes
from etfarm.server.graphs.views import name_of

_NORMS: Final = frozenset({"layer_norm", "native_layer_norm", "group_norm", "native_group_norm", "instance_norm"})
_RESIZES: Final = frozenset({"adaptive_avg_pool1d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d", "_upsample_bilinear2d_aa"})
_AS_NORM: Final = (
    "Write a norm as y / (y.square().mean(dims, keepdim=True) + eps).sqrt() with y = x - x.mean(dims, keepdim=True)."
)


def describe(program: Any) -> str:
    """Return which operators of float64 are computed in float32, and what to do; empty without any."""
    nodes = [node for node in all_nodes(program) if _is_narrowed(node)]
    if not nodes:
        return ""
    remedies = ["Nothing has to be done if six digits are enough."]
    if any(name_of(node) in _NORMS for node in nodes):
        remedies.append(_AS_NORM)
    if any(name_of(node) not in _NORMS for node in nodes):
        remedies.append("Write F.avg_pool2d for adaptive pools, and leave out antialias=True.")
    shown = list_first(map(describe_node, nodes))
    return f"the runtime computes operators of float64 in float32: {shown}. {' '.join(remedies)}"


def _is_narrowed(node: Any) -> bool:
    if name_of(node) not in _NORMS | _RESIZES:
        return False
    values = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    if not values or getattr(values[0], "dtype", None) != torch.float64:
        return False
    return "pool" not in name_of(node) or any(size != 1 for size in torch.utils._pytree.tree_leaves(node.args[1]))  # else a mean
