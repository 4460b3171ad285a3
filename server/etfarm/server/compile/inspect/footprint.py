"""What each module of the user's model takes of a program: constants as they are stored, and room in its planned memory.

Constants outside of delegates are ExecuTorch's specs of placeholders. What XNNPACK keeps is another thing than the graph's
weights: batch norms are folded into biases, 4-bit weights are packed two to a byte, scales stand beside. So the graphs that it
writes into delegates are kept while it lowers, which name each constant, its size and the operation that takes it. Of other
backends, which tell nothing, a delegate's constants are those of its part of the graph, in the graph's own dtypes.
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
from etfarm.server.compile.result import ModuleFootprint
from etfarm.server.graphs import origins
from etfarm.server.graphs.sources import common_module

Graphs = Mapping[bytes, Any]
"""XNNPACK's graphs by the bytes of the delegates that they were written into."""

_SCALE: Final = "scale_buffer_idx"
"""Where a quantized value of XNNPACK's graph names the constant that holds its scales."""

_MAX_HOPS: Final = 4
"""Operators without a module, as those that dequantize, between a constant and the first that has one."""


@contextmanager
def kept_graphs() -> Iterator[Graphs]:
    """XNNPACK's graphs of the delegates that are made meanwhile.

    Source: executorch.backends.xnnpack.xnnpack_preprocess, which reads its serializer's name at each call.
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
    """The modules of an ExecutorchProgramManager's methods that own anything, by method, the largest first.

    What several methods or modules share counts once, for the first of them. The parts of XNNPACK's delegates that are no
    constants, a few kilobytes each, and what alignment adds belong to none.
    """
    seen: set[Hashable] = set()
    found = []
    for method in sorted(manager.methods):
        taken = _Method(manager.exported_program(method), graphs, seen).taken
        rows = [
            ModuleFootprint(
                method=method, module=module, constant_bytes=one.constant_bytes, planned_bytes=_most(one.planned),
                planned_tensors=len(one.planned),
            )
            for module, one in taken.items()
            if one.constant_bytes or one.planned
        ]  # fmt: skip
        found += sorted(rows, key=lambda row: (-row["constant_bytes"], -row["planned_bytes"], row["module"]))
    return found


@dataclass
class _Taken:
    """What one module takes."""

    constant_bytes: int = 0
    planned: list[TensorSpec] = field(default_factory=list)


class _Method:
    """One method's graph after memory planning.

    Args:
        program: of an ExecutorchProgramManager.
        seen: constants that were counted; those of this method are added.
    """

    def __init__(self, program: Any, graphs: Graphs, seen: set[Hashable]) -> None:
        self.taken: dict[str, _Taken] = defaultdict(_Taken)
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
                self._add_planned(node, _module(node, module) or "")
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
            held = {**program.state_dict, **program.constants}
            by_name = {spec.arg.name: held.get(spec.target) for spec in program.graph_signature.input_specs}
            for node in program.graph.nodes:
                if node.op == "placeholder" and node.users and isinstance(value := by_name.get(node.name), torch.Tensor):
                    owner = _first_user(node, program.graph_module) or ""
                    self._add_constant(owner, _digest(value.untyped_storage()), value.nbytes)
            return
        modules: dict[Any, str] = {}
        for node in program.graph.nodes:
            if (module := _module(node, program.graph_module)) is not None:
                modules.setdefault(node.meta.get("debug_handle"), module)
        whole = _holding(modules.values())
        unions = [value.xvalue_union for value in graph.xvalues]
        values = {getattr(union, "tensor_value", union).id_out: union for union in unions}
        dropped = _dropped_handles(program.graph, graph, values)
        for at, xnode in enumerate(graph.xnodes):
            for index in _constants(xnode.xnode_union, values):
                constant = graph.constant_data[index]
                key = constant.named_key or (delegate.processed_bytes, index)
                self._add_constant(modules.get(dropped.get(at, xnode.debug_handle), whole), key, constant.size)

    def _add_constant(self, module: str, key: Hashable, size_bytes: int) -> None:
        if key not in self._seen:
            self._seen.add(key)
            self.taken[module].constant_bytes += size_bytes

    def _add_planned(self, node: Any, module: str) -> None:
        specs = node.meta.get("spec")
        for spec in specs if isinstance(specs, list | tuple) else (specs,):
            is_planned = isinstance(spec, TensorSpec) and spec.mem_id is not None and spec.mem_offset is not None
            # One that was given another's room is not planned for again.
            if is_planned and spec.storage_base is None and id(spec) not in self._planned:
                self._planned.add(id(spec))
                self.taken[module].planned.append(spec)


def _module(node: Any, graph_module: Any) -> str | None:
    """The module of an operator, of a delegate's call that which holds all of its operators; "" is the model itself."""
    if node.target is executorch_call_delegate:
        inside = getattr(graph_module, node.args[0].target).original_module
        return _holding(module for one in inside.graph.nodes if (module := _module(one, inside.graph_module)) is not None)
    return (module_path(node) or "") if node.op == "call_function" and node.meta.get("nn_module_stack") else None


def _holding(modules: Iterable[str]) -> str:
    found = set(modules)
    return "" if "" in found else common_module(found) or ""


def _first_user(constant: Any, graph_module: Any) -> str | None:
    """The module of the first operator that takes a constant; of those that change its type only, what takes theirs."""
    reached = [constant]
    for _ in range(_MAX_HOPS):
        users = [(node, user) for node in reached for user in node.users]
        for node, user in users:
            if user.target is executorch_call_delegate:
                inside = getattr(graph_module, user.args[0].target).original_module
                name = inside.graph_signature.user_inputs[user.args.index(node) - 1]
                taken = next(one for one in inside.graph.nodes if one.name == name)
                return _first_user(taken, inside.graph_module)
            if (module := _module(user, graph_module)) is not None:
                return module
        reached = [user for _, user in users]
    return None


def _dropped_handles(graph: Any, xnnpack_graph: Any, values: Mapping[int, Any]) -> Mapping[int, int | None]:
    """The debug handles of XNNPACK's nodes that lost theirs, by index; see `origins`.

    Args:
        graph: of the delegate's operators.
        values: of XNNPACK's graph by their ids.
    """
    called = [node for node in graph.nodes if node.op == "call_function"]
    operators = [
        origins.Operator(
            (handle,) if isinstance(handle := node.meta.get("debug_handle"), int) and handle else (), _base_name(node.target),
            tuple(one.name for one in node.all_input_nodes), (node.name,),
            tuple(_elements(one) for one in node.all_input_nodes), _elements(node),
        )
        for node in called
    ]  # fmt: skip
    nodes = []
    for xnode in xnnpack_graph.xnodes:
        ids = {name: value for name, value in vars(xnode.xnode_union).items() if name.endswith("_id") and value in values}
        kind = type(xnode.xnode_union).__name__.removeprefix("XNN")
        takes = tuple(value for name, value in sorted(ids.items()) if not name.startswith("output"))
        if kind.startswith("Concatenate"):
            takes = takes[: int(kind[-1])]  # the others say 0, which is a value of its own
        gives = tuple(value for name, value in ids.items() if name.startswith("output"))
        sizes = tuple(math.prod(getattr(values[one], "tensor_value", values[one]).dims) for one in (*takes, *gives[:1]))
        nodes.append(
            origins.Node(
                kind,
                None if xnode.debug_handle == xnnpack_preprocess.DEFAULT_DEBUG_HANDLE else xnode.debug_handle,
                takes, gives, sizes[: len(takes)], sum(sizes[len(takes) :]),
            )
        )  # fmt: skip
    return origins.find(nodes, operators, [handle for one in operators for handle in one.handles])


def _base_name(target: Any) -> str:
    """`addmm` of an edge operator."""
    parts = str(getattr(target, "__name__", target)).split(".")
    return parts[-2] if len(parts) > 1 else parts[0]


def _elements(node: Any) -> int:
    """Of a node's tensor; 0 where a dim is dynamic."""
    shape = getattr(node.meta.get("val"), "shape", ())
    return math.prod(shape) if shape and all(isinstance(size, int) for size in shape) else 0


def _constants(operation: Any, values: Mapping[int, Any]) -> Iterator[int]:
    """Indexes of the constants that an operation of XNNPACK's graph takes, scales of quantized ones included."""
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
    """What tells constants apart: ExecuTorch stores equal ones once."""
    size_bytes = storage.nbytes()
    data = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size_bytes,)).numpy()
    return size_bytes, zlib.crc32(data), zlib.adler32(data[: 1 << 16])


def _most(planned: list[TensorSpec]) -> int:
    """The most that tensors take at one time of their lifetimes, bytes."""
    changes = []
    for spec in planned:
        began, ended = spec.lifetime
        changes += [(began or 0, 0, spec.allocated_memory), (ended or 0, 1, -spec.allocated_memory)]
    most = taken = 0
    for _, _, change in sorted(changes):
        taken += change
        most = max(most, taken)
    return most
