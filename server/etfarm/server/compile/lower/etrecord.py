"""ETRecords of any methods and stages, as complete as ExecuTorch's ETRecord of a single method `forward`.

ExecuTorch only keeps the exported program of `forward`, stores a single method's edge program as `forward` whatever its
name is, and drops the edge programs of EDGE_PROGRAM_MANAGER_TRANSFORM.
Source: executorch.devtools.etrecord._etrecord, whose reader accepts everything that is added here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

EXPORTED: Final = "exported"
"""Prefix of the exported programs of several methods in a record: `exported/METHOD`."""

AFTER_TRANSFORM: Final = "edge_after_transform"
"""ExecuTorch's prefix of edge programs that passes have changed: `edge_after_transform/METHOD`."""


def save(record: Any, programs: Mapping[str, Any], transformed: Mapping[str, Any], path: Path) -> None:
    """Complete a session's ETRecord and write it to a file.

    Args:
        programs: the lowered exported programs by method.
        transformed: edge programs after EDGE_PROGRAM_MANAGER_TRANSFORM by method; empty if that stage did not run.
    """
    edge = record.edge_dialect_program
    if not isinstance(edge, dict):
        (method,) = programs
        record.edge_dialect_program = {method: edge}
    graphs = dict(record.graph_map or {})
    if len(programs) == 1:
        record.exported_program = next(iter(programs.values()))
        record.export_graph_id = id(record.exported_program.graph)
    else:
        # `exported_program` holds a single method, where other readers expect `forward`.
        graphs.update({f"{EXPORTED}/{m}": p for m, p in programs.items() if p is not record.exported_program})
    graphs.update({f"{AFTER_TRANSFORM}/{method}": program for method, program in transformed.items()})
    record.graph_map = graphs or None
    record.save(str(path))
