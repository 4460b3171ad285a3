"""The edge graph of an ETRecord: its operators, their values, and the operators that each instruction of the program executes.

The record's JSON is read as in `graph`: torch's loader would execute code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from etfarm.server.reports.trace import graph
from etfarm.server.reports.trace.graph import BadRecord, Instruction, Node, base_name
from etfarm.server.reports.trace.recording import Stored

_DTYPES: Final = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64", 12: "bool",
    13: "bfloat16", 28: "uint16", 29: "float8_e4m3fn", 30: "float8_e5m2", 34: "uint32", 35: "uint64",
}  # fmt: skip
"""Dtype names by torch._export.serde.schema.ScalarType."""

_QUANTIZATION: Final = ("quantize", "dequantize", "choose_qparams")


@dataclass(frozen=True)
class Given:
    """One tensor that an operator gives."""

    name: str
    dtype: str | None
    shape: tuple[int | None, ...]
    """None for a dim that is dynamic."""


@dataclass(frozen=True)
class Operator:
    """One node of the edge graph."""

    index: int
    """In the graph's order, which is one of execution."""
    node: Node
    handles: tuple[int, ...]
    takes: tuple[str, ...]
    """Names of tensors."""
    gives: tuple[Given, ...]
    lineage: tuple[str, ...]
    """The names of the nodes that it comes from, the youngest first: in the graphs of each step since the model was exported."""

    @property
    def is_bfloat16(self) -> bool:
        """Whether it gives bfloat16 values, which ExecuTorch 1.5 writes to no ETDump."""
        return any(given.dtype == "bfloat16" for given in self.gives)

    @property
    def quantizes(self) -> bool:
        """Whether it only changes how numbers are written down."""
        name = base_name(self.node.op_type)
        return name.startswith(_QUANTIZATION)


@dataclass(frozen=True)
class EdgeGraph:
    """One method's operators."""

    operators: tuple[Operator, ...]
    users: Mapping[str, tuple[int, ...]]
    """Indexes of operators by the name of a tensor that they take."""
    outputs: frozenset[str]
    """Names of tensors that the method gives, the new states of buffers among them."""

    def leaving(self, group: Iterable[Operator]) -> list[tuple[Operator, int]]:
        """Return what operators give to others than themselves: each with the place of the tensor among those that it gives."""
        members = {operator.index: operator for operator in group}
        return [
            (operator, at)
            for _, operator in sorted(members.items())
            for at, given in enumerate(operator.gives)
            if given.name in self.outputs or any(user not in members for user in self.users.get(given.name, ()))
        ]


def read(path: Path, method: str) -> EdgeGraph:
    """Return the method's graph in an ETRecord.

    Raises:
        BadRecord: it cannot be read, or holds no such method.
    Source: torch._export.serde.schema, which executorch.exir.serde writes.
    """
    try:
        found = graph.read_graph(path, method)
        metas = found["tensor_values"]
        operators = tuple(_operator(index, node, metas) for index, node in enumerate(found["nodes"]))
        outputs = frozenset(graph.tensor_names(found["outputs"]))
    except graph.UNREADABLE as error:
        detail = f"{type(error).__name__}: {error}"
        raise BadRecord(f"The ETRecord's graph cannot be read for the method {method!r} ({detail}).", method=method) from error
    users: dict[str, list[int]] = {}
    for operator in operators:
        for name in dict.fromkeys(operator.takes):
            users.setdefault(name, []).append(operator.index)
    return EdgeGraph(operators, {name: tuple(found) for name, found in users.items()}, outputs)


def executed(
    edge: EdgeGraph,
    handles: Mapping[int, Sequence[int]],
    program: Mapping[tuple[int, int], Instruction],
    recorded: Mapping[int, Sequence[Stored]],
) -> dict[int, tuple[Operator, ...]]:
    """Return the operators by the instruction that executes them, in their order; unknown instructions are left out.

    A delegate has a debug handle for each operator in it, so that two of one handle are two operators. Where several instructions
    share a handle, since one operator of the model became many, a kernel is one of its name, and of those that are left it is one
    whose shape was recorded and whose arguments were computed before.

    Args:
        handles: debug handles by instruction, as often as the compiler recorded each.
        recorded: by instruction, what each gave.
    """
    by_handle: dict[int, list[Operator]] = {}
    for operator in edge.operators:
        for handle in operator.handles:
            by_handle.setdefault(handle, []).append(operator)
    makers = {given.name: operator.index for operator in edge.operators for given in operator.gives}
    taken: dict[int, list[Operator]] = {}
    done: set[int] = set()

    def choose(left: Sequence[Operator], values: Sequence[Stored]) -> Operator:
        return min(
            left,
            key=lambda one: (
                bool(values) and not any(fits(given, values[-1]) for given in one.gives[-1:] or ()) and len(one.gives) == 1,
                any(makers.get(name, -1) not in done for name in one.takes if name in makers),
                one.index,
            ),
        )

    for (_, number), instruction in sorted(program.items()):
        group = taken.setdefault(number, [])
        known = [handle for handle in handles.get(number, ()) if by_handle.get(handle)]
        values = recorded.get(number, ()) if len(known) == 1 else ()
        for handle in known:
            left = by_handle[handle]
            if not instruction.delegate:
                left = [operator for operator in left if base_name(instruction.name) == base_name(operator.node.op_type)] or left
            if left and (instruction.delegate or not group):
                operator = choose(left, values)
                by_handle[handle].remove(operator)
                group.append(operator)
                done.add(operator.index)
    _put_right(edge, taken)
    return {number: tuple(sorted(group, key=lambda operator: operator.index)) for number, group in taken.items()}


def fits(given: Given, value: Stored) -> bool:
    """Return whether a recorded value may be that of the graph."""
    return (given.dtype is None or given.dtype == value.dtype) and (
        len(given.shape) == len(value.shape)
        and all(size is None or size == other for size, other in zip(given.shape, value.shape, strict=True))
    )


def _put_right(edge: EdgeGraph, taken: dict[int, list[Operator]]) -> None:
    """Return where several operators dequantize one tensor, which the handles do not tell apart, each goes with what takes it."""
    place = {operator.index: number for number, group in taken.items() for operator in group}
    for number, group in list(taken.items()):
        for operator in [one for one in group if base_name(one.node.op_type).startswith("dequantize")]:
            twins = [
                other for other in edge.operators if other.node.op_type == operator.node.op_type and other.takes == operator.takes
            ]
            users = [user for given in operator.gives for user in edge.users.get(given.name, ())]
            owner = next((place[user] for user in users if user in place), number)
            if len(twins) > 1 and owner != number:
                taken[number].remove(operator)
                taken[owner].append(operator)


def _is_kernel_of(name: str, operator: Operator) -> bool:
    return base_name(name) == base_name(operator.node.op_type)


def _operator(index: int, node: Mapping[str, Any], metas: Mapping[str, Any]) -> Operator:
    metadata = node["metadata"]
    return Operator(
        index,
        graph.node_of(node),
        graph.handles_of(metadata.get("debug_handle")),
        tuple(graph.tensor_names(node["inputs"])),
        tuple(_given(name, metas.get(name)) for name in graph.tensor_names(node["outputs"])),
        _lineage(metadata.get("from_node")),
    )


def _given(name: str, meta: Mapping[str, Any] | None) -> Given:
    if meta is None:
        return Given(name, None, ())
    return Given(name, _DTYPES.get(int(meta["dtype"])), tuple(size.get("as_int") for size in meta["sizes"]))


def _lineage(text: str | None) -> tuple[str, ...]:
    names = []
    sources = json.loads(text) if text else None
    while sources:
        names.append(str(sources[-1]["name"]))
        sources = sources[-1].get("from_node")
    return tuple(names)
