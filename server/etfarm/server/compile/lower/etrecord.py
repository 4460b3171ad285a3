"""The ETRecord of several methods, and of any stages, as complete as ExecuTorch's of one method called forward.

ExecuTorch keeps the exported program of `forward` only, files a single method's edge program as `forward` whatever its
name is, and forgets what EDGE_PROGRAM_MANAGER_TRANSFORM made.
Source: executorch.devtools.etrecord._etrecord, whose reader takes all that is added here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

EXPORTED: Final = "exported"
"""Where a record has the exported programs of several methods: `exported/METHOD`."""

AFTER_TRANSFORM: Final = "edge_after_transform"
"""What ExecuTorch calls edge programs that passes have changed: `edge_after_transform/METHOD`."""


def save(record: Any, programs: Mapping[str, Any], transformed: Mapping[str, Any], path: Path) -> None:
    """Completes a session's ETRecord and writes it.

    Args:
        programs: what was lowered, by method.
        transformed: edge programs by method, as EDGE_PROGRAM_MANAGER_TRANSFORM left them; empty where it was not run.
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
        # The entry of its own, `exported_program`, is one method's; readers that know no other find `forward` there.
        graphs.update({f"{EXPORTED}/{m}": p for m, p in programs.items() if p is not record.exported_program})
    graphs.update({f"{AFTER_TRANSFORM}/{method}": program for method, program in transformed.items()})
    record.graph_map = graphs or None
    record.save(str(path))
