"""The share of a graph that is delegated, as shown to users."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

GLUE: Final = ("getitem", "executorch_call_delegate")
"""Nodes that only connect a graph and compute nothing. ExecuTorch counts them; counts for users exclude them."""


def nodes(delegation: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of computing nodes inside and outside of delegates, from a method's delegation in etfarm.report/1."""
    glue = [operator for operator in delegation["operators"] or () if operator["op"] in GLUE]
    inside = delegation["delegated_nodes"] - sum(operator["delegated"] for operator in glue)
    outside = delegation["non_delegated_nodes"] - sum(operator["non_delegated"] for operator in glue)
    return inside, outside
