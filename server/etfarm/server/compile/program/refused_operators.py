"""The operators of a lowered program by the numbers in the runtime's messages; `etfarm.wire.located_failures` reads those."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from executorch.exir.lowered_backend_module import LoweredBackendModule

from etfarm.server.compile.program.explain import describe_node
from etfarm.v1.compile_pb2 import LocatedOperators
from etfarm.wire.located_failures import MAX_OPERATORS


def of_program(manager: Any) -> dict[str, LocatedOperators]:
    """Return the operators of each method of an ExecutorchProgramManager.

    Source: the emitter replaces the debug handle of an operator outside of delegates by the index of its instruction
    (`_add_debug_handle` of executorch/exir/emit/_emitter.py 1.5.1).
    """
    located = {}
    for method in sorted(manager.methods):
        module = manager.exported_program(method).graph_module
        by_handle: dict[int, str] = {}
        for node in module.graph.nodes:
            if node.op == "get_attr" and isinstance(delegate := getattr(module, node.target, None), LoweredBackendModule):
                for handle, inner in _numbered(delegate.original_module.graph_module):
                    by_handle.setdefault(handle, describe_node(inner))
        by_instruction = {index: describe_node(node) for index, node in _numbered(module)}
        located[method] = LocatedOperators(
            by_instruction=dict(islice(by_instruction.items(), MAX_OPERATORS)),
            by_handle=dict(islice(by_handle.items(), MAX_OPERATORS)),
        )
    return located


def _numbered(module: Any) -> Iterator[tuple[int, Any]]:
    """Yield the operators of a graph with their debug handles."""
    for node in module.graph.nodes:
        handle = node.meta.get("debug_handle")
        if node.op == "call_function" and isinstance(handle, int) and hasattr(node.target, "_schema"):
            yield handle, node
