"""The operators behind the numbers in the runtime's messages: an instruction of a method, or a node of XNNPACK's graph."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from executorch.exir.lowered_backend_module import LoweredBackendModule

from etfarm.server.compile.program.explain import describe_node

_NODE: Final = re.compile(r"Failed to (?:create|define) .*?\bnode (\d{1,9})\b")
"""XNNPACK's refusal of a node, with the debug handle. Source: executorch/backends/xnnpack/runtime/XNNCompiler.cpp 1.5.1."""
_KERNEL: Final = re.compile(r"KernelCall failed at instruction \d{1,9}:(\d{1,9}) in operator ([\w:.]{1,200}?)[.:]? ")
"""A kernel's refusal of its arguments. Source: executorch/runtime/executor/method.cpp 1.5.1."""


@dataclass(frozen=True)
class LocatedOperators:
    """The operators of one method, each with its source line: `aten::bmm at models/net.py:31 (x @ y)`."""

    by_handle: Mapping[int, str] = field(default_factory=dict)
    """By debug handle, for operators inside of delegates."""
    by_instruction: Mapping[int, str] = field(default_factory=dict)
    """By the index of the method's instruction, for operators outside of delegates."""


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
        located[method] = LocatedOperators(by_handle, by_instruction)
    return located


def find_refused(log: str, operators: LocatedOperators) -> str:
    """Return the operator that the runtime's log blames, with its source line; empty if it blames none."""
    if (match := _NODE.search(log)) is not None:
        return operators.by_handle.get(int(match[1]), "")
    if (match := _KERNEL.search(log)) is not None:
        return operators.by_instruction.get(int(match[1]), match[2])
    return ""


def _numbered(module: Any) -> Iterator[tuple[int, Any]]:
    """Yield the operators of a graph with their debug handles."""
    for node in module.graph.nodes:
        handle = node.meta.get("debug_handle")
        if node.op == "call_function" and isinstance(handle, int) and hasattr(node.target, "_schema"):
            yield handle, node
