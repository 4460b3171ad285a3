"""Step 9: where the kernels inside XNNPACK's delegates come from in the user's model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from etfarm.server.reports import kernels, xnnpack
from etfarm.server.reports.etdump import Call, Trace
from etfarm.server.reports.graph import Instruction, Node, Origin, Record, base_name
from etfarm.server.reports.sources import common_module

_QUANTIZATION: Final = "quantized_decomposed."
_CLAMPS: Final = frozenset({"relu", "relu6", "hardtanh", "clamp"})

_OPERATORS: Final[Mapping[str, frozenset[str]]] = {
    kind: frozenset(names.split())
    for kind, names in {
        "Add": "add",
        "BatchMatrixMultiply": "bmm",
        "Clamp": " ".join(sorted(_CLAMPS)),
        "Conv2d": "convolution",
        "ConvTranspose2d": "convolution",
        "DepthwiseConv2d": "convolution",
        "Div": "div",
        "FullyConnected": "linear addmm mm",
        "GlobalAvgPooling2d": "mean",
        "Multiply": "mul",
        "Sigmoid": "sigmoid",
        "StaticReshape": "view_copy squeeze_copy unsqueeze_copy",
        "StaticTranspose": "permute_copy",
        "Subtract": "sub",
    }.items()
}
"""Operators that become a kind of node, by their base names; only of kinds that one decomposed operator has together."""


@dataclass(frozen=True)
class Attribution:
    """What is known of all kernels of a trace."""

    kernels: Mapping[tuple[int, int], Mapping[str, Origin]]
    """By a delegate's chain and instruction: each kernel's origin by its identifier; an empty one for what XNNPACK or
    ExecuTorch inserted. A delegate is either here with all of its kernels or not at all."""
    delegates: int
    """How many of XNNPACK's were called and told their kernels."""
    unaligned: tuple[str, ...]
    """Why, for each of those that are missing."""


def attribute(trace: Trace, program: Mapping[tuple[int, int], Instruction], record: Record) -> Attribution:
    """The origins of the kernels in XNNPACK's delegates; of none where the record knows no nodes."""
    found: dict[tuple[int, int], Mapping[str, Origin]] = {}
    unaligned: list[str] = []
    calls = (
        [call for call in trace.calls if call.delegate and call.kernels and _is_xnnpack(program, call)] if record.nodes else []
    )
    for call in calls:
        place = (call.chain, call.instruction)
        names = [str(kernel.identifier) for kernel in call.kernels]
        try:
            graph = xnnpack.read(program[place].data or b"")
            matches = kernels.align(graph, names)
        except (xnnpack.BadGraph, kernels.Unaligned) as error:
            unaligned.append(f"Instruction {call.instruction}: {error}")
            continue
        delegate = _Delegate(graph, record, frozenset(record.handles.get(call.instruction, ())))
        found[place] = {name: delegate.origin(match) for name, match in zip(names, matches, strict=True)}
    return Attribution(found, len(calls), tuple(unaligned))


def _is_xnnpack(program: Mapping[tuple[int, int], Instruction], call: Call) -> bool:
    known = program.get((call.chain, call.instruction))
    return known is not None and known.delegate and known.name == xnnpack.NAME


class _Delegate:
    """One delegate's nodes among those of the model."""

    def __init__(self, graph: xnnpack.XGraph, record: Record, handles: frozenset[int]) -> None:
        self._graph = graph
        self._record = record
        # What quantizes an operator's output has the operator's handle.
        self._hidden = handles - {node.debug_handle for node in graph.nodes if node.kind != "Convert"}

    def origin(self, match: kernels.Match) -> Origin:
        """A kernel's origin: all that it does, with the place of the node it is named after, and of a table's first operator."""
        node = self._graph.nodes[match.node]
        if match.clamp:
            handles = [handle for handle in self._behind(node) if self._clamps(handle)]
            if handles:
                return _origin({handle: self._own(handle) for handle in handles}, handles[0])
        members = {index: self._graph.nodes[index] for index in sorted({match.node, *match.fused})}
        parts: dict[int, list[Node]] = {}
        for member in members.values():
            if member.debug_handle is not None:
                parts.setdefault(member.debug_handle, []).extend(self._operators(member))
            # What clamps a binary is a kernel of its own.
            for handle in () if match.separate else self._behind(member):
                parts.setdefault(handle, []).extend(self._own(handle))
        if match.fused and node.kind == "Convert":
            node = next((member for member in members.values() if member.kind != "Convert"), node)
        return _origin(parts, node.debug_handle)

    def _behind(self, node: xnnpack.XNode) -> Sequence[int]:
        """Handles of what the compiler fused into a node: they are the delegate's, and no node of it has them."""
        following = self._record.followers.get(node.debug_handle or 0, ())
        return [handle for handle in following if handle in self._hidden and (node.clamped or not self._clamps(handle))]

    def _clamps(self, handle: int) -> bool:
        return any(base_name(node.op_type) in _CLAMPS for node in self._record.nodes.get(handle, ()))

    def _operators(self, node: xnnpack.XNode) -> Sequence[Node]:
        """The operators of a node's handle that became this node; all where that cannot be told."""
        handle = node.debug_handle or 0
        if node.kind == "Convert":
            every = self._record.nodes.get(handle, ())
            return [one for one in every if one.op_type.startswith(_QUANTIZATION)] or every
        own = self._own(handle)
        return [one for one in own if base_name(one.op_type) in _OPERATORS.get(node.kind, ())] or own

    def _own(self, handle: int) -> Sequence[Node]:
        """A handle's nodes without what quantizes the output, which has the handle as well."""
        every = self._record.nodes.get(handle, ())
        return [node for node in every if not node.op_type.startswith(_QUANTIZATION)] or every


def _origin(parts: Mapping[int, Sequence[Node]], main: int | None) -> Origin:
    nodes = [node for found in parts.values() for node in found]
    places = [node for node in parts.get(main or 0, ()) if not node.op_type.startswith(_QUANTIZATION)] or nodes
    sources = {node.source for node in places if node.source is not None}
    return Origin(
        tuple(sorted(parts)),
        tuple(dict.fromkeys(node.op_type for node in nodes)),
        common_module(node.module for node in places),
        sources.pop() if len(sources) == 1 else None,
    )
