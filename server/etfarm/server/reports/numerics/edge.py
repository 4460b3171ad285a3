"""The edge graph of an ETRecord: its operators, their values, and the operators that each instruction of the program executes.

The record's JSON is read as in `graph`, since torch's loader would execute code.
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
class OutputSpec:
    """One output tensor of an operator."""

    name: str
    dtype: str | None
    shape: tuple[int | None, ...]
    """Sizes; None for a dynamic dim."""


@dataclass(frozen=True)
class Operator:
    """One node of the edge graph."""

    index: int
    """Position in the graph, which is a valid order of execution."""
    node: Node
    handles: tuple[int, ...]
    takes: tuple[str, ...]
    """Names of the input tensors."""
    gives: tuple[OutputSpec, ...]
    lineage: tuple[str, ...]
    """Names of the nodes that it comes from in the graph of each step since the export, the latest first."""

    @property
    def is_bfloat16(self) -> bool:
        """Whether it has a bfloat16 output, which ExecuTorch 1.5 does not write to an ETDump."""
        return any(output.dtype == "bfloat16" for output in self.gives)

    @property
    def quantizes(self) -> bool:
        """Whether it only changes the representation of numbers."""
        name = base_name(self.node.op_type)
        return name.startswith(_QUANTIZATION)


@dataclass(frozen=True)
class EdgeGraph:
    """One method's operators."""

    operators: tuple[Operator, ...]
    users: Mapping[str, tuple[int, ...]]
    """Indexes of operators by the name of an input tensor."""
    outputs: frozenset[str]
    """Names of the method's output tensors, including the new states of buffers."""

    def leaving(self, group: Iterable[Operator]) -> list[tuple[Operator, int]]:
        """Return the outputs of a group that are used outside of it, as an operator and the index of its output."""
        members = {operator.index: operator for operator in group}
        return [
            (operator, at)
            for _, operator in sorted(members.items())
            for at, output in enumerate(operator.gives)
            if output.name in self.outputs or any(user not in members for user in self.users.get(output.name, ()))
        ]


def read(path: Path, method: str) -> EdgeGraph:
    """Return the method's graph in an ETRecord.

    Raises:
        BadRecord: it cannot be read, or lacks the method.
    Source: torch._export.serde.schema, which executorch.exir.serde writes.
    """
    try:
        serialized = graph.read_graph(path, method)
        metas = serialized["tensor_values"]
        operators = tuple(_operator(index, node, metas) for index, node in enumerate(serialized["nodes"]))
        outputs = frozenset(graph.tensor_names(serialized["outputs"]))
    except graph.UNREADABLE as error:
        detail = f"{type(error).__name__}: {error}"
        raise BadRecord(f"The ETRecord's graph cannot be read for the method {method!r} ({detail}).", method=method) from error
    users: dict[str, list[int]] = {}
    for operator in operators:
        for name in dict.fromkeys(operator.takes):
            users.setdefault(name, []).append(operator.index)
    return EdgeGraph(operators, {name: tuple(indexes) for name, indexes in users.items()}, outputs)


def executed(
    edge: EdgeGraph,
    handles: Mapping[int, Sequence[int]],
    program: Mapping[tuple[int, int], Instruction],
    recorded: Mapping[int, Sequence[Stored]],
) -> dict[int, tuple[Operator, ...]]:
    """Return the operators by the instruction that executes them, in graph order, without unknown instructions.

    A delegate lists a debug handle once for each of its operators, so a repeated handle means several operators. If several
    instructions share a handle, since one operator of the model was decomposed, a kernel is matched by name, and among equal
    names by the recorded shape and by arguments that are already computed.

    Args:
        handles: debug handles by instruction, with the compiler's repetitions.
        recorded: values by instruction.
    """
    by_handle: dict[int, list[Operator]] = {}
    for operator in edge.operators:
        for handle in operator.handles:
            by_handle.setdefault(handle, []).append(operator)
    producers = {output.name: operator.index for operator in edge.operators for output in operator.gives}
    groups: dict[int, list[Operator]] = {}
    done: set[int] = set()

    def choose(candidates: Sequence[Operator], values: Sequence[Stored]) -> Operator:
        return min(
            candidates,
            key=lambda candidate: (
                bool(values)
                and not any(fits(output, values[-1]) for output in candidate.gives[-1:] or ())
                and len(candidate.gives) == 1,
                any(producers.get(name, -1) not in done for name in candidate.takes if name in producers),
                candidate.index,
            ),
        )

    for (_, number), instruction in sorted(program.items()):
        group = groups.setdefault(number, [])
        known = [handle for handle in handles.get(number, ()) if by_handle.get(handle)]
        values = recorded.get(number, ()) if len(known) == 1 else ()
        for handle in known:
            candidates = by_handle[handle]
            if not instruction.delegate:
                candidates = [
                    operator for operator in candidates if base_name(instruction.name) == base_name(operator.node.op_type)
                ] or candidates
            if candidates and (instruction.delegate or not group):
                operator = choose(candidates, values)
                by_handle[handle].remove(operator)
                group.append(operator)
                done.add(operator.index)
    _reassign_dequantizing(edge, groups)
    return {number: tuple(sorted(group, key=lambda operator: operator.index)) for number, group in groups.items()}


def fits(spec: OutputSpec, value: Stored) -> bool:
    """Return whether a recorded value may be this output of the graph."""
    return (spec.dtype is None or spec.dtype == value.dtype) and (
        len(spec.shape) == len(value.shape)
        and all(size is None or size == actual for size, actual in zip(spec.shape, value.shape, strict=True))
    )


def _reassign_dequantizing(edge: EdgeGraph, groups: dict[int, list[Operator]]) -> None:
    """Assign operators that dequantize the same tensor, which share a handle, to the groups that use their outputs."""
    place = {operator.index: number for number, group in groups.items() for operator in group}
    for number, group in list(groups.items()):
        for operator in [member for member in group if base_name(member.node.op_type).startswith("dequantize")]:
            twins = [
                other for other in edge.operators if other.node.op_type == operator.node.op_type and other.takes == operator.takes
            ]
            users = [user for output in operator.gives for user in edge.users.get(output.name, ())]
            owner = next((place[user] for user in users if user in place), number)
            if len(twins) > 1 and owner != number:
                groups[number].remove(operator)
                groups[owner].append(operator)


def _operator(index: int, node: Mapping[str, Any], metas: Mapping[str, Any]) -> Operator:
    metadata = node["metadata"]
    return Operator(
        index,
        graph.node_of(node),
        graph.handles_of(metadata.get("debug_handle")),
        tuple(graph.tensor_names(node["inputs"])),
        tuple(_output(name, metas.get(name)) for name in graph.tensor_names(node["outputs"])),
        _lineage(metadata.get("from_node")),
    )


def _output(name: str, meta: Mapping[str, Any] | None) -> OutputSpec:
    if meta is None:
        return OutputSpec(name, None, ())
    return OutputSpec(name, _DTYPES.get(int(meta["dtype"])), tuple(size.get("as_int") for size in meta["sizes"]))


def _lineage(text: str | None) -> tuple[str, ...]:
    names = []
    sources = json.loads(text) if text else None
    while sources:
        names.append(str(sources[-1]["name"]))
        sources = sources[-1].get("from_node")
    return tuple(names)
