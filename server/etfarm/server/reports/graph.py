"""Step 9, in the jailed child: what the compiler knew of each instruction, from the ETRecord and the program.

Both are read without loading a graph: an ETRecord is a zip whose graphs are JSON, and torch's loader would execute its
`expr_str`. That also leaves weights unread and works for every method, where Inspector fails for records of several.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from etfarm.server.reports.sources import Source, common_module, module_of, source_of
from etfarm.wire.errors import FarmError

_EDGE: Final = "edge_dialect_exported_program"
_TARGETS: Final = ("executorch.exir.dialects.edge.ops.", "torch.ops.")
_QUANTIZATION: Final = "quantized_decomposed."
_NOTHING: Final[frozenset[tuple[int, str]]] = frozenset()
_MAX_ENTRY_BYTES: Final = 256 << 20
_ABSORBED: Final = frozenset({"_native_batch_norm_legit_no_training", "relu", "relu6", "hardtanh", "clamp"})
_EXTENDED_HEADER: Final = b"eh00"


class BadRecord(FarmError):
    """The ETRecord cannot be read, or knows nothing of the method."""

    reason = "BAD_ETRECORD"


class BadProgram(FarmError):
    """The program cannot be read, or does not have the method."""

    reason = "BAD_PROGRAM"


@dataclass(frozen=True)
class Node:
    """One operator of the edge graph, before it was delegated."""

    op_type: str
    """`aten.convolution.default`."""
    module: str | None
    source: Source | None


@dataclass(frozen=True)
class Origin:
    """Where an instruction or a delegate's event comes from in the user's model."""

    debug_handles: tuple[int, ...] = ()
    """Ascending, each once."""
    op_types: tuple[str, ...] = ()
    """In the order of the graph, each once."""
    module: str | None = None
    """The deepest module that holds all of its nodes."""
    source: Source | None = None
    """Where all of its nodes that have a line have the same one."""


@dataclass(frozen=True)
class Record:
    """One method's part of an ETRecord."""

    handles: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Debug handles by instruction."""
    delegate_handles: Mapping[int, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    """By a delegate's instruction: debug handles by the backend's identifier; empty for XNNPACK, which tells none."""
    nodes: Mapping[int, tuple[Node, ...]] = field(default_factory=dict)
    """By debug handle; what one operator was decomposed into shares a handle."""
    followers: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By debug handle: those of the batch norm and the clamping activation that alone take its output, which backends fuse."""

    def origin(self, handles: Sequence[int], *, kernel: str | None = None, without: Set[tuple[int, str]] = _NOTHING) -> Origin:
        """What the nodes of `handles` have in common.

        Args:
            kernel: only nodes of this kernel's type, where there are some. A linear that became permute_copy and addmm has one
                handle for both, and each takes its own.
            without: no nodes of these handles and types (see `base_name`). What quantizes an undelegated kernel's output for
                a delegate has the kernel's handle.
        """
        unique = tuple(sorted(set(handles)))
        found = [(handle, base_name(node.op_type), node) for handle in unique for node in self.nodes.get(handle, ())]
        nodes = [node for handle, name, node in found if (handle, name) not in without]
        if kernel is not None:
            nodes = [node for node in nodes if base_name(node.op_type) == base_name(kernel)] or nodes
        # Quantization has no place in the user's model but the one of its neighbours.
        own = [node for node in nodes if not node.op_type.startswith(_QUANTIZATION)] or nodes
        places = {node.source for node in own if node.source is not None}
        return Origin(
            unique,
            tuple(dict.fromkeys(node.op_type for node in nodes)),
            common_module(node.module for node in own),
            places.pop() if len(places) == 1 else None,
        )


@dataclass(frozen=True)
class Instruction:
    """What a program executes at one place."""

    name: str
    """`aten.convolution.out`, or the backend of a delegate."""
    delegate: bool
    data: memoryview | None = None
    """What the backend made of its part of the graph; None for a kernel, and where the bytes are in another file."""


def base_name(name: str) -> str:
    """An operator's name without namespace and overload: `addmm` of `aten.addmm.default`, `aten.addmm.out`, `addmm.out`."""
    parts = name.split(".")
    return parts[-2] if len(parts) > 1 else name


def read_record(path: Path, method: str) -> Record:
    """The method's part of an ETRecord.

    Raises:
        BadRecord: it cannot be read, or holds no such method.
    Source: executorch.devtools.etrecord._etrecord writes it; tested against what Inspector says.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            handles = _of_method(_load(archive, "debug_handle_map"), method)
            delegates = _of_method(_load(archive, "delegate_map"), method)
            graph = _load(archive, _graph_entry(archive, method))["graph_module"]["graph"]
        nodes: dict[int, list[Node]] = {}
        for node in graph["nodes"]:
            for handle in _numbers(node["metadata"].get("debug_handle")):
                nodes.setdefault(handle, []).append(_node(node))
        return Record(
            {int(instruction): _numbers(value) for instruction, value in handles.items()},
            {
                int(i): {key: _numbers(value) for key, value in (d.get("delegate_map") or {}).items()}
                for i, d in delegates.items()
            },
            {handle: tuple(found) for handle, found in nodes.items()},
            _followers(graph),
        )
    except (zipfile.BadZipFile, OSError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        detail = f"{type(error).__name__}: {error}"
        raise BadRecord(f"The ETRecord cannot be read for the method {method!r} ({detail}).", method=method) from error


def read_program(path: Path, method: str) -> dict[tuple[int, int], Instruction]:
    """Kernels and delegates of a .pte's method by chain and instruction, as the runtime numbers them.

    Raises:
        BadProgram: it cannot be read, or has no such method.
    Source: executorch/schema/program.fbs, by ExecuTorch's generated reader.
    """
    from executorch.exir._serialize import _flatbuffer_program
    from executorch.exir._serialize.generated.executorch_flatbuffer.Program import Program

    # The generated modules name classes by their modules until ExecuTorch has put that right; it does so once.
    _flatbuffer_program._patch_generated_flatbuffer_aliases()
    try:
        file = memoryview(path.read_bytes())
        program = Program.GetRootAs(file, 0)
        plans = [program.ExecutionPlan(index) for index in range(program.ExecutionPlanLength())]
        plan = next((plan for plan in plans if _text(plan.Name()) == method), None)
        if plan is None:
            raise BadProgram(f"The program has no method {method!r}.", method=method)
        return dict(_instructions(plan, program, file))
    except BadProgram:
        raise
    except Exception as error:  # the generated reader checks no bounds: struct.error, IndexError, TypeError, ...
        raise BadProgram(f"The program cannot be read ({type(error).__name__}: {error}).", method=method) from error


def _instructions(plan: Any, program: Any, file: memoryview) -> Iterator[tuple[tuple[int, int], Instruction]]:
    from executorch.exir._serialize.generated.executorch_flatbuffer.DelegateCall import DelegateCall
    from executorch.exir._serialize.generated.executorch_flatbuffer.InstructionArguments import InstructionArguments
    from executorch.exir._serialize.generated.executorch_flatbuffer.KernelCall import KernelCall

    for chain_index in range(plan.ChainsLength()):
        chain = plan.Chains(chain_index)
        for index in range(chain.InstructionsLength()):
            instruction = chain.Instructions(index)
            kind, table = instruction.InstrArgsType(), instruction.InstrArgs()
            if kind == InstructionArguments.KernelCall:
                kernel = KernelCall()
                kernel.Init(table.Bytes, table.Pos)
                operator = plan.Operators(kernel.OpIndex())
                name, overload = _text(operator.Name()).replace("::", "."), _text(operator.Overload())
                yield (chain_index, index), Instruction(f"{name}.{overload}" if overload else name, delegate=False)
            elif kind == InstructionArguments.DelegateCall:
                call = DelegateCall()
                call.Init(table.Bytes, table.Pos)
                delegate = plan.Delegates(call.DelegateIndex())
                yield (
                    (chain_index, index),
                    Instruction(_text(delegate.Id()), True, _processed(delegate.Processed(), program, file)),
                )


def _processed(reference: Any, program: Any, file: memoryview) -> memoryview | None:
    """A delegate's bytes: within the program's own flatbuffer, or in a segment behind it.

    Source: executorch/exir/_serialize/_program.py, _ExtendedHeader.
    """
    from executorch.exir._serialize.generated.executorch_flatbuffer.DataLocation import DataLocation

    if reference is None:
        return None
    if reference.Location() == DataLocation.INLINE:
        return memoryview(program.BackendDelegateData(reference.Index()).DataAsNumpy())
    if bytes(file[8:12]) != _EXTENDED_HEADER:
        return None
    segment = program.Segments(reference.Index())
    start = int.from_bytes(file[24:32], "little") + segment.Offset()
    return file[start : start + segment.Size()]


def _text(value: bytes | None) -> str:
    return (value or b"").decode()


def _load(archive: zipfile.ZipFile, entry: str) -> Any:
    if archive.getinfo(entry).file_size > _MAX_ENTRY_BYTES:
        raise ValueError(f"{entry} has {archive.getinfo(entry).file_size} bytes")
    return json.loads(archive.read(entry))


def _graph_entry(archive: zipfile.ZipFile, method: str) -> str:
    """The graph of the method. A record of one method files it as `forward`, whatever its name is."""
    names = set(archive.namelist())
    graphs = [name for name in names if name.startswith(f"{_EDGE}/") and f"{name}_state_dict" in names]
    if f"{_EDGE}/{method}" in graphs:
        return f"{_EDGE}/{method}"
    if len(graphs) == 1:
        return graphs[0]
    return _EDGE  # as older records have it; a KeyError names it where there is none


def _of_method(maps: Mapping[str, Any] | None, method: str) -> Mapping[str, Any]:
    return (maps or {}).get(method) or {}


def _node(node: Mapping[str, Any]) -> Node:
    target, metadata = str(node["target"]), node["metadata"]
    for prefix in _TARGETS:
        target = target.removeprefix(prefix)
    return Node(target, module_of(metadata.get("nn_module_stack")), source_of(metadata.get("stack_trace")))


def _followers(graph: Mapping[str, Any]) -> dict[int, tuple[int, ...]]:
    nodes = graph["nodes"]
    takers: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        for name in dict.fromkeys(_tensors(node["inputs"])):
            takers.setdefault(name, []).append(index)
    for name in _tensors(graph["outputs"]):
        takers.setdefault(name, []).append(-1)
    found: dict[int, tuple[int, ...]] = {}
    for node in nodes:
        behind: list[int] = []
        at = node
        while len(users := takers.get(next(_tensors(at["outputs"]), ""), [])) == 1 and users[0] >= 0:
            at = nodes[users[0]]
            if base_name(str(at["target"])) not in _ABSORBED:
                break
            behind.extend(_numbers(at["metadata"].get("debug_handle")))
        if behind:
            found.update((handle, tuple(behind)) for handle in _numbers(node["metadata"].get("debug_handle")))
    return found


def _tensors(value: Any) -> Iterator[str]:
    """The names of all tensors in a serialized node's inputs or outputs, in their order."""
    if isinstance(value, list):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for key, part in value.items():
            if key == "as_tensor":
                yield str(part["name"])
            elif key == "as_tensors":
                yield from (str(tensor["name"]) for tensor in part)
            elif key == "arg":
                yield from _tensors(part)


def _numbers(value: object) -> tuple[int, ...]:
    """Debug handles as records have them: 3, [3, 4], "3" or "(3, 4)"; 0 says that there is none."""
    return tuple(number for number in map(int, re.findall(r"\d+", str(value or ""))) if number)
