"""Source places of graph nodes in the user's model: operators outside of delegates, and operators left in fp32."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

from etfarm.server.compile.program import fp32_layers
from etfarm.server.graphs.sources import Source, path_of, source_of
from etfarm.server.graphs.views import name_of
from etfarm.v1.compile_pb2 import Fp32Operator, Place, SourceLine

MAX_PLACES: Final = 20
"""Maximum number of places of one operator; less frequent places are dropped."""

_MAX_LINE: Final = (1 << 31) - 1
"""The last line that a message can name; the stack trace of an upload may have any number."""

_NO_OPERATORS: Final = frozenset({"executorch_call_delegate", "getitem", "alloc"})
_NUMBER = re.compile(r"_\d+$")


def all_nodes(program: Any) -> Iterator[Any]:
    """Yield the nodes of an exported or edge program's graph, then those of its branches and loop bodies."""
    for module in program.graph_module.modules():
        if hasattr(module, "graph"):
            yield from module.graph.nodes


def undelegated(
    manager: Any, reason_of: Callable[[str, Any], str] = lambda method, node: ""
) -> dict[str, dict[str, list[Place]]]:
    """Return the places of the nodes outside of delegates of an EdgeProgramManager: {method: {operator: places}}.

    Operators have the names of `executorch.devtools.backend_debug.get_delegation_info`, like `aten_add_tensor`: the node's
    name without its number. Left out are calls of delegates, `getitem`, which selects one of several outputs, and `alloc`,
    which TO_EXECUTORCH adds to the same graph.

    Args:
        reason_of: returns why a method's node was not delegated; empty if that is unknown.
    """
    return {
        method: _undelegated_operators(manager.exported_program(method).graph_module, partial(reason_of, method))
        for method in sorted(manager.methods)
    }


def _undelegated_operators(module: Any, reason_of: Callable[[Any], str]) -> dict[str, list[Place]]:
    nodes_by_operator: dict[str, list[Any]] = defaultdict(list)
    for node in module.graph.nodes:
        operator = _NUMBER.sub("", node.name)
        if node.op == "call_function" and operator not in _NO_OPERATORS:
            nodes_by_operator[operator].append(node)
    return {operator: places(nodes, reason_of) for operator, nodes in sorted(nodes_by_operator.items())}


def fp32(program: Any, *, xnnpack: bool = False) -> list[Fp32Operator]:
    """Return the heavy operators of a quantized program (convolutions, products, recurrent layers) that compute in fp32 only.

    Args:
        program, xnnpack: as `fp32_layers.in_fp32`.

    Returns:
        The most frequent operators first.
    """
    nodes_by_operator: dict[str, list[Any]] = defaultdict(list)
    for node in fp32_layers.in_fp32(program, xnnpack=xnnpack):
        nodes_by_operator[name_of(node)].append(node)
    rows = sorted(nodes_by_operator.items(), key=lambda row: (-len(row[1]), row[0]))
    return [Fp32Operator(op=operator, count=len(nodes), places=places(nodes)) for operator, nodes in rows]


def places(nodes: Iterable[Any], reason_of: Callable[[Any], str] = lambda node: "") -> list[Place]:
    """Return the places that nodes of a torch.fx graph come from: the most frequent first, at most MAX_PLACES.

    Args:
        reason_of: returns why a node was not delegated; places with different reasons are apart.
    """
    counted = Counter((source_of(node.meta.get("stack_trace")), module_path(node), reason_of(node)) for node in nodes)
    rows = sorted(counted.items(), key=lambda row: (-row[1], _sort_key(row[0])))
    return [_place(*key, count) for key, count in rows[:MAX_PLACES]]


def module_path(node: Any) -> str | None:
    """Return the innermost module of a node, like `layer1.conv`; None for the model itself, or if it is unknown."""
    for key, entry in reversed((node.meta.get("nn_module_stack") or {}).items()):
        if not key.startswith("_empty_nn_module_stack"):
            path = entry[0] if isinstance(entry, tuple) else entry
            return path_of(path)
    return None


def _place(source: Source | None, module: str | None, reason: str, count: int) -> Place:
    line = None if source is None else SourceLine(file=source.file, line=min(source.line, _MAX_LINE), code=source.code)
    return Place(source=line, module=module, count=count, undelegated_reason=reason or None)


def _sort_key(key: tuple[Source | None, str | None, str]) -> tuple[str, int, str, str]:
    source, module, reason = key
    return (source.file if source else "", source.line if source else 0, module or "", reason)
