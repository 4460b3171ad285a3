"""The recovery of the operators behind XNNPACK nodes without a debug handle. Standard library only.

A node of XNNPACK's graph has the debug handle of the operator that it was created from. ExecuTorch's own passes drop some
handles: those of a linear that was decomposed into a transposition and a product and then fused again, of a standalone batch norm
that became a convolution, and of the remainder of a concatenation of more than five tensors. Unlike them, nodes that a backend
inserts change only layout or type. Each node without a handle is therefore matched with an operator of its kind by inputs and
outputs, and equal candidates by their order in the delegate.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

_INSERTED: Final = frozenset({"Convert", "Copy", "StaticReshape", "StaticTranspose"})
"""Kinds of nodes that ExecuTorch's passes for XNNPACK insert: reshapes around 1d convolutions, and changes of layout and type."""

_PRODUCTS: Final = frozenset({"linear", "addmm", "mm"})
_CONVOLUTION: Final = frozenset({"convolution"})
_SOURCE_OPERATORS: Final = {
    "FullyConnected": _PRODUCTS,
    "Conv2d": _CONVOLUTION,
    "ConvTranspose2d": _CONVOLUTION,
    # A batch norm becomes a convolution with one group per channel.
    "DepthwiseConv2d": _CONVOLUTION | {"_native_batch_norm_legit_no_training"},
}
"""Base names of the operators that a node without a handle may come from, by its kind."""


@dataclass(frozen=True)
class Operator:
    """One operator of the graph before it was delegated."""

    handles: tuple[int, ...]
    name: str
    """Base name, such as `addmm`."""
    takes: tuple[Hashable, ...]
    """Its inputs, identified as in the `gives` of other operators."""
    gives: tuple[Hashable, ...]
    takes_elements: tuple[int, ...] = ()
    """Number of elements of each input; 0 if unknown."""
    gives_elements: int = 0
    """Number of elements of its first output; 0 if unknown."""
    candidate: bool = True
    """Whether it may belong to the delegate."""


@dataclass(frozen=True)
class Node:
    """One node of XNNPACK's graph."""

    kind: str
    """Kind, such as `FullyConnected`."""
    handle: int | None
    takes: tuple[Hashable, ...]
    gives: tuple[Hashable, ...]
    takes_elements: tuple[int, ...] = ()
    gives_elements: int = 0


def find(nodes: Sequence[Node], operators: Sequence[Operator], order: Sequence[int]) -> dict[int, int | None]:
    """Return the recovered debug handles by node index, for nodes without a handle that no backend inserts; None if unknown.

    Args:
        nodes: nodes of one delegate, in order of execution.
        operators: operators of the graph, in its order; operators outside of the delegate reduce the number of matches.
        order: debug handles of the delegate's operators in its own order, with repetitions.
    """
    result: dict[int, int | None] = {}
    nodes = _whole_concatenations(nodes, result)
    lost = [at for at, node in enumerate(nodes) if node.handle is None and node.kind not in _INSERTED]
    with_handles = {(node.kind, node.handle) for node in nodes}
    result.update(dict.fromkeys(lost))
    lost = [at for at in lost if nodes[at].kind in _SOURCE_OPERATORS]
    names = {name for at in lost for name in _SOURCE_OPERATORS[nodes[at].kind]}
    candidates = [at for at, operator in enumerate(operators) if operator.candidate and operator.name in names]
    if candidates:
        result.update(_Matching(nodes, operators, lost, candidates, with_handles).handles(order))
    return result


def _whole_concatenations(nodes: Sequence[Node], handles: dict[int, int | None]) -> list[Node]:
    """Add handles to split concatenations: XNNPACK concatenates at most five tensors, then appends the rest to that result."""
    known = list(nodes)
    producers = {value: at for at, node in enumerate(nodes) for value in node.gives}
    for at, node in enumerate(nodes):
        producer = producers.get(node.takes[0]) if node.takes and node.handle is None else None
        if producer is not None and node.kind.startswith("Concatenate") and known[producer].kind.startswith("Concatenate"):
            handles[at] = known[producer].handle
            known[at] = replace(node, handle=handles[at])
    return known


class _Flow:
    """The ancestors and descendants of each step, as bit sets of their marks."""

    def __init__(self, steps: Sequence[Node | Operator], marks: Callable[[int], int]) -> None:
        producers = {value: at for at, step in enumerate(steps) for value in step.gives}
        self.before = [0] * len(steps)
        self.behind = [0] * len(steps)
        for at, step in enumerate(steps):
            for producer in {producers[value] for value in step.takes if value in producers} - {at}:
                self.before[at] |= self.before[producer] | marks(producer)
        for at in range(len(steps) - 1, -1, -1):
            for producer in {producers[value] for value in steps[at].takes if value in producers} - {at}:
                self.behind[producer] |= self.behind[at] | marks(at)


class _Matching:
    """The candidate operators of each node without a handle."""

    def __init__(
        self,
        nodes: Sequence[Node],
        operators: Sequence[Operator],
        lost: Sequence[int],
        able: Sequence[int],
        with_handles: set[tuple[str, int | None]],
    ) -> None:
        self._operators = [operators[at] for at in able]
        handles = sorted({node.handle for node in nodes if node.handle is not None})
        bits = {handle: 1 << at for at, handle in enumerate(handles)}
        node_marks = [bits.get(node.handle, 0) if node.handle is not None else 0 for node in nodes]
        operator_marks = [_union(bits.get(handle, 0) for handle in operator.handles) for operator in operators]
        near = _Flow(nodes, node_marks.__getitem__), _Flow(operators, operator_marks.__getitem__)
        rank = {at: 1 << number for number, at in enumerate(lost)}
        able_rank = {at: 1 << number for number, at in enumerate(able)}
        self._among = _part(_Flow(nodes, lambda at: rank.get(at, 0)), lost)
        self._able = _part(_Flow(operators, lambda at: able_rank.get(at, 0)), able)
        self._may: list[int] = []
        for number, at in enumerate(lost):
            kind, may = nodes[at].kind, 0
            same = _union(rank[position] for position in lost if nodes[position].kind == kind)
            fit = _union(able_rank[position] for position in able if operators[position].name in _SOURCE_OPERATORS[kind])
            for other, operator_at in enumerate(able):
                if (
                    _alike(nodes[at], operators[operator_at], with_handles)
                    and not near[0].before[at] & ~near[1].before[operator_at]
                    and not near[0].behind[at] & ~near[1].behind[operator_at]
                    and all(
                        (self._among[side][number] & same).bit_count() <= (self._able[side][other] & fit).bit_count()
                        for side in (0, 1)
                    )
                ):
                    may |= 1 << other
            self._may.append(may)
        self._lost = lost

    def handles(self, order: Sequence[int]) -> dict[int, int | None]:
        """Return the handles by node index."""
        self._narrow()
        self._decide(order)
        result: dict[int, int | None] = {}
        for at, may in zip(self._lost, self._may, strict=True):
            handles = {self._operators[candidate].handles[:1] for candidate in _bits(may)}
            (handle,) = next(iter(handles)) if len(handles) == 1 and all(handles) else (None,)
            result[at] = handle
        return result

    def _narrow(self) -> None:
        """Remove candidates for which another node has no candidate at its relative position (before, after, unordered)."""
        everything, changed = (1 << len(self._operators)) - 1, True
        known = [number for number, may in enumerate(self._may) if may]
        while changed:
            changed = False
            for number in known:
                left = may = self._may[number]
                for other in known:
                    if other == number:
                        continue
                    partners = self._may[other]
                    for candidate in _bits(left):
                        before, behind = self._able[0][candidate], self._able[1][candidate]
                        beside = everything & ~(before | behind | 1 << candidate)
                        if not partners & (before, behind, beside)[self._side(number, other)]:
                            left &= ~(1 << candidate)
                if left != may:
                    self._may[number], changed = left, True

    def _side(self, number: int, other: int) -> int:
        """Return the position of another node: 0 before, 1 after, 2 unordered."""
        return next((side for side in (0, 1) if self._among[side][number] & 1 << other), 2)

    def _decide(self, order: Sequence[int]) -> None:
        """Match equal candidates in the delegate's order, if it is unambiguous and there are as many operators as nodes."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for at, handle in enumerate(order):
            first.setdefault(handle, at)
            last[handle] = at
        for group in self._groups():
            several = list(_bits(_union(self._may[number] for number in group)))
            if len(several) != len(group):
                continue
            keys = [(self._operators[candidate].handles[:1] or (0,))[0] for candidate in several]
            if not set(keys) <= first.keys():
                continue
            ordered = [
                candidate for _, candidate in sorted(zip(keys, several, strict=True), key=lambda pair: (first[pair[0]], pair[1]))
            ]
            ends = [last[self._operators[candidate].handles[0]] for candidate in ordered]
            chosen = dict(zip(group, ordered, strict=True))
            if ends == sorted(ends) and all(self._fits(number, candidate, chosen) for number, candidate in chosen.items()):
                for number, candidate in chosen.items():
                    self._may[number] = 1 << candidate

    def _fits(self, number: int, candidate: int, chosen: dict[int, int]) -> bool:
        sides = (
            self._able[side][candidate] & 1 << other == 0
            for at, other in chosen.items()
            for side in (0, 1)
            if at != number and self._side(number, at) != side
        )
        return bool(self._may[number] & 1 << candidate) and all(sides)

    def _groups(self) -> list[list[int]]:
        """Return groups of nodes, in order, that share candidates with each other."""
        groups: list[tuple[int, list[int]]] = []
        for number, may in enumerate(self._may):
            if may.bit_count() < 2:
                continue
            apart, members = [], [number]
            for group in groups:
                if group[0] & may:
                    may, members = may | group[0], group[1] + members
                else:
                    apart.append(group)
            groups = [*apart, (may, members)]
        return [sorted(members) for _, members in groups]


def _alike(node: Node, operator: Operator, with_handles: set[tuple[str, int | None]]) -> bool:
    """Return whether a node may be this operator by kind and sizes, and no other node has the operator's handle."""
    if operator.name not in _SOURCE_OPERATORS.get(node.kind, ()) or any(
        (node.kind, handle) in with_handles for handle in operator.handles
    ):
        return False
    if node.gives_elements and operator.gives_elements and node.gives_elements != operator.gives_elements:
        return False
    # A batch norm that became a convolution has different weights.
    takes = operator.takes_elements if operator.name in _PRODUCTS else ()
    return not all(takes) or not takes or all(size in takes for size in node.takes_elements[:2] if size)


def _part(flow: _Flow, places: Sequence[int]) -> tuple[list[int], list[int]]:
    return [flow.before[at] for at in places], [flow.behind[at] for at in places]


def _union(sets: Iterable[int]) -> int:
    union = 0
    for bits in sets:
        union |= bits
    return union


def _bits(whole: int) -> list[int]:
    positions = []
    while whole:
        lowest = whole & -whole
        positions.append(lowest.bit_length() - 1)
        whole ^= lowest
    return positions
