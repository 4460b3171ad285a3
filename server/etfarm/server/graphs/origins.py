"""The operators that XNNPACK's nodes without a debug handle come from. Standard library only.

A node of XNNPACK's graph has the debug handle of the operator that it was made of. ExecuTorch's own passes drop some: a linear
that was decomposed into a transposition and a product becomes one node again, without a handle, and so do a batch norm that
stands alone (a convolution then) and what is left of a concatenation of more than five. They differ from the nodes that a backend
inserts, which change layout and type. So each is matched with an operator of its kind by its inputs and outputs, and several
equal ones by their order in the delegate.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

_INSERTED: Final = frozenset({"Convert", "Copy", "StaticReshape", "StaticTranspose"})
"""Kinds of nodes that ExecuTorch's passes for XNNPACK insert: 1d convolutions are reshaped, layouts and types are changed."""

_PRODUCTS: Final = frozenset({"linear", "addmm", "mm"})
_CONVOLUTION: Final = frozenset({"convolution"})
_MADE_OF: Final = {
    "FullyConnected": _PRODUCTS,
    "Conv2d": _CONVOLUTION,
    "ConvTranspose2d": _CONVOLUTION,
    # A batch norm is one with a group for each channel.
    "DepthwiseConv2d": _CONVOLUTION | {"_native_batch_norm_legit_no_training"},
}
"""Base names of the operators that a node without a handle may come from, by its kind."""


@dataclass(frozen=True)
class Operator:
    """One operator of the graph before it was delegated."""

    handles: tuple[int, ...]
    name: str
    """Its base name: `addmm`."""
    takes: tuple[Hashable, ...]
    """Its inputs, as others give them."""
    gives: tuple[Hashable, ...]
    takes_elements: tuple[int, ...] = ()
    """Of each input; 0 where that is not known."""
    gives_elements: int = 0
    """Of its first output; 0 where that is not known."""
    candidate: bool = True
    """Whether it may be in the delegate."""


@dataclass(frozen=True)
class Node:
    """One node of XNNPACK's graph."""

    kind: str
    """`FullyConnected`."""
    handle: int | None
    takes: tuple[Hashable, ...]
    gives: tuple[Hashable, ...]
    takes_elements: tuple[int, ...] = ()
    gives_elements: int = 0


def find(nodes: Sequence[Node], operators: Sequence[Operator], order: Sequence[int]) -> dict[int, int | None]:
    """Return the debug handles of nodes without one that no backend inserts, by their index; None for an unknown one.

    Args:
        nodes: of one delegate, in order of execution.
        operators: of the graph, in its order; with more than the delegate's, fewer nodes can be matched.
        order: debug handles of the delegate's operators in its own order, as often as it has each.
    """
    found: dict[int, int | None] = {}
    nodes = _whole_concatenations(nodes, found)
    lost = [at for at, node in enumerate(nodes) if node.handle is None and node.kind not in _INSERTED]
    with_handles = {(node.kind, node.handle) for node in nodes}
    found.update(dict.fromkeys(lost))
    lost = [at for at in lost if nodes[at].kind in _MADE_OF]
    names = {name for at in lost for name in _MADE_OF[nodes[at].kind]}
    able = [at for at, operator in enumerate(operators) if operator.candidate and operator.name in names]
    if able:
        found.update(_Matching(nodes, operators, lost, able, with_handles).handles(order))
    return found


def _whole_concatenations(nodes: Sequence[Node], found: dict[int, int | None]) -> list[Node]:
    """Add handles to concatenations: XNNPACK joins five at most, and the next ones to that result, which has the handle."""
    known = list(nodes)
    makers = {value: at for at, node in enumerate(nodes) for value in node.gives}
    for at, node in enumerate(nodes):
        maker = makers.get(node.takes[0]) if node.takes and node.handle is None else None
        if maker is not None and node.kind.startswith("Concatenate") and known[maker].kind.startswith("Concatenate"):
            found[at] = known[maker].handle
            known[at] = replace(node, handle=found[at])
    return known


class _Flow:
    """What comes before and what behind each of some steps, as sets of bits that stand for marks."""

    def __init__(self, steps: Sequence[Node | Operator], marks: Callable[[int], int]) -> None:
        makers = {value: at for at, step in enumerate(steps) for value in step.gives}
        self.before = [0] * len(steps)
        self.behind = [0] * len(steps)
        for at, step in enumerate(steps):
            for maker in {makers[value] for value in step.takes if value in makers} - {at}:
                self.before[at] |= self.before[maker] | marks(maker)
        for at in range(len(steps) - 1, -1, -1):
            for maker in {makers[value] for value in steps[at].takes if value in makers} - {at}:
                self.behind[maker] |= self.behind[at] | marks(at)


class _Matching:
    """The operators that each lost node may be."""

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
            same = _union(rank[one] for one in lost if nodes[one].kind == kind)
            fit = _union(able_rank[one] for one in able if operators[one].name in _MADE_OF[kind])
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
        """Return the handles by the node's index."""
        self._narrow()
        self._decide(order)
        found: dict[int, int | None] = {}
        for at, may in zip(self._lost, self._may, strict=True):
            handles = {self._operators[one].handles[:1] for one in _bits(may)}
            (handle,) = next(iter(handles)) if len(handles) == 1 and all(handles) else (None,)
            found[at] = handle
        return found

    def _narrow(self) -> None:
        """Keep of each node's operators those that have a partner for each other node, before, behind or beside it."""
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
                    for one in _bits(left):
                        before, behind = self._able[0][one], self._able[1][one]
                        beside = everything & ~(before | behind | 1 << one)
                        if not partners & (before, behind, beside)[self._side(number, other)]:
                            left &= ~(1 << one)
                if left != may:
                    self._may[number], changed = left, True

    def _side(self, number: int, other: int) -> int:
        """Return where another lost node is: 0 before, 1 behind, 2 beside."""
        return next((side for side in (0, 1) if self._among[side][number] & 1 << other), 2)

    def _decide(self, order: Sequence[int]) -> None:
        """Match equal candidates in the delegate's order, if that is a clear one and there are no more operators than nodes."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for at, handle in enumerate(order):
            first.setdefault(handle, at)
            last[handle] = at
        for group in self._groups():
            several = list(_bits(_union(self._may[number] for number in group)))
            if len(several) != len(group):
                continue
            keys = [(self._operators[one].handles[:1] or (0,))[0] for one in several]
            if not set(keys) <= first.keys():
                continue
            ordered = [one for _, one in sorted(zip(keys, several, strict=True), key=lambda pair: (first[pair[0]], pair[1]))]
            ends = [last[self._operators[one].handles[0]] for one in ordered]
            chosen = dict(zip(group, ordered, strict=True))
            if ends == sorted(ends) and all(self._fits(number, one, chosen) for number, one in chosen.items()):
                for number, one in chosen.items():
                    self._may[number] = 1 << one

    def _fits(self, number: int, one: int, chosen: dict[int, int]) -> bool:
        sides = (
            self._able[side][one] & 1 << other == 0
            for at, other in chosen.items()
            for side in (0, 1)
            if at != number and self._side(number, at) != side
        )
        return bool(self._may[number] & 1 << one) and all(sides)

    def _groups(self) -> list[list[int]]:
        """Yield nodes, in their order, that share operators with each other."""
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
    """Return whether a node may be this operator, by its kind and its sizes; not if there is one that says so itself."""
    if operator.name not in _MADE_OF.get(node.kind, ()) or any(
        (node.kind, handle) in with_handles for handle in operator.handles
    ):
        return False
    if node.gives_elements and operator.gives_elements and node.gives_elements != operator.gives_elements:
        return False
    # A batch norm that became a convolution has other weights.
    takes = operator.takes_elements if operator.name in _PRODUCTS else ()
    return not all(takes) or not takes or all(size in takes for size in node.takes_elements[:2] if size)


def _part(flow: _Flow, places: Sequence[int]) -> tuple[list[int], list[int]]:
    return [flow.before[at] for at in places], [flow.behind[at] for at in places]


def _union(sets: Iterable[int]) -> int:
    found = 0
    for one in sets:
        found |= one
    return found


def _bits(whole: int) -> list[int]:
    found = []
    while whole:
        lowest = whole & -whole
        found.append(lowest.bit_length() - 1)
        whole ^= lowest
    return found
