"""The origins, in the user's model, of the kernels inside XNNPACK's delegates.

Kernels are attributed one by one: one that may be several nodes, whose operators have no line in common, says so and leaves the
other kernels of its delegate as they are. A kernel that lowering inserted, to change a layout or a type, has the line of the
operator that it was inserted for: the nearest one that uses its output, or, at an output of the delegate, computes its input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Final

from etfarm.server.graphs import origins
from etfarm.server.graphs.sources import common_module
from etfarm.server.reports.trace import kernels, xnnpack
from etfarm.server.reports.trace.etdump import Call, Trace
from etfarm.server.reports.trace.graph import Instruction, Node, Origin, Record, base_name, sources_of

_QUANTIZATION: Final = "quantized_decomposed."

_CHANGED: Final = {"Convert": "type", "StaticReshape": "shape", "StaticTranspose": "layout"}
"""What a kernel that lowering inserted changes, by the kind of its node."""

_MOST_HOPS: Final = 8
"""Maximum number of inserted kernels in a row between a kernel and the operator that it was inserted for."""

_MOST_LINES: Final = 4
"""Maximum number of lines in a reason."""


@dataclass(frozen=True)
class Attribution:
    """The origins of all kernels of a trace."""

    kernels: Mapping[tuple[int, int], Mapping[str, Origin]]
    """By a delegate's chain and instruction: each kernel's origin by its identifier; without operators for kernels that XNNPACK
    or ExecuTorch inserted. A delegate has all of its kernels here, except those that `partial` explains, or no entry."""
    delegates: int
    """Number of XNNPACK delegates that were called and list their kernels."""
    unaligned: Mapping[tuple[int, int], str]
    """The reason, for each delegate without origins: one sentence."""
    partial: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """The reason, for each delegate of which some kernels have no origin."""
    instructions: Mapping[tuple[int, int], Origin] = field(default_factory=dict)
    """The origins of kernels outside of delegates that are no operator of the model, by chain and instruction."""


def attribute(trace: Trace, program: Mapping[tuple[int, int], Instruction], record: Record) -> Attribution:
    """Return the origins of the kernels in XNNPACK delegates; an empty result if the record has no nodes."""
    by_delegate: dict[tuple[int, int], Mapping[str, Origin]] = {}
    unaligned: dict[tuple[int, int], str] = {}
    partial: dict[tuple[int, int], str] = {}
    calls = (
        [call for call in trace.calls if call.delegate and call.kernels and _is_xnnpack(program, call)] if record.nodes else []
    )
    for call in calls:
        place = (call.chain, call.instruction)
        names = [str(kernel.identifier) for kernel in call.kernels]
        data = program[place].data
        if data is None:
            unaligned[place] = "The delegate's graph is not in the program's own file."
            continue
        try:
            graph = xnnpack.read(data)
            matches = kernels.align(graph, names)
        except (xnnpack.BadGraph, kernels.Unaligned) as error:
            unaligned[place] = error.message
            continue
        graph, lost = _with_handles(graph, record, program, call.instruction)
        delegate = _Delegate(graph, record, frozenset(record.handles.get(call.instruction, ())))
        known = {
            name: delegate.origin(match)
            for name, match in zip(names, matches, strict=True)
            if not any(part.node in lost for part in (match.part, *match.fused, *match.alternatives))
        }
        if known:
            by_delegate[place] = known
        if len(known) < len(names):
            (partial if known else unaligned)[place] = _why(graph, lost)
    return Attribution(by_delegate, len(calls), unaligned, partial, write_backs(program, record))


def _with_handles(
    graph: xnnpack.XGraph, record: Record, program: Mapping[tuple[int, int], Instruction], instruction: int
) -> tuple[xnnpack.XGraph, Set[int]]:
    """Return the graph with the debug handles that lowering dropped, and the nodes whose handles are unknown."""
    values = graph.values
    nodes = [
        origins.Node(
            node.kind, node.debug_handle, node.inputs, node.outputs,
            tuple(values[number].elements for number in node.inputs), values[node.outputs[0]].elements,
        )
        for node in graph.nodes
    ]  # fmt: skip
    order = record.handles.get(instruction, ())
    inside, outside = set(order), _undelegated(record, program)
    operators = [
        replace(
            operator,
            candidate=bool(inside.intersection(operator.handles)) and (operator.handles, operator.name) not in outside,
        )
        for operator in record.operators
    ]
    recovered = origins.find(nodes, operators, order)
    completed = tuple(replace(node, debug_handle=recovered.get(at, node.debug_handle)) for at, node in enumerate(graph.nodes))
    return replace(graph, nodes=completed), {at for at, handle in recovered.items() if handle is None}


def _undelegated(record: Record, program: Mapping[tuple[int, int], Instruction]) -> Set[tuple[tuple[int, ...], str]]:
    """Return the handles and names of the operators that are in no delegate because kernels execute all of them."""
    ran = Counter(
        (handle, base_name(instruction.name))
        for (_, at), instruction in program.items()
        if not instruction.delegate
        for handle in record.handles.get(at, ())
    )
    present = Counter((operator.handles, operator.name) for operator in record.operators)
    return {
        (handles, name) for (handles, name), count in present.items() if any(ran[handle, name] >= count for handle in handles)
    }


def _why(graph: xnnpack.XGraph, lost: Set[int]) -> str:
    kinds = ", ".join(sorted({graph.nodes[at].kind for at in lost}))
    return (
        f"XNNPACK's graph does not say which operators {len(lost)} of its {len(graph.nodes)} nodes come from ({kinds}), "
        "and their order and data flow do not determine it."
    )


def _is_xnnpack(program: Mapping[tuple[int, int], Instruction], call: Call) -> bool:
    known = program.get((call.chain, call.instruction))
    return known is not None and known.delegate and known.name == xnnpack.NAME


class _Delegate:
    """The mapping from one delegate's nodes to the operators of the model."""

    def __init__(self, graph: xnnpack.XGraph, record: Record, handles: frozenset[int]) -> None:
        self._graph = graph
        self._record = record
        self._consumers: dict[int, list[int]] = {}
        self._producers: dict[int, list[int]] = {}
        for at, node in enumerate(graph.nodes):
            for ends, users in ((node.inputs, self._consumers), (node.outputs, self._producers)):
                for value in ends:
                    users.setdefault(value, []).append(at)
        # A node that quantizes an operator's output carries the operator's handle.
        self._hidden = handles - {node.debug_handle for node in graph.nodes if node.kind != "Convert"}

    def origin(self, match: kernels.Match) -> Origin:
        """Return a kernel's operators, with the line of the node it is named after, or of the first node of a lookup table.

        A kernel that may be one of several nodes has the operators of all of them, and the line that they have in common.
        """
        if match.alternatives:
            return _common([self._origin((part,), part) for part in (match.part, *match.alternatives)])
        return self._origin(sorted((match.part, *match.fused), key=lambda part: (part.node, part.clamp)), match.part)

    def _origin(self, all_parts: Sequence[kernels.Part], named: kernels.Part) -> Origin:
        parts: dict[int, list[Node]] = {}
        main, rank = None, -1
        for part in all_parts:
            node = self._graph.nodes[part.node]
            # A lookup table ends with a conversion; the operators before it are what it computes.
            importance = 2 * (node.kind != "Convert") + (part == named)
            operators = self._operators_of(part)
            if importance > rank and operators:
                main, rank = next(iter(operators)), importance
            for handle, nodes in operators.items():
                parts.setdefault(handle, []).extend(nodes)
        origin = _origin(parts, main)
        has_own = any(not name.startswith(_QUANTIZATION) for name in origin.op_types)
        return origin if has_own or origin.source else self._inserted(named.node, origin)

    def _inserted(self, number: int, origin: Origin) -> Origin:
        """Return the origin of a kernel that changes a layout or a type, with the line of the operator that it is there for."""
        changed = _CHANGED.get(self._graph.nodes[number].kind)
        change = f"It changes the {changed} of a value" if changed else "It copies a value"
        for ahead in (True, False):
            for handle in self._nearest(number, ahead=ahead):
                served = self._record.origin((handle,))
                own = [name for name in served.op_types if not name.startswith(_QUANTIZATION)]
                if own:
                    reason = f"{change} {'for' if ahead else 'that comes from'} {own[0]}."
                    places = (origin.module or served.module, served.source, served.sources)
                    return Origin(origin.debug_handles, origin.op_types, *places, reason)
        return replace(origin, reason=f"{change}, and was inserted by lowering.")

    def _nearest(self, number: int, *, ahead: bool) -> list[int]:
        """Return the debug handles of the nearest nodes that are operators of the model and use, or compute, a node's value."""
        neighbours = self._consumers if ahead else self._producers
        handles: list[int] = []
        seen, front = {number}, [number]
        for _ in range(_MOST_HOPS):
            values = [value for at in front for value in _ends(self._graph.nodes[at], ahead=ahead)]
            front = sorted({at for value in values for at in neighbours.get(value, ())} - seen)
            seen.update(front)
            for node in (self._graph.nodes[at] for at in front):
                if node.debug_handle is not None and (node.kind != "Convert" or not ahead):
                    handles.append(node.debug_handle)
            if handles or not front:
                break
        return handles

    def _operators_of(self, part: kernels.Part) -> Mapping[int, Sequence[Node]]:
        """Return the operators that became a part, by debug handle in order; empty for an inserted node."""
        node = self._graph.nodes[part.node]
        following = self._record.followers.get(node.debug_handle or 0, ())
        behind = {handle: self._own(handle) for handle in following if handle in self._hidden}
        clamps = {handle: nodes for handle, nodes in behind.items() if self._clamps(handle)}
        if node.debug_handle is None or (part.clamp and clamps):
            return clamps
        if node.kind in kernels.BINARY or not node.clamped:
            behind = {handle: nodes for handle, nodes in behind.items() if handle not in clamps}
        return {node.debug_handle: self._operators(node), **behind}

    def _clamps(self, handle: int) -> bool:
        return any(base_name(node.op_type) in xnnpack.CLAMPS for node in self._record.nodes.get(handle, ()))

    def _operators(self, node: xnnpack.XNode) -> Sequence[Node]:
        """Return the operators with the node's handle that became this node; all of them if that is unknown."""
        handle = node.debug_handle or 0
        if node.kind == "Convert":
            candidates = self._record.nodes.get(handle, ())
            return [operator for operator in candidates if operator.op_type.startswith(_QUANTIZATION)] or candidates
        own = self._own(handle)
        return [operator for operator in own if base_name(operator.op_type) in xnnpack.OPERATORS.get(node.kind, ())] or own

    def _own(self, handle: int) -> Sequence[Node]:
        """Return a handle's nodes without those that quantize the output, which share the handle."""
        nodes = self._record.nodes.get(handle, ())
        return [node for node in nodes if not node.op_type.startswith(_QUANTIZATION)] or nodes


def _ends(node: xnnpack.XNode, *, ahead: bool) -> tuple[int, ...]:
    return node.outputs if ahead else node.inputs


def _common(origins_: Sequence[Origin]) -> Origin:
    """Return the origin of a kernel that is one of several nodes; `origins_` are theirs, in order."""
    handles = tuple(sorted({handle for origin in origins_ for handle in origin.debug_handles}))
    op_types = tuple(dict.fromkeys(name for origin in origins_ for name in origin.op_types))
    module = common_module(origin.holder for origin in origins_)
    sources = {origin.source for origin in origins_}
    if len(sources) == 1 and None not in sources:
        return Origin(handles, op_types, module, sources.pop())
    lines = dict.fromkeys(
        f"{source.file}:{source.line}" for origin in origins_ for source in (origin.sources or (origin.source,)) if source
    )
    reason = f"It is one of {len(origins_)} operators in a row, of which XNNPACK drops some without saying which"
    reason += f": {' or '.join(list(lines)[:_MOST_LINES])}." if lines else "."
    return Origin(handles, op_types, module, reason=reason)


def write_backs(program: Mapping[tuple[int, int], Instruction], record: Record) -> dict[tuple[int, int], Origin]:
    """Return the origins of the kernels that lowering adds to write the new value of a buffer back, by chain and instruction.

    They are the copies without a debug handle, in the order of the method's outputs. A buffer that a kernel changes in place
    has none; if the remaining buffers are not as many as the copies, their order says nothing, and the result is empty.
    """
    # A kernel without an overload is `aten.copy_`, one with it `aten.index_put_.default`.
    names = {place: [*known.name.split("."), ""][1] for place, known in program.items() if not known.delegate}
    copies = [place for place, name in sorted(names.items()) if name == "copy_" and not record.handles.get(place[1])]
    in_place = {name.removesuffix("_") for name in names.values() if name.endswith("_")}
    for mutations in (
        record.mutations,
        [mutation for mutation in record.mutations if base_name(mutation[1].op_type) not in in_place],
    ):
        if len(mutations) == len(copies):
            return {
                place: Origin(
                    module=node.module, source=node.source,
                    reason=f"It writes the new value of {name!r} back, which {node.op_type} computes.",
                )
                for place, (name, node) in zip(copies, mutations, strict=True)
            }  # fmt: skip
    return {}


def _origin(parts: Mapping[int, Sequence[Node]], main: int | None) -> Origin:
    nodes = [node for group in parts.values() for node in group]
    own = [node for node in nodes if not node.op_type.startswith(_QUANTIZATION)] or nodes
    places = [node for node in parts.get(main or 0, ()) if not node.op_type.startswith(_QUANTIZATION)] or nodes
    sources = sources_of(places)
    all_sources = tuple(dict.fromkeys((*sources, *sources_of(own))))
    return Origin(
        tuple(sorted(parts)),
        tuple(dict.fromkeys(node.op_type for node in nodes)),
        common_module(node.holder for node in places),
        sources[0] if len(sources) == 1 else None,
        all_sources if len(all_sources) > 1 else (),
    )
