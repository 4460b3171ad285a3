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


def undelegated_reason(delegation: Mapping[str, Any] | None, row: Mapping[str, Any]) -> str:
    """Return why an operator of the profile was not delegated, in the partitioner's words; empty if that is unknown.

    Args:
        delegation: the method's delegation in etfarm.report/1; None if nothing was partitioned.
        row: a row of `operators` in etfarm.report/1.
    """
    if delegation is None or row["kind"] != "OPERATOR" or row["delegated"]:
        return ""
    # `aten.eq.Scalar` is `aten_eq_scalar` there.
    ops = {op.replace(".", "_").lower() for op in row["op_types"] or ()}
    operators = [operator for operator in delegation["operators"] or () if operator["op"].lower() in ops]
    places = [place for operator in operators for place in operator["places"] or ()]
    here = [place for place in places if _line(place) == _line(row) and place["module"] == row["module"]]
    # Without a place of its own, the row has the reason that all nodes of the operator share.
    reasons = {place.get("undelegated_reason") or "" for place in here or places}
    return reasons.pop() if len(reasons) == 1 else ""


def _line(entry: Mapping[str, Any]) -> tuple[str, int] | None:
    return (entry["source"]["file"], entry["source"]["line"]) if entry["source"] else None
