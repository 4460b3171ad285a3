"""How much of a graph is delegated, as people are told it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

GLUE: Final = ("getitem", "executorch_call_delegate")
"""Nodes that hold a graph together and compute nothing. ExecuTorch counts them; people are told of the others."""


def nodes(delegation: Mapping[str, Any]) -> tuple[int, int]:
    """How many nodes that compute something are within delegates, and how many are outside, of a method's delegation in
    etfarm.report/1."""
    glue = [one for one in delegation["operators"] or () if one["op"] in GLUE]
    inside = delegation["delegated_nodes"] - sum(one["delegated"] for one in glue)
    outside = delegation["non_delegated_nodes"] - sum(one["non_delegated"] for one in glue)
    return inside, outside
