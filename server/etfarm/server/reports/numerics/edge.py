"""The edge graph of an ETRecord: its operators, their values, and the operators that each instruction of the program executes.

The record's JSON is read as in `graph`, since torch's loader would execute code.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
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
        names = {output.name for operator in members.values() for output in operator.gives}
        used = {name for name in names if any(user not in members for user in self.users.get(name, ()))}
        return [
            (operator, at)
            for _, operator in sorted(members.items())
            for at, output in enumerate(operator.gives)
            if output.name in self.outputs or output.name in used
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
    if operators and not any(operator.gives for operator in operators):
        raise BadRecord(
            f"The ETRecord has only the lines of {method!r}, whose graph ExecuTorch cannot serialize: no values can be compared.",
            method=method,
        )
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
    choice = _Choice(edge.operators)
    groups: dict[int, list[Operator]] = {}
    for (_, number), instruction in sorted(program.items()):
        group = groups.setdefault(number, [])
        known = [handle for handle in handles.get(number, ()) if choice.has(handle)]
        values = recorded.get(number, ()) if len(known) == 1 else ()
        name = None if instruction.delegate else base_name(instruction.name)
        for handle in known:
            if (instruction.delegate or not group) and choice.has(handle):
                group.append(choice.take(handle, name, values))
    _reassign_dequantizing(edge, groups)
    return {number: tuple(sorted(group, key=lambda operator: operator.index)) for number, group in groups.items()}


def fits(spec: OutputSpec, value: Stored) -> bool:
    """Return whether a recorded value may be this output of the graph."""
    return (spec.dtype is None or spec.dtype == value.dtype) and (
        len(spec.shape) == len(value.shape)
        and all(size is None or size == actual for size, actual in zip(spec.shape, value.shape, strict=True))
    )


@dataclass(frozen=True, slots=True)
class _Pool:
    """Operators of one handle, as positions in `_Choice`'s list, in two heaps that may still have operators that were taken."""

    all: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    """Those whose arguments are computed."""

    def first(self, taken: Set[int]) -> tuple[bool, int] | None:
        """Return the next operator, after whether it still lacks arguments; None if all are taken."""
        for lacks, heap in ((False, self.ready), (True, self.all)):
            while heap and heap[0] in taken:
                heappop(heap)
            if heap:
                return lacks, heap[0]
        return None


class _Choice:
    """The operators by debug handle that no instruction has taken. One operator of the model may become 10,000 of a handle."""

    def __init__(self, operators: Sequence[Operator]) -> None:
        self._places = [(handle, operator) for operator in operators for handle in operator.handles]
        self._pools: dict[tuple[int, str | None], _Pool] = {}
        """By handle and name; the name None stands for all."""
        self._forms: dict[tuple[int, str | None], dict[OutputSpec | None, _Pool]] = {}
        """The same by the form of the only output; that of None has those with no output or several."""
        self._taken: set[int] = set()
        self._done: set[int] = set()
        self._producers = {output.name: operator.index for operator in operators for output in operator.gives}
        self._users: dict[str, list[int]] = {}
        self._lacking: dict[int, int] = {}
        """Number of arguments that are not computed yet, by an operator's index."""
        self._positions: dict[int, list[int]] = {}
        """By an operator's index."""
        for position, (handle, operator) in enumerate(self._places):
            self._positions.setdefault(operator.index, []).append(position)
            for pool in self._pools_with(handle, operator):
                pool.all.append(position)
        for operator in operators:
            names = [name for name in dict.fromkeys(operator.takes) if name in self._producers]
            self._lacking[operator.index] = len(names)
            for name in names:
                self._users.setdefault(name, []).append(operator.index)
            if not names:
                self._mark_ready(operator.index)

    def has(self, handle: int) -> bool:
        """Return whether a handle has operators left."""
        return self._first(handle, None) is not None

    def take(self, handle: int, name: str | None, values: Sequence[Stored]) -> Operator:
        """Take the operator that an instruction executes, of a handle that has some left.

        Args:
            name: operators with this name come first; None for any name.
            values: operators whose output may be the last one of these values come first.
        """
        if self._first(handle, name) is None:
            name = None
        first = self._first(handle, name)
        if values:
            forms = self._forms[handle, name].items()
            fitting = [pool.first(self._taken) for form, pool in forms if form is None or fits(form, values[-1])]
            first = min(filter(None, fitting), default=first)
        assert first is not None, handle
        _, position = first
        self._taken.add(position)
        _, operator = self._places[position]
        self._finish(operator)
        return operator

    def _first(self, handle: int, name: str | None) -> tuple[bool, int] | None:
        pool = self._pools.get((handle, name))
        return None if pool is None else pool.first(self._taken)

    def _pools_with(self, handle: int, operator: Operator) -> Iterator[_Pool]:
        form = replace(operator.gives[0], name="") if len(operator.gives) == 1 else None
        for name in (None, base_name(operator.node.op_type)):
            yield self._pools.setdefault((handle, name), _Pool())
            yield self._forms.setdefault((handle, name), {}).setdefault(form, _Pool())

    def _finish(self, operator: Operator) -> None:
        """Record that an operator's outputs are computed."""
        if operator.index in self._done:
            return
        self._done.add(operator.index)
        for name in dict.fromkeys(output.name for output in operator.gives):
            for user in self._users.get(name, ()) if self._producers[name] == operator.index else ():
                self._lacking[user] -= 1
                if not self._lacking[user]:
                    self._mark_ready(user)

    def _mark_ready(self, index: int) -> None:
        for position in self._positions.get(index, ()):
            for pool in self._pools_with(*self._places[position]):
                heappush(pool.ready, position)


def _reassign_dequantizing(edge: EdgeGraph, groups: dict[int, list[Operator]]) -> None:
    """Assign operators that dequantize the same tensor, which share a handle, to the groups that use their outputs."""
    place = {operator.index: number for number, group in groups.items() for operator in group}
    twins = Counter((operator.node.op_type, operator.takes) for operator in edge.operators)
    users: dict[str, int | None] = {}
    """By tensor: the instruction of the first of its users that an instruction executes."""

    def user_of(name: str) -> int | None:
        if name not in users:
            users[name] = next((place[user] for user in edge.users.get(name, ()) if user in place), None)
        return users[name]

    for number, group in list(groups.items()):
        kept: list[Operator] = []
        for operator in group:
            is_twin = twins[operator.node.op_type, operator.takes] > 1
            owner = None
            if is_twin and base_name(operator.node.op_type).startswith("dequantize"):
                owner = next((user for output in operator.gives if (user := user_of(output.name)) is not None), None)
            (kept if owner is None or owner == number else groups[owner]).append(operator)
        group[:] = kept


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
