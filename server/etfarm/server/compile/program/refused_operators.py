"""The operators of a lowered program by the numbers in the runtime's messages; `etfarm.wire.located_failures` reads those."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from executorch.exir.lowered_backend_module import LoweredBackendModule
from torch.fx import GraphModule

from etfarm.server.compile.program.explain import describe_node
from etfarm.v1.compile_pb2 import LocatedOperators
from etfarm.wire.located_failures import MAX_OPERATORS, MAX_PROGRAM_OPERATORS


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
        modules = [each for each in manager.exported_program(method).graph_module.modules() if isinstance(each, GraphModule)]
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
                index: f"{prefix}{describe_node(node)}" for index, (prefix, node) in islice(by_instruction.items(), limit)
            },
            by_handle={handle: describe_node(node) for handle, node in islice(by_handle.items(), limit)},
        )
    return located


def _numbered(module: Any) -> Iterator[tuple[int, Any]]:
    """Yield the operators of a graph with their debug handles."""
    for node in module.graph.nodes:
        handle = node.meta.get("debug_handle")
        if node.op == "call_function" and isinstance(handle, int) and hasattr(node.target, "_schema"):
            yield handle, node
