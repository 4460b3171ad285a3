"""What models compute of dynamic sizes, and no archive can have: torch.export lets it through."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from etfarm.client.export.errors import DimSpecialized, export_failed
from etfarm.client.export.traces import place_in
from etfarm.wire.dim_guards import WHOLE_NUMBERS, computes_in_floats, why_floats

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_INSTEAD: Final = {
    "math.ceil": ("math.ceil of a size", "-(-n // 4) for math.ceil(n / 4)"),
    "math.floor": ("math.floor of a size", "n // 4 for math.floor(n / 4)"),
    "builtins.round": ("round of a size", "(3 * n + 5) // 10 for round(n * 0.3)"),
    "_operator.abs": ("abs of a size", "the factor torch.tensor(n - 4).abs() for abs(n - 4)"),
    "_operator.and_": ("size & number", "n % 4 for n & 3"),
    "_operator.or_": ("size | number", "n // 4 * 4 + 3 for n | 3"),
    "torch.sym_sum": ("torch.sym_sum", "n + k for torch.sym_sum([n, k])"),
    "torch.sym_ite": ("torch.sym_ite", "the factor torch.where(torch.tensor(n) > 5, 2, 3) for torch.sym_ite(n > 5, 2, 3)"),
}
"""Functions of sizes that torch 2.13 does not save or does not load again, with what gives the same number."""
_POWER: Final = ("power of a size that is a fraction", "the factor torch.tensor(n) ** -0.5 for n ** -0.5")
_EXPONENT: Final = ("power whose exponent is a size", "the factor 2 ** torch.tensor(n) for 2 ** n")

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
        if instead_of := _power(node, value) if name == "_operator.pow" else _INSTEAD.get(name):
            shown, instead = instead_of
            place = place_in(node.meta.get("stack_trace") or "", base)
            line = f"programs have no {shown}."
            remedy = f"Write {instead}, where n is a size, such as x.shape[0]."
            raise export_failed(method, "NotImplementedError", line, str(place or ""), remedy=remedy)
    for guard in program._guards_code:
        if computes_in_floats(guard):
            size = _SIZE.search(guard)
            dim = f"dim {size[2]} of {size[1]!r}" if size else "a dim"
            why = why_floats(_SIZE.sub(r"dim \2 of '\1'", guard))
            raise DimSpecialized(method, dim, why, WHOLE_NUMBERS, "")


def _power(node: Any, value: object) -> tuple[str, str] | None:
    """Return what programs have no power of, and what to write instead; None for one that archives have."""
    import torch

    if isinstance(node.args[1], torch.fx.Node):
        return _EXPONENT
    return _POWER if isinstance(value, torch.SymFloat) else None
