"""Two executions of a program with the same inputs, whose outputs are equal unless it writes to state."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from etfarm.server.compile.program.descriptions import describe_node
from etfarm.server.compile.program.places import all_nodes
from etfarm.server.graphs import differences
from etfarm.server.graphs.differences import Difference
from etfarm.server.graphs.views import name_of
from etfarm.wire.tensors import Value

_UNWRITTEN: Final = re.compile(r"(new_)?empty")
"""Operators that make tensors of what is in memory."""


def find_differing(first: Sequence[Value], second: Sequence[Value]) -> dict[int, Difference]:
    """Return the outputs that differ by more than rounding explains, by index."""
    differing = {}
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        output = differences.difference(one.name or str(index), one, other)
        if not (output.report.equal or differences.is_rounding(one, output)):
            differing[index] = output
    return differing


def choose_worse(expected: Sequence[Value], first: Sequence[Value], second: Sequence[Value]) -> list[Value]:
    """Return each output as of the execution that is further from what is expected."""

    def distance(index: int, actual: Value) -> tuple[bool, float]:
        output = differences.difference("", expected[index], actual)
        return bool(output.wrong), output.report.max_abs_error

    pairs = enumerate(zip(first, second, strict=True))
    return [max(pair, key=lambda actual, index=index: distance(index, actual)) for index, pair in pairs]  # type: ignore[misc]


def describe(method: str, where: str, names: Iterable[str], program: Any, *, delegates: bool) -> str:
    """Return the warning of outputs that differ between the executions of a method without state.

    Args:
        program: the exported program.
        delegates: whether a backend runs a part of the method.
    """
    nodes = [node for node in all_nodes(program) if node.op == "call_function" and _UNWRITTEN.match(name_of(node))]
    if nodes:
        shown = "; ".join(dict.fromkeys(map(describe_node, nodes)))
        remedy = f"Make tensors with torch.zeros in place of torch.empty and the like: {shown}."
    elif delegates:
        remedy = "Compile with another recipe, such as portable, or export with fixed sizes if it has dynamic dims."
    else:
        remedy = "Export with fixed sizes if it has dynamic dims; else report it to ExecuTorch."
    return (
        f"{method} writes to no state, and yet a second execution on the server{where} gives another {', '.join(names)}: an "
        "operator or a backend reads what it has not written, so that later outputs may be wrong even where the first are right. "
        f"{remedy}"
    )
