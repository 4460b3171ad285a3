"""The share of each module of the user's model in a program: stored constants and planned memory.

Constants outside of delegates are ExecuTorch's specs of placeholders. XNNPACK's constants differ from the graph's weights:
batch norms are folded into biases, 4-bit weights are packed two to a byte, and scales are separate. Therefore the graphs that
XNNPACK writes into delegates are captured during lowering; they have each constant's size and operation. Other backends do not
provide this, so a delegate's constants are those of its part of the graph, with the graph's dtypes.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from executorch.backends.xnnpack import xnnpack_preprocess
from executorch.exir import memory
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.graph_module import get_control_flow_submodules
from executorch.exir.lowered_backend_module import LoweredBackendModule
from executorch.exir.tensor import TensorSpec

from etfarm.server.compile.program.places import module_path
from etfarm.server.graphs import origins
from etfarm.server.graphs.sources import common_module
from etfarm.v1.compile_pb2 import ModuleFootprint

Graphs = Mapping[bytes, Any]
"""XNNPACK's graphs by the bytes of their delegates."""

_SCALE: Final = "scale_buffer_idx"
"""Field of a quantized value in XNNPACK's graph that refers to the constant with its scales."""

_MAX_HOPS: Final = 4
"""Maximum number of operators without a module, such as dequantize, between a constant and the first with a module."""


@contextmanager
def kept_graphs() -> Iterator[Graphs]:
    """Yield a dict that collects XNNPACK's graphs of the delegates that are created inside the context.

    Source: executorch.backends.xnnpack.xnnpack_preprocess, which looks its serializer up by name at each call.
    """
    graphs: dict[bytes, Any] = {}
    serialize = xnnpack_preprocess.serialize_xnnpack_binary

    def keep(graph: Any, constants: Any) -> Any:
        written = serialize(graph, constants)
        graphs[bytes(written)] = graph
        return written

    xnnpack_preprocess.serialize_xnnpack_binary = keep
    try:
        yield graphs
    finally:
        xnnpack_preprocess.serialize_xnnpack_binary = serialize


def of_program(manager: Any, graphs: Graphs) -> list[ModuleFootprint]:
    """Return the modules with constants or planned memory of an ExecutorchProgramManager, by method, the largest first.

    Data that several methods or modules share count once, for the first of them. Not counted are the parts of XNNPACK's
    delegates other than constants, a few kilobytes each, and padding for alignment.
    """
    seen: set[Hashable] = set()
    footprints = []
    for method in sorted(manager.methods):
        shares = _Method(manager.exported_program(method), graphs, seen).shares
        rows = [
            ModuleFootprint(
                method=method, module=module, constant_bytes=share.constant_bytes, planned_bytes=_peak_bytes(share.planned),
                planned_tensors=len(share.planned),
            )
            for module, share in shares.items()
            if share.constant_bytes or share.planned
        ]  # fmt: skip
        footprints += sorted(rows, key=lambda row: (-row.constant_bytes, -row.planned_bytes, row.module))
    return footprints


@dataclass
class _Share:
    """The share of one module."""

    constant_bytes: int = 0
    planned: list[TensorSpec] = field(default_factory=list)


class _Method:
    """A method's graph after memory planning, with the shares of its modules.

    Args:
        program: a program of an ExecutorchProgramManager.
        seen: constants that are already counted; this method's constants are added.
    """

    def __init__(self, program: Any, graphs: Graphs, seen: set[Hashable]) -> None:
        self.shares: dict[str, _Share] = defaultdict(_Share)
        self._signature = program.graph_signature
        self._graphs = graphs
        self._seen = seen
        self._planned: set[int] = set()
        self._walk(program.graph_module)

    def _walk(self, module: Any) -> None:
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self._add_placeholder(node, module)
            elif node.op == "get_attr" and isinstance(delegate := getattr(module, node.target, None), LoweredBackendModule):
                self._add_delegate(delegate)
            elif node.op == "call_function" and node.target not in (memory.alloc, memory.view):
                self._add_planned(node, _module_of(node, module) or "")
        for _, submodule, _ in get_control_flow_submodules(module):
            self._walk(submodule)

    def _add_placeholder(self, node: Any, module: Any) -> None:
        fqn = self._signature.inputs_to_parameters.get(node.name) or self._signature.inputs_to_buffers.get(node.name) or ""
        owner = _first_user(node, module) if fqn or node.name in self._signature.inputs_to_lifted_tensor_constants else ""
        owner = fqn.rpartition(".")[0] if owner is None else owner
        spec = node.meta.get("spec")
        if isinstance(spec, TensorSpec) and spec.const and spec.storage is not None:
            self._add_constant(owner, _digest(spec.storage), spec.storage.nbytes())
        self._add_planned(node, owner)

    def _add_delegate(self, delegate: Any) -> None:
        program, graph = delegate.original_module, self._graphs.get(delegate.processed_bytes)
        if graph is None:
            tensors = {**program.state_dict, **program.constants}
            by_name = {spec.arg.name: tensors.get(spec.target) for spec in program.graph_signature.input_specs}
            for node in program.graph.nodes:
                if node.op == "placeholder" and node.users and isinstance(value := by_name.get(node.name), torch.Tensor):
                    owner = _first_user(node, program.graph_module) or ""
                    self._add_constant(owner, _digest(value.untyped_storage()), value.nbytes)
            return
        modules: dict[Any, str] = {}
        for node in program.graph.nodes:
            if (module := _module_of(node, program.graph_module)) is not None:
                modules.setdefault(node.meta.get("debug_handle"), module)
        common = _common_module(modules.values())
        unions = [value.xvalue_union for value in graph.xvalues]
        values = {getattr(union, "tensor_value", union).id_out: union for union in unions}
        dropped = _dropped_handles(program.graph, graph, values)
        for at, xnode in enumerate(graph.xnodes):
            for index in _constant_indices(xnode.xnode_union, values):
                constant = graph.constant_data[index]
                key = constant.named_key or (delegate.processed_bytes, index)
                self._add_constant(modules.get(dropped.get(at, xnode.debug_handle), common), key, constant.size)

    def _add_constant(self, module: str, key: Hashable, size_bytes: int) -> None:
        if key not in self._seen:
            self._seen.add(key)
            self.shares[module].constant_bytes += size_bytes

    def _add_planned(self, node: Any, module: str) -> None:
        specs = node.meta.get("spec")
        for spec in specs if isinstance(specs, list | tuple) else (specs,):
            is_planned = isinstance(spec, TensorSpec) and spec.mem_id is not None and spec.mem_offset is not None
            # A tensor that reuses another tensor's storage has no planned memory.
            if is_planned and spec.storage_base is None and id(spec) not in self._planned:
                self._planned.add(id(spec))
                self.shares[module].planned.append(spec)


def _module_of(node: Any, graph_module: Any) -> str | None:
    """Return the module of an operator, or the common module of a delegate's operators; "" is the model itself."""
    if node.target is executorch_call_delegate:
        inside = getattr(graph_module, node.args[0].target).original_module
        return _common_module(
            module for inner in inside.graph.nodes if (module := _module_of(inner, inside.graph_module)) is not None
        )
    return (module_path(node) or "") if node.op == "call_function" and node.meta.get("nn_module_stack") else None


def _common_module(modules: Iterable[str]) -> str:
    paths = set(modules)
    return "" if "" in paths else common_module(paths) or ""


def _first_user(constant: Any, graph_module: Any) -> str | None:
    """Return the module of the first operator that uses a constant, directly or through operators without a module."""
    reached = [constant]
    for _ in range(_MAX_HOPS):
        users = [(node, user) for node in reached for user in node.users]
        for node, user in users:
            if user.target is executorch_call_delegate:
                inside = getattr(graph_module, user.args[0].target).original_module
                name = inside.graph_signature.user_inputs[user.args.index(node) - 1]
                placeholder = next(inner for inner in inside.graph.nodes if inner.name == name)
                return _first_user(placeholder, inside.graph_module)
            if (module := _module_of(user, graph_module)) is not None:
                return module
        reached = [user for _, user in users]
    return None


def _dropped_handles(graph: Any, xnnpack_graph: Any, values: Mapping[int, Any]) -> Mapping[int, int | None]:
    """Return the debug handles of XNNPACK's nodes that lost theirs, by index; see `origins`.

    Args:
        graph: the graph of the delegate's operators.
        values: values of XNNPACK's graph by id.
    """
    called = [node for node in graph.nodes if node.op == "call_function"]
    operators = [
        origins.Operator(
            (handle,) if isinstance(handle := node.meta.get("debug_handle"), int) and handle else (), _base_name(node.target),
            tuple(source.name for source in node.all_input_nodes), (node.name,),
            tuple(_count_elements(source) for source in node.all_input_nodes), _count_elements(node),
        )
        for node in called
    ]  # fmt: skip
    nodes = []
    for xnode in xnnpack_graph.xnodes:
        ids = {name: value for name, value in vars(xnode.xnode_union).items() if name.endswith("_id") and value in values}
        kind = type(xnode.xnode_union).__name__.removeprefix("XNN")
        inputs = tuple(value for name, value in sorted(ids.items()) if not name.startswith("output"))
        if kind.startswith("Concatenate"):
            inputs = inputs[: int(kind[-1])]  # the remaining fields are 0, which is the id of another value
        outputs = tuple(value for name, value in ids.items() if name.startswith("output"))
        sizes = tuple(math.prod(getattr(values[value], "tensor_value", values[value]).dims) for value in (*inputs, *outputs[:1]))
        nodes.append(
            origins.Node(
                kind,
                None if xnode.debug_handle == xnnpack_preprocess.DEFAULT_DEBUG_HANDLE else xnode.debug_handle,
                inputs, outputs, sizes[: len(inputs)], sum(sizes[len(inputs) :]),
            )
        )  # fmt: skip
    return origins.find(nodes, operators, [handle for operator in operators for handle in operator.handles])


def _base_name(target: Any) -> str:
    """Return the name of an edge operator without namespace and overload, like `addmm`."""
    parts = str(getattr(target, "__name__", target)).split(".")
    return parts[-2] if len(parts) > 1 else parts[0]


def _count_elements(node: Any) -> int:
    """Return the number of elements of a node's tensor; 0 if a dim is dynamic."""
    shape = getattr(node.meta.get("val"), "shape", ())
    return math.prod(shape) if shape and all(isinstance(size, int) for size in shape) else 0


def _constant_indices(operation: Any, values: Mapping[int, Any]) -> Iterator[int]:
    """Yield the indices of the constants that an operation of XNNPACK's graph uses, including scales."""
    for name, identifier in vars(operation).items():
        value = values.get(identifier) if name.endswith("_id") else None
        if value is None:
            continue
        tensor = getattr(value, "tensor_value", value)
        if tensor.constant_buffer_idx:
            yield tensor.constant_buffer_idx
        if scales := getattr(getattr(value, "quant_params", None), _SCALE, 0):
            yield scales


def _digest(storage: Any) -> Hashable:
    """Return a key of a constant's contents, because ExecuTorch stores equal constants once."""
    size_bytes = storage.nbytes()
    data = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size_bytes,)).numpy()
    return size_bytes, zlib.crc32(data), zlib.adler32(data[: 1 << 16])


def _peak_bytes(planned: list[TensorSpec]) -> int:
    """Return the maximum number of bytes that tensors occupy at the same time."""
    changes = []
    for spec in planned:
        began, ended = spec.lifetime
        changes += [(began or 0, 0, spec.allocated_memory), (ended or 0, 1, -spec.allocated_memory)]
    peak = occupied = 0
    for _, _, change in sorted(changes):
        occupied += change
        peak = max(peak, occupied)
    return peak
