"""What models compute of dynamic sizes, and no archive can have: torch.export lets it through."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from etfarm.client.export.errors import DimSpecialized, export_failed
from etfarm.client.export.traces import place_in
from etfarm.wire.dim_guards import EXPONENT, MISSING_FUNCTIONS, WHOLE_NUMBERS, computes_in_floats, how_to_replace, why_floats

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_SIZE: Final = re.compile(r"L\['(\w+)'\](?:\[[^\]]+\])*\.size\(\)\[(\d+)\]")


def must_be_whole(method: str, program: ExportedProgram, base: Path) -> None:
    """Require that numbers are computed of dynamic sizes as programs can have it: in whole numbers, by operators.

    Args:
        base: folder that names of source files are relative to.

    Raises:
        EXPORT_FAILED: a function or a power cannot be saved, or a server takes its expression for code.
        DimSpecialized: a condition, which torch.export checks for no dim that is a multiple, compares floats. int() of a float is
            one: it fixes the number to that of the example inputs.
    """
    import torch
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.SymInt | torch.SymFloat):
            continue
        if node.graph is not program.graph and free_unbacked_symbols(value):
            continue  # an index of a number in a loop or branch, which has a remedy of its own
        name = f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__name__', '')}"
        if name == "torch.sym_ite" and node.args[1:] == (1, 0) and free_unbacked_symbols(value):
            continue  # a bool() of a tensor, which has a remedy of its own
        if (function := _variant(node, value, name)) in MISSING_FUNCTIONS:
            place = place_in(node.meta.get("stack_trace") or "", base)
            line = f"programs have no {MISSING_FUNCTIONS[function][0]}."
            raise export_failed(method, "NotImplementedError", line, str(place or ""), remedy=how_to_replace(function))
    for guard in program._guards_code:
        if computes_in_floats(guard):
            size = _SIZE.search(guard)
            dim = f"dim {size[2]} of {size[1]!r}" if size else "a dim"
            why = why_floats(_SIZE.sub(r"dim \2 of '\1'", guard))
            raise DimSpecialized(method, dim, why, WHOLE_NUMBERS, "")


def _variant(node: Any, value: object, name: str) -> str:
    """Return the name of a function, for powers and remainders with what programs have none of."""
    import torch

    if name == "_operator.pow" and isinstance(node.args[1], torch.fx.Node):
        return EXPONENT
    fraction = f"{name} of a fraction"
    return fraction if isinstance(value, torch.SymFloat) and fraction in MISSING_FUNCTIONS else name
