"""GELUs that XNNPACK computes exactly, although the model approximates them. Stdlib only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from etfarm.server.compile.program.descriptions import describe_node, list_first
from etfarm.server.compile.program.places import all_nodes
from etfarm.server.graphs.views import name_of
from etfarm.v1.compile_pb2 import OperatorDelegation

_INSTEAD: Final = "0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))"


def describe_exact(program: Any, operators: Iterable[OperatorDelegation]) -> str:
    """Return which approximated GELUs of an exported program are computed exactly, and what to do; empty without any.

    XNNPACK's part of ExecuTorch 1.5 ignores `approximate`.

    Args:
        operators: the delegation to XNNPACK.
    """
    if not any(row.op.startswith("aten_gelu") and row.delegated for row in operators):
        return ""
    nodes = [node for node in all_nodes(program) if name_of(node) == "gelu" and node.kwargs.get("approximate") == "tanh"]
    if not nodes:
        return ""
    return (
        f"XNNPACK computes the exact GELU where the model approximates it with tanh: {list_first(map(describe_node, nodes))}. "
        f"They differ by at most 0.0005. Where that matters, write {_INSTEAD}."
    )
