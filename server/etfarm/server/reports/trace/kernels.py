"""The alignment of XNNPACK's kernels with the nodes of a delegate. Pure.

XNNPACK runs the nodes of a delegate in their order, and ExecuTorch's profile names each kernel that ran. In between, XNNPACK's
optimizer fuses and drops nodes. Each rule here states, from the graph alone, when a node may have no kernel; the profile shows
whether it had one. The rules, each with an example:

    clamped binary     (x + y).relu() is one node with two kernels, Add and Clamp.
    clamp              F.max_pool2d(x, 2).relu(): the pooling's own kernel clamps. So do convolution, linear and another clamp.
    constant pad       conv(F.pad(x, (0, 1, 0, 1))): the convolution pads.
    copy               x.clone() is dropped if only one neighbour uses it.
    reshape            x.flatten(1).reshape(2, 3): of two in a row the second one runs; one that changes nothing does not.
    transpose          q @ k.transpose(1, 2): the product reads its second operand transposed.
    dynamic quantize   linear(x) in int8 with scales computed at run time: the linear's kernel quantizes its own input.
    square             (x ** 2).mean(-1): one kernel, Mean Squared. x * x runs as Square.
    table              int8 -> gelu -> int8: a chain of elementwise nodes between two 8-bit values is one lookup in a table.
    1x1 convolution    runs as Fully Connected.

Source: XNNPACK's src/subgraph.c (xnn_subgraph_optimize), for the fusions; the resulting names were measured.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

from etfarm.server.reports.trace.xnnpack import XGraph, XNode
from etfarm.wire.errors import FarmError

_MATRIX: Final = ("Fully Connected", "Dynamic Fully Connected")
_CONVOLUTION: Final = ("Convolution", *_MATRIX)

_FAMILIES: Final[Mapping[str, tuple[str, ...]]] = {
    "Abs": ("Abs",),
    "Add": ("Add",),
    "ArgMaxPooling2d": ("ArgMax Pooling",),
    "AvgPooling2d": ("Average Pooling",),
    "BatchMatrixMultiply": ("Batch Matrix Multiply",),
    "Ceiling": ("Ceiling",),
    "Clamp": ("Clamp",),
    "Concatenate2": ("Copy",),
    "Concatenate3": ("Copy",),
    "Concatenate4": ("Copy",),
    "Concatenate5": ("Copy",),
    "Conv2d": _CONVOLUTION,
    "ConvTranspose2d": ("Deconvolution",),
    "Convert": ("Convert",),
    "Copy": ("Copy",),
    "Cos": ("Cosine",),
    "DepthwiseConv2d": ("Convolution",),
    "Div": ("Divide",),
    "ELU": ("ELU",),
    "Exp": ("Exp",),
    "Floor": ("Floor",),
    "FullyConnected": _MATRIX,
    "Gelu": ("GELU",),
    "GlobalAvgPooling2d": ("Mean", "Mean Squared", "Global Average Pooling"),
    "Hardswish": ("HardSwish",),
    "LeakyReLU": ("LeakyReLU",),
    "Log": ("Log",),
    "MaxPooling2d": ("Max Pooling",),
    "Maximum": ("Maximum", "Clamp"),
    "Minimum": ("Minimum", "Clamp"),
    "Multiply": ("Multiply",),
    "Negate": ("Negate",),
    "PReLU": ("PReLU",),
    "ReciprocalSquareRoot": ("Reciprocal Square Root",),
    "Sigmoid": ("Sigmoid",),
    "Sin": ("Sine",),
    "Softmax": ("Softmax",),
    "Square": ("Square",),
    "SquareRoot": ("Square Root",),
    "StaticConstantPad": ("Constant Pad",),
    "StaticReshape": ("Static Reshape", "Copy"),
    "StaticResizeBilinear2D": ("Resize Bilinear",),
    "StaticSlice": ("Slice",),
    "StaticTranspose": ("Transpose",),
    "Subtract": ("Subtract",),
    "Tanh": ("TanH",),
}
"""XNNPACK's kernel names by kind of node, up to layout and types. No partitioner creates ScaledDotProductAttention."""

_TABLE: Final = "Invalid Unary Op"
"""The profile's name of a table lookup, for which XNNPACK has no proper name."""

BINARY: Final = frozenset({"Add", "Subtract", "Multiply", "Div", "Maximum", "Minimum", "PReLU"})
"""Kinds with two operands, element by element."""

_CLAMPING: Final = frozenset(
    {"Conv2d", "DepthwiseConv2d", "ConvTranspose2d", "FullyConnected", "AvgPooling2d", "MaxPooling2d", "Clamp"}
)
_PRODUCTS: Final = frozenset({"FullyConnected", "BatchMatrixMultiply"})
_QUANTIZING: Final = _PRODUCTS | {"Conv2d"}
_UNARY: Final = frozenset({
    "Abs", "Ceiling", "Clamp", "Convert", "Cos", "ELU", "Exp", "Floor", "Gelu", "Hardswish", "LeakyReLU", "Log", "Negate",
    "ReciprocalSquareRoot", "Sigmoid", "Sin", "Square", "SquareRoot", "Tanh",
})  # fmt: skip

_EIGHT_BITS: Final = frozenset({3, 4, 6, 9, 11})
_QDINT8: Final = 9
_LONGEST_TABLE: Final = 10

_MOST_CANDIDATES: Final = 100_000
"""Maximum number of nodes, over all kernels, that kernels may be: a user's graph may have any number of reshapes in a row."""

_FAMILY: Final = re.compile(r"(.+?)(?: \(.*| #\d+)?$")


class Unaligned(FarmError):
    """A delegate whose kernels do not match its graph."""

    reason = "KERNELS_UNALIGNED"


@dataclass(frozen=True)
class Part:
    """A node, or one of the two nodes into which XNNPACK splits a clamped binary node."""

    node: int
    clamp: bool = False
    """Whether this is the clamp of a binary node's result."""


@dataclass(frozen=True)
class Match:
    """The nodes that one kernel ran."""

    part: Part
    """The node that the kernel is named after; for a lookup table, the last one."""
    fused: tuple[Part, ...] = ()
    """The other nodes that the kernel certainly runs, in order."""
    alternatives: tuple[Part, ...] = ()
    """The nodes that it may be named after instead of `part`, in order; empty if it is named after `part` for certain."""


def family(event: str) -> str:
    """Return a kernel's name without layout, types and number: `Convolution` for `Convolution (NHWC, F32) IGEMM #2`."""
    match = _FAMILY.match(event)
    return match[1] if match else event


def align(graph: XGraph, events: Sequence[str]) -> list[Match]:
    """Return, for each event of a delegate's profile in order, the nodes that it ran.

    Several alignments may be possible, as for three reshapes in a row of which two ran. An event that is the same node in all of
    them is certain; any other event lists each node that it is in one of them.

    Raises:
        Unaligned: no alignment accounts for all events and all nodes, or too many do.
    """
    parts, split = _split(graph)
    roles = _roles(split)
    families = [family(event) for event in events]
    reached = _reached(roles, families)
    if len(families) not in reached[-1]:
        raise _refusal(graph, events, reached, parts)
    candidates = _candidates(roles, families, reached)
    if candidates is None:
        raise Unaligned(
            f"{len(events)} kernels ran for {len(graph.nodes)} nodes; too many assignments are possible.",
            kernels=len(events), nodes=len(graph.nodes),
        )  # fmt: skip
    runs = frozenset(indexes[0] for indexes in candidates if len(indexes) == 1)
    maybe = frozenset(index for indexes in candidates for index in indexes) - runs
    absorbed: dict[int, list[Part]] = defaultdict(list)
    for index, part in enumerate(parts):
        into = _runner(roles, runs, maybe, index)
        if into is not None and into != index:
            absorbed[into].append(part)
    return [
        Match(parts[first], tuple(absorbed[first]) if not others else (), tuple(parts[other] for other in others))
        for first, *others in candidates
    ]


def difference(graph: XGraph, events: Sequence[str]) -> tuple[int, int]:
    """Return the number of kernels that only the graph or only the profile has, and the number in their union.

    Order is ignored. A missing rule leaves a few kernels unmatched; a profile of another graph, most of them.
    """
    roles = _roles(_split(graph)[1])
    left = Counter(family(event) for event in events)
    missing = 0
    for role in sorted(roles, key=lambda role: (len(role.names), role.optional)):  # match roles with several possible names last
        matched = next((name for name in role.names if left[name]), None)
        if matched is not None:
            left[matched] -= 1
        elif not role.optional:
            missing += 1
    unmatched = left.total()
    return unmatched + missing, len(events) + missing


def _split(graph: XGraph) -> tuple[list[Part], XGraph]:
    """Return the nodes as passed to XNNPACK: the clamp of a binary node is a separate node after it."""
    parts: list[Part] = []
    nodes: list[XNode] = []
    values = dict(graph.values)
    for index, node in enumerate(graph.nodes):
        parts.append(Part(index))
        if not (node.clamped and node.kind in BINARY):
            nodes.append(node)
            continue
        between = max(values) + 1
        values[between] = replace(values[node.outputs[0]], output=False)
        nodes.append(replace(node, outputs=(between,), clamped=False))
        nodes.append(XNode("Clamp", node.debug_handle, True, (between,), node.outputs))
        parts.append(Part(index, clamp=True))
    return parts, XGraph(tuple(nodes), values)


@dataclass(frozen=True)
class _Role:
    """The kernel that a node may have."""

    names: tuple[str, ...]
    """The families that its kernel may belong to; empty if it certainly has no kernel."""
    into: int | None = None
    """The node whose kernel computes this node if it has no kernel itself; None if there is no such node."""
    optional: bool = False
    """Whether it may have no kernel."""

    def may_run(self, families: Sequence[str], at: int) -> bool:
        return 0 <= at < len(families) and families[at] in self.names


def _reached(roles: Sequence[_Role], families: Sequence[str]) -> list[set[int]]:
    """Return, for each prefix of the nodes, the lengths of the prefixes of events that it may account for."""
    reached = [{0}]
    for role in roles:
        before = reached[-1]
        after = set(before) if role.optional else set()
        after.update(at + 1 for at in before if role.may_run(families, at))
        reached.append(after)
    return reached


def _candidates(roles: Sequence[_Role], families: Sequence[str], reached: Sequence[set[int]]) -> list[list[int]] | None:
    """Return, for each event, the nodes that it is in an alignment of all events and nodes, in order; None for too many nodes."""
    count = 0
    candidates: list[list[int]] = [[] for _ in families]
    ahead = {len(families)}  # lengths of the prefixes from which the remaining nodes account for the remaining events
    for index in range(len(roles) - 1, -1, -1):
        role = roles[index]
        before = set(ahead) if role.optional else set()
        for at in ahead:
            if role.may_run(families, at - 1):
                before.add(at - 1)
                if at - 1 in reached[index]:
                    candidates[at - 1].append(index)
                    count += 1
        if count > _MOST_CANDIDATES:
            return None
        ahead = before & reached[index]
    return [indexes[::-1] for indexes in candidates]


def _refusal(graph: XGraph, events: Sequence[str], reached: Sequence[Set[int]], parts: Sequence[Part]) -> Unaligned:
    stuck = next((index for index, lengths in enumerate(reached) if not lengths), len(reached)) - 1
    at = max(reached[stuck], default=0)
    kernel = repr(events[at]) if at < len(events) else "no kernel"
    number = parts[stuck].node if stuck < len(parts) else len(graph.nodes)
    node = graph.nodes[number].kind if stuck < len(parts) else "no node"
    return Unaligned(
        f"{len(events)} kernels ran for {len(graph.nodes)} nodes; kernel {at} is {kernel} where node {number} is {node}.",
        kernels=len(events), nodes=len(graph.nodes),
    )  # fmt: skip


def _runner(roles: Sequence[_Role], runs: Set[int], maybe: Set[int], index: int) -> int | None:
    """Return the node whose kernel certainly computes node `index`: itself, or the node that it is fused into."""
    seen: set[int] = set()
    into: int | None = index
    while into is not None and into not in runs and into not in maybe and into not in seen:
        seen.add(into)
        into = roles[into].into
    return into if into in runs else None


class _Flow:
    """The producer and the consumers of each value of a graph."""

    def __init__(self, graph: XGraph) -> None:
        self.graph = graph
        self.producer = {value: index for index, node in enumerate(graph.nodes) for value in node.outputs}
        self.consumers: dict[int, list[int]] = defaultdict(list)
        for index, node in enumerate(graph.nodes):
            for value in dict.fromkeys(node.inputs):
                self.consumers[value].append(index)

    def only(self, value: int) -> int | None:
        """Return the only node that uses a value; None if it has several uses or is an output."""
        takers = self.consumers[value]
        known = self.graph.values.get(value)
        return takers[0] if len(takers) == 1 and not (known and known.output) else None

    def eight_bits(self, value: int) -> bool:
        known = self.graph.values.get(value)
        return known is not None and known.datatype in _EIGHT_BITS

    def of_kind(self, index: int | None, kinds: frozenset[str]) -> bool:
        return index is not None and self.graph.nodes[index].kind in kinds


def _roles(graph: XGraph) -> list[_Role]:
    flow = _Flow(graph)
    roles = [_role(flow, index, node) for index, node in enumerate(graph.nodes)]
    for chain in _tables(flow):
        last = chain[-1]
        roles[last] = _Role((_TABLE,))
        for index in chain[:-1]:
            roles[index] = _Role((), into=last, optional=True)
    return roles


def _role(flow: _Flow, index: int, node: XNode) -> _Role:
    names = _FAMILIES.get(node.kind, ())
    if node.kind == "Multiply" and len(set(node.inputs)) == 1:
        names = (*names, "Square")
    if not any(flow.consumers[value] or flow.graph.values[value].output for value in node.outputs):
        return _Role(names, optional=True)
    consumer = flow.only(node.outputs[0])
    producer = flow.producer.get(node.inputs[0]) if node.inputs else None
    into = None
    match node.kind:
        case "Clamp" if producer is not None and flow.only(node.inputs[0]) == index and flow.of_kind(producer, _CLAMPING):
            into = producer
        case "StaticConstantPad" if flow.of_kind(consumer, frozenset({"Conv2d", "DepthwiseConv2d"})):
            into = consumer
        case "Copy":
            into = consumer if producer is None or flow.only(node.inputs[0]) != index else producer
        case "StaticReshape":
            into = consumer if flow.of_kind(consumer, frozenset({"StaticReshape"})) else None
        case "StaticTranspose" if consumer is not None and flow.of_kind(consumer, _PRODUCTS):
            into = consumer if flow.graph.nodes[consumer].inputs[1:2] == node.outputs else None
        case "Convert" if flow.graph.values[node.outputs[0]].datatype == _QDINT8:
            consumers = flow.consumers[node.outputs[0]]
            into = consumers[0] if all(flow.of_kind(consumer, _QUANTIZING) for consumer in consumers) else None
        case "Square" | "Multiply" if flow.of_kind(consumer, frozenset({"GlobalAvgPooling2d"})) and len(set(node.inputs)) == 1:
            into = consumer
    return _Role(names, into, optional=into is not None)


def _tables(flow: _Flow) -> list[list[int]]:
    """Return chains of elementwise nodes that XNNPACK replaces by a lookup table, evaluated for all 256 inputs at load time.

    XNNPACK's algorithm: start at the first node whose input has 8 bits, follow values with a single consumer for at most ten
    nodes, then go back to the last 8-bit value. A single node is not replaced.
    """
    chains: list[list[int]] = []
    fused: set[int] = set()
    for index, node in enumerate(flow.graph.nodes):
        start = _through(flow, node, set())
        if index in fused or start is None or not flow.eight_bits(start):
            continue
        chain, values = [index], {start, *node.outputs}
        while len(chain) < _LONGEST_TABLE and (taker := flow.only(flow.graph.nodes[chain[-1]].outputs[0])) is not None:
            if _through(flow, flow.graph.nodes[taker], values) is None:
                break
            chain.append(taker)
            values.update(flow.graph.nodes[taker].outputs)
        while len(chain) > 1 and not flow.eight_bits(flow.graph.nodes[chain[-1]].outputs[0]):
            chain.pop()
        if len(chain) > 1:
            chains.append(chain)
            fused.update(chain)
    return chains


def _through(flow: _Flow, node: XNode, values: set[int]) -> int | None:
    """Return the only value that an elementwise node depends on; None if there are several, and for other nodes."""
    if node.kind in _UNARY:
        dynamic = flow.graph.values[node.outputs[0]].datatype == _QDINT8
        return None if node.kind == "Convert" and dynamic else node.inputs[0]
    if node.kind in BINARY and len(node.inputs) == 2:
        first, second = node.inputs
        for constant, other in ((first, second), (second, first)):
            known, variable = flow.graph.values.get(constant), flow.graph.values.get(other)
            if known and known.constant and known.elements == 1 and variable and not variable.constant:
                return other
        return first if first in values and second in values else None
    return None
