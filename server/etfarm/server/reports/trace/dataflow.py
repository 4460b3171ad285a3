"""The data flow between the rows of a report, from the edge graph of the ETRecord.

Operators without a row, such as a relu that a backend fused into a convolution or a view without cost, forward their inputs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Final

from etfarm.server.graphs.origins import Operator
from etfarm.server.reports.trace.graph import base_name
from etfarm.v1 import report_pb2

MOST_INPUTS: Final = 64
"""Maximum number of rows that one row or value is traced back to."""


def connect(rows: Sequence[report_pb2.OperatorRow], operators: Sequence[Operator]) -> None:
    """Set `input_rows` of each row.

    Args:
        rows: in the order of execution, with their debug handles.
        operators: the operators of the edge graph, in the graph's order.
    """
    candidates = _by_handle(rows)
    producers: dict[Hashable, frozenset[int]] = {}
    """By value: the rows that it comes from."""
    inputs: dict[int, set[int]] = {}
    for operator in operators:
        sources = _first(index for value in operator.takes for index in producers.get(value, ()))
        owners = _owners(operator, candidates)
        # An operator that became several kernels passes its inputs through all of them.
        for row in owners:
            inputs.setdefault(row.index, set()).update(source for source in sources if source < row.index)
            sources = frozenset((row.index,))
        producers.update(dict.fromkeys(operator.gives, sources))
    for row in rows:
        row.input_rows.extend(sorted(inputs.get(row.index, ()))[:MOST_INPUTS])


def _first(indexes: Iterable[int]) -> frozenset[int]:
    return frozenset(sorted(set(indexes))[:MOST_INPUTS])


def _by_handle(rows: Sequence[report_pb2.OperatorRow]) -> dict[int, list[report_pb2.OperatorRow]]:
    """Return the rows of each debug handle, in order; a delegate's own row only if no kernel of it has handles."""
    attributed = {row.parent for row in rows if row.HasField("parent") and row.debug_handles}
    by_handle: dict[int, list[report_pb2.OperatorRow]] = {}
    for row in rows:
        if row.kind != report_pb2.OPERATOR_KIND_REST and row.index not in attributed:
            for handle in row.debug_handles:
                by_handle.setdefault(handle, []).append(row)
    return by_handle


def _owners(operator: Operator, candidates: dict[int, list[report_pb2.OperatorRow]]) -> list[report_pb2.OperatorRow]:
    """Return the rows that execute an operator, in order: those of its handle that have its type."""
    rows = {row.index: row for handle in operator.handles for row in candidates.get(handle, ())}
    return [row for _, row in sorted(rows.items()) if any(base_name(name) == operator.name for name in row.op_types)]
