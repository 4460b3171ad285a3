"""Batch norms of programs that run_decompositions() made functional. torch is imported only in functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.fx import Graph


def join_batch_norms(graph: Graph) -> None:
    """Give batch norms the operator again that quantizers fold into the layer before it."""
    import torch

    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten._native_batch_norm_legit_no_training.default):
        if [item.args[1] for item in node.users] != [0]:
            continue  # the other results, which are empty, are used
        (item,) = node.users
        *tensors, momentum, epsilon = node.args
        with graph.inserting_before(node):
            whole = graph.call_function(aten.batch_norm.default, (*tensors, False, momentum, epsilon, False))
        whole.meta = item.meta
        item.replace_all_uses_with(whole)
        graph.erase_node(item)
        graph.erase_node(node)
