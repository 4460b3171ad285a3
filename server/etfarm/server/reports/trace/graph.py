"""The compiler's metadata of each instruction, read from the ETRecord and the program.

Both are read without loading a graph: an ETRecord is a zip whose graphs are JSON, and torch's loader would execute its
`expr_str`. This leaves weights unread and works for every method, whereas Inspector fails for records with several methods.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from etfarm.server.graphs.origins import Operator
from etfarm.server.graphs.sources import Source, common_module, module_of, source_of
from etfarm.wire import pte
from etfarm.wire.errors import FarmError
from etfarm.wire.program_tables import InstructionKind, PlanTable, ProgramTables

_EDGE: Final = "edge_dialect_exported_program"
_TARGETS: Final = ("executorch.exir.dialects.edge.ops.", "torch.ops.")
_QUANTIZATION: Final = "quantized_decomposed."
_NOTHING: Final[frozenset[tuple[int, str]]] = frozenset()
_MAX_ENTRY_BYTES: Final = 256 << 20
_ABSORBED: Final = frozenset({"_native_batch_norm_legit_no_training", "relu", "relu6", "hardtanh", "clamp"})


class BadRecord(FarmError):
    """An ETRecord that cannot be read, or that lacks the method."""

    reason = "BAD_ETRECORD"


class BadProgram(FarmError):
    """A program that cannot be read, or that lacks the method."""

    reason = "BAD_PROGRAM"


@dataclass(frozen=True)
class Node:
    """One operator of the edge graph, before it was delegated."""

    op_type: str
    """Name with namespace and overload, such as `aten.convolution.default`."""
    module: str | None
    """Path of the innermost module; None for the model itself, and if it is unknown."""
    source: Source | None

    @property
    def holder(self) -> str | None:
        """The innermost module's path, empty for the model itself; None if it is unknown."""
        return self.module or (None if self.source is None else "")


@dataclass(frozen=True)
class Origin:
    """The origin of an instruction or a delegate's event in the user's model."""

    debug_handles: tuple[int, ...] = ()
    """Ascending, without duplicates."""
    op_types: tuple[str, ...] = ()
    """In the order of the graph, without duplicates."""
    module: str | None = None
    """The deepest module that holds all of its nodes."""
    source: Source | None = None
    """The common line, if all nodes that have a line share it."""
    sources: tuple[Source, ...] = ()
    """The lines of all its nodes, that of `source` first; empty if there is at most one."""
    reason: str | None = None
    """Why it has no line, or whose line it has instead of its own; None for the line of its own nodes. One sentence."""

    @property
    def holder(self) -> str | None:
        """The module's path, empty for the model itself; None if it is unknown."""
        return self.module or (None if self.source is None and not self.sources else "")


@dataclass(frozen=True)
class Record:
    """One method's part of an ETRecord."""

    handles: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Debug handles by instruction."""
    delegate_handles: Mapping[int, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    """By a delegate's instruction: debug handles by the backend's identifier; empty for XNNPACK, which reports no identifiers."""
    nodes: Mapping[int, tuple[Node, ...]] = field(default_factory=dict)
    """Operators by debug handle; the parts of one decomposed operator share a handle."""
    followers: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By debug handle: handles of the batch norm and clamping activation that are its only users, which backends fuse."""
    delegates: Mapping[int, str] = field(default_factory=dict)
    """Backends by the instructions of their delegates."""
    operators: tuple[Operator, ...] = ()
    """The operators of `nodes` in the graph's order, with the values that flow between them."""
    mutations: tuple[tuple[str, Node], ...] = ()
    """The buffers and inputs that the method changes, in the order of its outputs, each with the operator of its new value."""

    def origin(self, handles: Sequence[int], *, kernel: str | None = None, without: Set[tuple[int, str]] = _NOTHING) -> Origin:
        """Return what the nodes of `handles` have in common.

        Args:
            kernel: restricts the nodes to this kernel's type, if there are any. A linear that became permute_copy and addmm has
                one handle for both, and each kernel takes its own node.
            without: handles and types (see `base_name`) of nodes to exclude. A node that quantizes an undelegated kernel's
                output for a delegate has the kernel's handle.
        """
        unique = tuple(sorted(set(handles)))
        candidates = [(handle, base_name(node.op_type), node) for handle in unique for node in self.nodes.get(handle, ())]
        nodes = [node for handle, name, node in candidates if (handle, name) not in without]
        if kernel is not None:
            nodes = [node for node in nodes if base_name(node.op_type) == base_name(kernel)] or nodes
        # Quantization nodes have no location in the user's model; use their neighbours' instead.
        own = [node for node in nodes if not node.op_type.startswith(_QUANTIZATION)] or nodes
        places = sources_of(own)
        return Origin(
            unique,
            tuple(dict.fromkeys(node.op_type for node in nodes)),
            common_module(node.holder for node in own),
            places[0] if len(places) == 1 else None,
            places if len(places) > 1 else (),
        )


@dataclass(frozen=True)
class Instruction:
    """One kernel or delegate call of a program."""

    name: str
    """The kernel's name, such as `aten.convolution.out`, or a delegate's backend."""
    delegate: bool
    data: memoryview | None = None
    """The backend's processed subgraph; None for a kernel, and if the bytes are in another file."""


_MOST_DIMS: Final = 64
"""Maximum number of dims of a tensor; PyTorch's own limit."""
_MOST_FOLLOWERS: Final = 1000
"""Maximum length of a chain of absorbed nodes; a longer one indicates a cyclic graph."""
_MOST_HANDLES: Final = 1 << 20
"""Maximum number of debug handles of one instruction or node, and of all nodes that are absorbed."""
_COMPRESSIONS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Compressions that zipfile expands no further than it is asked to."""

UNREADABLE: Final = (
    zipfile.BadZipFile, OSError, EOFError, KeyError, ValueError, TypeError, AttributeError, OverflowError, zlib.error,
    MemoryError,
    # zipfile raises RuntimeError for an encrypted entry and for an unsupported compression.
    RuntimeError,
)  # fmt: skip
"""Exceptions raised on a damaged archive or JSON of another form; RecursionError is a RuntimeError."""


def base_name(name: str) -> str:
    """Return an operator's name without namespace and overload: `addmm` for `aten.addmm.default` and `addmm.out`."""
    parts = name.split(".")
    return parts[-2] if len(parts) > 1 else name


def sources_of(nodes: Iterable[Node]) -> tuple[Source, ...]:
    """Return the nodes' distinct lines in their order."""
    return tuple(dict.fromkeys(node.source for node in nodes if node.source is not None))


def read_record(path: Path, method: str) -> Record:
    """Return the method's part of an ETRecord.

    Raises:
        BadRecord: it cannot be read, or lacks the method.
    Source: executorch.devtools.etrecord._etrecord writes it; tested against the results of Inspector.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = set(archive.namelist())
            handles, delegates = (
                _of_method(_load(archive, entry), method) if entry in entries else {}
                for entry in ("debug_handle_map", "delegate_map")
            )
            module = _module(archive, method)
        graph = module["graph"]
        graphs = list(_graphs(graph))
        nodes: dict[int, list[Node]] = {}
        for node in (node for each in graphs for node in each["nodes"]):
            for handle in handles_of(node["metadata"].get("debug_handle")):
                nodes.setdefault(handle, []).append(node_of(node))
        return Record(
            {int(instruction): handles_of(value) for instruction, value in handles.items()},
            {
                int(i): {key: handles_of(value) for key, value in (d.get("delegate_map") or {}).items()}
                for i, d in delegates.items()
            },
            {handle: tuple(group) for handle, group in nodes.items()},
            {handle: following for each in graphs for handle, following in _followers(each).items()},
            {int(instruction): str(delegate.get("name")) for instruction, delegate in delegates.items()},
            tuple(
                _operator(node, each.get("tensor_values") or {}, f"{place}." if place else "")
                for place, each in enumerate(graphs)
                for node in each["nodes"]
            ),
            tuple(_mutations(graph, module.get("signature") or {})),
        )
    except UNREADABLE as error:
        detail = f"{type(error).__name__}: {error}"
        raise BadRecord(f"The ETRecord cannot be read for the method {method!r} ({detail}).", method=method) from error


def read_graph(path: Path, method: str) -> Mapping[str, Any]:
    """Return the method's edge graph as the ETRecord's JSON has it; see torch._export.serde.schema.Graph.

    Raises:
        zipfile.BadZipFile, OSError, KeyError, ValueError, RecursionError: it cannot be read, or lacks the method.
    """
    with zipfile.ZipFile(path) as archive:
        graph: Mapping[str, Any] = _module(archive, method)["graph"]
        return graph


def read_program(path: Path, method: str) -> dict[tuple[int, int], Instruction]:
    """Return kernels and delegates of a .pte's method by chain and instruction, as the runtime numbers them.

    Raises:
        BadProgram: it cannot be read, or lacks the method.
    Source: executorch/schema/program.fbs.
    """
    try:
        file = memoryview(path.read_bytes())
        if not pte.identifier_of(file).startswith(pte.FAMILY):
            raise ValueError("it is not an ExecuTorch program")
        program = ProgramTables(file)
        plan = next((plan for plan in program.plans() if plan.name == method), None)
        if plan is None:
            raise BadProgram(f"The program has no method {method!r}.", method=method)
        return dict(_instructions(plan, program))
    except (IndexError, ValueError, OSError) as error:
        raise BadProgram(f"The program cannot be read ({type(error).__name__}: {error}).", method=method) from error


def _instructions(plan: PlanTable, program: ProgramTables) -> Iterator[tuple[tuple[int, int], Instruction]]:
    operators, delegates = [operator.replace("::", ".") for operator in plan.operators()], plan.delegates()
    for chain_index, chain in enumerate(plan.chains()):
        for index, (kind, call) in enumerate(chain):
            if kind == InstructionKind.KERNEL_CALL and call is not None:
                yield (chain_index, index), Instruction(operators[call.number(0)], delegate=False)
            elif kind == InstructionKind.DELEGATE_CALL and call is not None:
                delegate = delegates[call.number(0)]
                yield (chain_index, index), Instruction(delegate.backend, True, memoryview(program.data_of(delegate)))


def _load(archive: zipfile.ZipFile, entry: str) -> Any:
    info = archive.getinfo(entry)
    if info.file_size > _MAX_ENTRY_BYTES:
        raise ValueError(f"{entry} has {info.file_size} bytes")
    if info.compress_type not in _COMPRESSIONS:
        raise ValueError(f"{entry} has the compression {info.compress_type}")
    if info.header_offset + info.compress_size > archive.start_dir:
        raise ValueError(f"{entry} ends behind the archive's entries")
    with archive.open(info) as packed:
        return json.loads(packed.read(info.file_size))  # without a size, it would expand all, and then cut it


def _graph_entry(archive: zipfile.ZipFile, method: str) -> str:
    """Return the name of the method's graph. A record with a single method stores it as `forward`, whatever its name is."""
    names = set(archive.namelist())
    graphs = [name for name in names if name.startswith(f"{_EDGE}/") and f"{name}_state_dict" in names]
    if f"{_EDGE}/{method}" in graphs:
        return f"{_EDGE}/{method}"
    if len(graphs) == 1:
        return graphs[0]
    return _EDGE  # the name in older records; a missing entry raises a KeyError


def _module(archive: zipfile.ZipFile, method: str) -> Mapping[str, Any]:
    """Return the method's graph with its signature; see torch._export.serde.schema.GraphModule."""
    module: Mapping[str, Any] = _load(archive, _graph_entry(archive, method))["graph_module"]
    return module


def _of_method(maps: Mapping[str, Any] | None, method: str) -> Mapping[str, Any]:
    return (maps or {}).get(method) or {}


def node_of(node: Mapping[str, Any]) -> Node:
    """Return the operator of a serialized node."""
    target, metadata = str(node["target"]), node["metadata"]
    for prefix in _TARGETS:
        target = target.removeprefix(prefix)
    module, source = module_of(metadata.get("nn_module_stack")), source_of(metadata.get("stack_trace"))
    _require_reportable(target, module or "", *((source.file, source.code) if source is not None else ()))
    if source is not None and source.line >= 1 << 31:
        raise ValueError(f"a stack trace has the line {source.line}")
    return Node(target, module, source)


def _require_reportable(*texts: str) -> None:
    """Raise a ValueError for texts that a report cannot hold: JSON may have half of a surrogate pair."""
    for text in texts:
        text.encode()


def _graphs(graph: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a serialized graph, and those of its branches and loop bodies, which are arguments of its operators."""
    yield graph
    for node in graph["nodes"]:
        for argument in node["inputs"]:
            below = argument["arg"].get("as_graph") if isinstance(argument.get("arg"), dict) else None
            if below is not None:
                yield from _graphs(below["graph"])


def _operator(node: Mapping[str, Any], metas: Mapping[str, Any], prefix: str) -> Operator:
    """Return a serialized node as an operator; the prefix distinguishes values of branches, whose names are those of others."""
    takes, gives = tuple(tensor_names(node["inputs"])), tuple(tensor_names(node["outputs"]))
    sizes = [_elements(metas.get(name)) for name in (*takes, *gives[:1])]
    takes, gives = (tuple(prefix + name for name in names) for names in (takes, gives))
    return Operator(
        handles_of(node["metadata"].get("debug_handle")), base_name(str(node["target"])), takes, gives,
        tuple(sizes[: len(takes)]), sum(sizes[len(takes) :]),
    )  # fmt: skip


def _mutations(graph: Mapping[str, Any], signature: Mapping[str, Any]) -> Iterator[tuple[str, Node]]:
    producers = {name: node for node in graph["nodes"] for name in tensor_names(node["outputs"])}
    for spec in signature.get("output_specs") or ():
        mutation = spec.get("buffer_mutation") or spec.get("user_input_mutation")
        producer = producers.get(mutation["arg"]["name"]) if mutation else None
        if producer is not None:
            name = str(mutation.get("buffer_name") or mutation.get("user_input_name"))
            _require_reportable(name)
            yield name, node_of(producer)


def _elements(meta: Mapping[str, Any] | None) -> int:
    """Return the number of elements of a serialized tensor; 0 if a dim is dynamic or unknown."""
    shape = [] if meta is None else [int(size.get("as_int") or 0) for size in meta["sizes"]]
    if len(shape) > _MOST_DIMS or any(abs(size) >= 1 << 63 for size in shape):
        raise ValueError(f"a tensor has {len(shape)} dims of {shape[:8]}")
    return 0 if meta is None else math.prod(shape)


def _followers(graph: Mapping[str, Any]) -> dict[int, tuple[int, ...]]:
    nodes = graph["nodes"]
    users_of: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        for name in dict.fromkeys(tensor_names(node["inputs"])):
            users_of.setdefault(name, []).append(index)
    for name in tensor_names(graph["outputs"]):
        users_of.setdefault(name, []).append(-1)
    followers: dict[int, tuple[int, ...]] = {}
    total = 0
    for node in nodes:
        following: list[int] = []
        at = node
        length = 0
        while len(users := users_of.get(next(tensor_names(at["outputs"]), ""), [])) == 1 and users[0] >= 0:
            at = nodes[users[0]]
            if base_name(str(at["target"])) not in _ABSORBED:
                break
            if (length := length + 1) > _MOST_FOLLOWERS:
                raise ValueError(f"more than {_MOST_FOLLOWERS} activations follow each other")
            following.extend(handles_of(at["metadata"].get("debug_handle")))
            if total + len(following) > _MOST_HANDLES:
                raise ValueError(f"more than {_MOST_HANDLES:,} activations follow operators")
        total += len(following)
        if following:
            followers.update((handle, tuple(following)) for handle in handles_of(node["metadata"].get("debug_handle")))
    return followers


def tensor_names(value: Any) -> Iterator[str]:
    """Yield the names of all tensors in a serialized node's inputs or outputs, in their order."""
    if isinstance(value, list):
        for part in value:
            yield from tensor_names(part)
    elif isinstance(value, dict):
        for key, part in value.items():
            if key == "as_tensor":
                yield str(part["name"])
            elif key == "as_tensors":
                yield from (str(tensor["name"]) for tensor in part)
            elif key == "arg":
                yield from tensor_names(part)


def handles_of(value: object) -> tuple[int, ...]:
    """Return debug handles, which records write as 3, [3, 4], "3" or "(3, 4)"; 0 means no handle.

    Raises:
        ValueError: they are too many, or too large for a report.
    """
    handles = tuple(number for number in map(int, re.findall(r"\d+", str(value or ""))) if number)
    if len(handles) > _MOST_HANDLES or any(handle >= 1 << 63 for handle in handles):
        raise ValueError(f"an operator has {len(handles):,} debug handles, the largest of which is {max(handles)}")
    return handles
