"""Where nodes of graphs come from in the user's model: what no delegate took, and what a quantizer left in fp32."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, Final

from etfarm.server.compile.program import fp32_layers
from etfarm.server.compile.result import Fp32Operator, Place, SourceLine
from etfarm.server.graphs.sources import Source, module_of, source_of

MAX_PLACES: Final = 20
"""Places of one operator; those beyond are the least frequent, and summed into none."""

_NO_OPERATORS: Final = frozenset({"executorch_call_delegate", "getitem", "alloc"})
_NUMBER = re.compile(r"_\d+$")


def undelegated(manager: Any) -> dict[str, dict[str, list[Place]]]:
    """The nodes outside of delegates of an EdgeProgramManager's methods: {method: {operator: places}}.

    Operators are named as `executorch.devtools.backend_debug.get_delegation_info` names them, `aten_add_tensor`, which is
    the node's name without its number. Calls of delegates, `getitem`, which takes one of several outputs, and the `alloc` of
    TO_EXECUTORCH, which changes this same graph, are left out.
    """
    return {method: _undelegated(manager.exported_program(method).graph_module) for method in sorted(manager.methods)}


def _undelegated(module: Any) -> dict[str, list[Place]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for node in module.graph.nodes:
        operator = _NUMBER.sub("", node.name)
        if node.op == "call_function" and operator not in _NO_OPERATORS:
            found[operator].append(node)
    return {operator: places(nodes) for operator, nodes in sorted(found.items())}


def fp32(program: Any, *, xnnpack: bool = False) -> list[Fp32Operator]:
    """Heavy operators of a quantized program (convolutions, products, recurrent layers) that compute on fp32 alone.

    Args:
        program, xnnpack: as `fp32_layers.in_fp32`.

    Returns:
        The most frequent operators first.
    """
    left: dict[str, list[Any]] = defaultdict(list)
    for node in fp32_layers.in_fp32(program, xnnpack=xnnpack):
        left[fp32_layers.name_of(node)].append(node)
    rows = sorted(left.items(), key=lambda row: (-len(row[1]), row[0]))
    return [{"op": operator, "count": len(nodes), "places": places(nodes)} for operator, nodes in rows]


def places(nodes: Iterable[Any]) -> list[Place]:
    """Where nodes of a torch.fx graph come from: the most frequent first, at most MAX_PLACES."""
    counted = Counter((source_of(node.meta.get("stack_trace")), module_path(node)) for node in nodes)
    rows = sorted(counted.items(), key=lambda row: (-row[1], _order(row[0])))
    return [_place(source, module, count) for (source, module), count in rows[:MAX_PLACES]]


def module_path(node: Any) -> str | None:
    """The innermost module of a node, `layer1.conv`; None for the model itself, and where it is not known."""
    for key, entry in reversed((node.meta.get("nn_module_stack") or {}).items()):
        if not key.startswith("_empty_nn_module_stack"):
            path = entry[0] if isinstance(entry, tuple) else entry
            return module_of(f",{path},")
    return None


def _place(source: Source | None, module: str | None, count: int) -> Place:
    line: SourceLine | None = None if source is None else {"file": source.file, "line": source.line, "code": source.code}
    return {"source": line, "module": module, "count": count}


def _order(place: tuple[Source | None, str | None]) -> tuple[str, int, str]:
    source, module = place
    return (source.file if source else "", source.line if source else 0, module or "")
