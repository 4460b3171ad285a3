"""The counterparts of a device's instructions: the nodes of an exported program that compute the same values.

For each of its operators, the edge graph records the names of the nodes that it comes from, through every graph since the
export. An exported program is one of those graphs and records the same of its own nodes.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from etfarm.server.reports.numerics.edge import EdgeGraph, Operator, fits
from etfarm.server.reports.trace.graph import Instruction, base_name
from etfarm.server.reports.trace.recording import Recorded, Stored

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

_NORMS: Final = frozenset({"batch_norm", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional"})


@dataclass(frozen=True)
class Output:
    """One value that the device recorded, with the operator that computed it."""

    stored: Stored
    operator: Operator
    at: int
    """The value's index among the operator's outputs."""
    group: tuple[Operator, ...]
    """All operators that were executed to compute it, in order."""
    backend: str | None
    """The delegate's backend; None for the runtime's own kernels."""

    @property
    def own(self) -> tuple[Operator, ...]:
        """The group without operators that only quantize, unless all of them do."""
        return tuple(operator for operator in self.group if not operator.quantizes) or self.group


def outputs(
    edge: EdgeGraph,
    executed: Mapping[int, tuple[Operator, ...]],
    program: Mapping[tuple[int, int], Instruction],
    recorded: Sequence[Recorded],
) -> Iterator[Output]:
    """Yield the recorded values whose operators are known, in order of execution.

    A delegate records its arguments and then its outputs; a kernel only its outputs.
    """
    for item in recorded:
        instruction, group = program.get((item.chain, item.instruction)), executed.get(item.instruction, ())
        if instruction is None or not group:
            continue
        if instruction.delegate:
            leaving = edge.leaving(group)
            values = item.values[-len(leaving) :] if leaving else ()
        else:
            leaving = [(group[0], at) for at in range(len(group[0].gives))]
            values = item.values
        for (operator, at), stored in zip(leaving, values, strict=False):
            if fits(operator.gives[at], stored):
                yield Output(stored, operator, at, group, instruction.name if instruction.delegate else None)


class Counterparts:
    """The nodes of an exported program that an edge graph's operators come from.

    Args:
        executed: the operators that each instruction executes.
    """

    def __init__(self, edge: EdgeGraph, program: ExportedProgram, executed: Mapping[int, tuple[Operator, ...]]) -> None:
        self._edge = edge
        self._executed = {operator.index for group in executed.values() for operator in group}
        self._nodes = {node.name: node for node in program.graph.nodes if node.op in ("call_function", "placeholder")}
        lineages = {name: _lineage(node.meta.get("from_node")) for name, node in self._nodes.items()}
        self._name_by_operator = {operator.index: _counterpart(operator.lineage, lineages) for operator in edge.operators}
        self._taken = frozenset(self._name_by_operator.values())

    def __len__(self) -> int:
        """Return the number of operators that have a counterpart."""
        return sum(name is not None for name in self._name_by_operator.values())

    def of(self, output: Output) -> Node | None:
        """Return the node that computes the same value; None without one, or if the operator computes an intermediate."""
        operator = output.operator
        name = self._name_by_operator[operator.index]
        # All outputs decide: those that nothing uses, such as the other half of a split, do not show that it is a step.
        if name is None or not all(self._is_last(operator, at, name) for at in range(len(operator.gives))):
            return None
        return self._folded(self._nodes[name])

    def step_of(self, operator: Operator) -> Node | None:
        """Return the node that an operator comes from; the operator may be one of several steps of it."""
        name = self._name_by_operator[operator.index]
        return None if name is None else self._nodes[name]

    def unseen(self, node: Node, seen: Container[str]) -> tuple[Operator, ...]:
        """Return the operators between the recorded values and a node, among which a wrong one cannot be located.

        Args:
            seen: names of nodes whose values the device recorded.
        """
        ahead, known = list(node.all_input_nodes), set()
        while ahead:
            before = ahead.pop()
            if before.name not in known and before.name not in seen:
                known.add(before.name)
                ahead.extend(before.all_input_nodes)
        return tuple(
            operator for operator in self._edge.operators
            if self._name_by_operator[operator.index] in known and operator.index in self._executed and not operator.quantizes
        )  # fmt: skip

    def _is_last(self, operator: Operator, at: int, name: str) -> bool:
        if at >= len(operator.gives):
            return False
        for user in self._edge.users.get(operator.gives[at].name, ()):
            following = self._edge.operators[user]
            if following.quantizes and not operator.quantizes:
                # It has the same value in another representation.
                if not all(self._is_last(following, place, name) for place in range(len(following.gives))):
                    return False
            elif self._is_elided(following):
                # It has the same elements in the same order, in another shape.
                if not self._is_last(following, 0, name):
                    return False
            elif self._name_by_operator[user] == name and not following.quantizes:
                return False
        return True

    def _is_elided(self, operator: Operator) -> bool:
        """Return whether the memory plan aliases the operator's output to its input, so that nothing is executed for it."""
        return base_name(operator.node.op_type) == "view_copy" and operator.index not in self._executed

    def _folded(self, node: Node) -> Node:
        """Return the batch norm that was folded into a node's weights on the device, if there is one; else the node."""
        users = list(node.users)
        if len(users) == 1 and users[0].name not in self._taken and base_name(str(users[0].target)) in _NORMS:
            return users[0]
        return node


def _counterpart(lineage: Sequence[str], lineages: Mapping[str, tuple[str, ...]]) -> str | None:
    for place, name in enumerate(lineage):
        if name in lineages and lineages[name] == tuple(lineage[place + 1 :]):
            return name
    return None


def _lineage(sources: Any) -> tuple[str, ...]:
    names = []
    while sources:
        names.append(str(sources[-1].name))
        sources = sources[-1].from_node
    return tuple(names)
