"""Operators that write to memory which other operators read, too.

Observers and quantize operators are put between operators: behind them, what writes to a view or a buffer writes to a dequantized
copy of it, and what reads it gets a copy of before. Observers return what they get, so that calibration does not show this.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch

from etfarm.wire.batch_norms import join_batch_norms
from etfarm.wire.written_inputs import MAY_RETURN_INPUT, written_values

_ATEN = torch.ops.aten


def without_writes(program: Any) -> Any:
    """Return a program that computes new values in place of writes, if quantization would lose one; else the program itself.

    Args:
        program: an exported program whose operators may write.
    """
    if not any(map(_is_lost, program.graph.nodes)):
        return program
    functional = program.run_decompositions({})
    join_batch_norms(functional.graph)
    functional.graph_module.recompile()
    return functional


def _is_lost(node: Any) -> bool:
    """Return whether a node writes to the floats of a buffer, of a view, or of what other nodes use."""
    return node.op == "call_function" and any(map(_is_shared, written_values(node)))


def _is_shared(target: Any) -> bool:
    if not target.meta["val"].is_floating_point():
        return False
    schema = getattr(target.target, "_schema", None)
    if target.op != "call_function" or len(target.users) > 1 or target.target is getitem or schema is None:
        return True
    is_view = any(each.alias_info is not None for each in schema.returns) and not schema.is_mutable
    return is_view or schema.name.partition("::")[2] in MAY_RETURN_INPUT
