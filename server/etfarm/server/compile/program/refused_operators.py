"""The operators of a lowered program by the numbers in the runtime's messages; `etfarm.wire.located_failures` reads those."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

from executorch.exir.lowered_backend_module import LoweredBackendModule
from torch.fx import GraphModule

from etfarm.server.compile.program.descriptions import describe_node
from etfarm.v1.compile_pb2 import LocatedOperators
from etfarm.wire.located_failures import MAX_OPERATORS, MAX_PROGRAM_OPERATORS

_START: Final = {"slice_copy": 2, "slice_scatter": 3, "select_copy": 2, "select_scatter": 3}
"""Places of the position among the arguments of operators that take one as a number."""
_POSITIONED: Final = frozenset(
    {*_START, "index", "index_put", "index_put_", "index_select", "gather", "scatter", "scatter_add", "embedding"}
)
"""Operators that take positions in a dim of their first argument."""


def of_program(manager: Any) -> dict[str, LocatedOperators]:
    """Return the operators of each method of an ExecutorchProgramManager; those of branches and loop bodies come last.

    The instruction that calls a delegate stands for all of the delegate's operators, of which it has the first.

    Source: the emitter replaces the debug handle of an operator outside of delegates by the index of its instruction
    (`_add_debug_handle` of executorch/exir/emit/_emitter.py 1.5.1), and `lower.branches` does so within branches.
    """
    methods = sorted(manager.methods)
    limit = min(MAX_OPERATORS, MAX_PROGRAM_OPERATORS // max(1, len(methods)))
    located = {}
    for method in methods:
        program = manager.exported_program(method)
        owned = {**program.graph_signature.inputs_to_parameters, **program.graph_signature.inputs_to_buffers}
        modules = [each for each in program.graph_module.modules() if isinstance(each, GraphModule)]
        by_handle: dict[int, Any] = {}
        by_instruction: dict[int, tuple[str, Any]] = {}
        for module in modules:
            for node in module.graph.nodes:
                delegate = getattr(module, str(node.target), None) if node.op == "get_attr" else None
                if not isinstance(delegate, LoweredBackendModule):
                    continue
                inside = list(_numbered(delegate.original_module.graph_module))
                for handle, inner in inside:
                    by_handle.setdefault(handle, inner)
                for call in node.users:
                    if inside and isinstance(index := call.meta.get("debug_handle"), int):
                        by_instruction.setdefault(index, (f"{delegate.backend_id} from ", inside[0][1]))
            for index, node in dict(_numbered(module)).items():
                by_instruction.setdefault(index, ("", node))
        located[method] = LocatedOperators(
            by_instruction={
                index: f"{prefix}{describe_node(node)}{describe_positions(node, owned)}"
                for index, (prefix, node) in islice(by_instruction.items(), limit)
            },
            by_handle={handle: describe_node(node) for handle, node in islice(by_handle.items(), limit)},
        )
    return located


def describe_positions(node: Any, owned: Mapping[str, str]) -> str:
    """Return which positions an operator takes, like `, which takes positions 0 to 7 in dim 1 of cache (1x8x4)`; else empty.

    Args:
        owned: the names of parameters and buffers by their placeholders.
    """
    name = node.target._schema.name.partition("::")[2] if hasattr(node.target, "_schema") else ""
    table = node.args[0] if name in _POSITIONED and node.args else None
    shape = getattr(getattr(table, "meta", {}).get("val"), "shape", None)
    if not shape:
        return ""
    dim, length = _dim_of(node, name), 1
    if name.startswith("slice") and len(node.args) > 2:
        part = node if name == "slice_copy" else node.args[1]
        length = getattr(part.meta.get("val"), "shape", shape)[dim] if hasattr(node.args[_START[name]], "meta") else 0
    elif name.startswith("select"):
        length = int(hasattr(node.args[_START[name]], "meta"))
    if not (isinstance(length, int) and length and isinstance(dim, int) and isinstance(shape[dim], int)):
        return ""  # fixed positions, or a size that varies
    sizes = "x".join(map(str, shape))
    buffer = owned.get(getattr(table, "name", ""))
    of = f"{buffer} ({sizes})" if buffer else f"a tensor of {sizes}"
    return f", which takes positions 0 to {shape[dim] - length} in dim {dim % len(shape)} of {of}"


def _dim_of(node: Any, operator: str) -> Any:
    """Return the dim whose positions an operator takes; None if these are of several dims."""
    if operator == "embedding":
        return 0
    if operator in ("index", "index_put", "index_put_"):
        indexed = [dim for dim, indices in enumerate(node.args[1]) if indices is not None]
        return indexed[0] if len(indexed) == 1 else None
    place = 2 if operator in ("slice_scatter", "select_scatter") else 1
    return node.args[place] if len(node.args) > place else 0


def _numbered(module: Any) -> Iterator[tuple[int, Any]]:
    """Yield the operators of a graph with their debug handles."""
    for node in module.graph.nodes:
        handle = node.meta.get("debug_handle")
        if node.op == "call_function" and isinstance(handle, int) and hasattr(node.target, "_schema"):
            yield handle, node
