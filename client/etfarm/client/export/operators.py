"""Operators and values of an exported program that torch.export lets through, and that no archive or server can have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from etfarm.client.export.errors import export_failed, unsupported_output
from etfarm.client.export.remedies import DATA, GRADIENTS
from etfarm.client.export.structures import to_plain
from etfarm.client.export.traces import place_in
from etfarm.wire.batch_norms import join_batch_norms

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.export import ExportedProgram
    from torch.fx import Graph, Node

_PREDISPATCH: Final = "torch._functorch.predispatch"
"""Functions that begin and end torch.vmap and torch.func.jvp, and torch's own loops such as associative_scan."""

_KNOWN: Final = frozenset(
    ("aten", "dim_order_ops", "executorch", "executorch_prim", "higher_order", "llama", "prim", "prims", "quant", "quantized",
     "quantized_decomposed", "torchao", "torchvision")
)  # fmt: skip
"""Namespaces of operators that servers and quantizers know as they are."""
_PLUGINS: Final = "etfarm.operators"
"""Group of entry points that allow servers other operators."""

_IN_PLACE: Final = {
    "unsqueeze_": "x = x.unsqueeze(dim)",
    "as_strided_": "x = x.as_strided(sizes, strides)",
    "resize_": "x = x.flatten()[:n].view(sizes), or x.new_zeros(sizes) for a larger one",
    "set_": "x = other",
}
"""Operators that change a tensor's shape in place, with what gives a tensor of that shape."""
_REFUSED: Final = ("resize_", "set_")
"""Those that no program has, whichever tensor they change. For the others, that is an input that gets more dims."""


def find_reshaping(graph: Graph, operators: Iterable[str] = tuple(_IN_PLACE)) -> tuple[str, str, Node] | None:
    """Return the first operator that changes a tensor's shape in place, with a remedy and its node; None without one."""
    for node in graph.nodes:
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        if name in operators:
            return name, f"Write {_IN_PLACE[name]}, instead of changing the shape of x in place.", node
    return None


def allow_dynamic_pools() -> None:
    """Let torch.export write max_pool1d with max_pool2d: its own kernel in C++ fixes the length to that of the example inputs."""
    import torch

    operator, key = torch.ops.aten.max_pool1d.default, torch._C.DispatchKey.CompositeImplicitAutograd
    if key not in operator.py_kernels:
        operator.py_impl(key)(_max_pool1d)


def _max_pool1d(x: Any, size: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False) -> Any:
    import torch

    strides = (1, *stride) if stride else ()
    return torch.ops.aten.max_pool2d(x.unsqueeze(-2), (1, *size), strides, (0, *padding), (1, *dilation), ceil_mode).squeeze(-2)


def plain_operators(program: ExportedProgram) -> ExportedProgram:
    """Return a program without what servers refuse, though torch can write it with other operators: with these.

    That are the functions of torch.vmap, operators that write their result to an `out`, max_pool1d of a dynamic length, and
    operators of the user's libraries with a kernel of CompositeImplicitAutograd. All others stay whole. A program without such
    operators is returned as it is.
    """
    import torch

    composites = _composites(program)
    writes_results = _writes_results(program)
    if not composites and not writes_results and not _has_predispatch(program):
        return program
    with torch.no_grad() if writes_results else nullcontext():  # an `out` has no gradients
        plain = program.run_decompositions({operator: _kernel_of(operator) for operator in composites})
    while inner := _composites(plain) - composites:  # in the kernels of others
        composites |= inner
        plain = plain.run_decompositions({operator: _kernel_of(operator) for operator in composites})
    for graph in _graphs(plain):
        join_batch_norms(graph)
    for node in plain.graph.nodes:
        _unlink_layer(node)
    plain.graph_module.recompile()
    return plain


def _graphs(program: ExportedProgram) -> list[Graph]:
    """Return the graphs of a program, also of its branches and loops."""
    from torch.fx import GraphModule

    return [part.graph for part in program.graph_module.modules() if isinstance(part, GraphModule)]


def _has_predispatch(program: ExportedProgram) -> bool:
    return any(getattr(node.target, "__module__", "") == _PREDISPATCH for graph in _graphs(program) for node in graph.nodes)


def _writes_results(program: ExportedProgram) -> bool:
    """Return whether an operator of torch writes its result to a tensor that is given as `out`."""
    schemas = (getattr(node.target, "_schema", None) for graph in _graphs(program) for node in graph.nodes)
    return any(schema.name.startswith("aten::") and any(each.is_out for each in schema.arguments) for schema in schemas if schema)


def _composites(program: ExportedProgram) -> set[OpOverload]:
    """Return the operators of the user's libraries that torch can write with others, except those that a plug-in allows.

    And max_pool1d if it is of a dynamic length, which no server could write with others.
    """
    import torch
    from torch._ops import OpOverload

    allowed = {point.name for point in entry_points(group=_PLUGINS)}
    nodes = [node for graph in _graphs(program) for node in graph.nodes if isinstance(node.target, OpOverload)]
    pool = torch.ops.aten.max_pool1d.default
    pools = {pool for node in nodes if node.target is pool and not isinstance(node.args[0].meta["val"].shape[-1], int)}
    return pools | {
        target for target in {node.target for node in nodes}
        if target.namespace not in _KNOWN and target._can_decompose() and str(target) not in allowed
    }  # fmt: skip


def _kernel_of(operator: OpOverload) -> Callable[..., Any]:
    """Return the function by which run_decompositions() writes an operator with others."""
    from torch._export.utils import _get_decomp_for_cia

    kernel: Callable[..., Any] = _get_decomp_for_cia(operator)
    return kernel


def _unlink_layer(node: Node) -> None:
    """Let an operator that a linear layer became not say that it is one: XNNPACK would take them for it, without its bias."""
    stack = node.meta.get("nn_module_stack") or {}
    is_linear = {key: getattr(kind, "__name__", str(kind)).endswith("Linear") for key, (_, kind) in stack.items()}
    if any(is_linear.values()) and str(node.target) != "aten.linear.default":
        for name in ("torch_fn", "source_fn_stack"):
            node.meta.pop(name, None)
        node.meta["nn_module_stack"] = {
            key: (path, "torch.nn.modules.module.Module" if is_linear[key] else kind) for key, (path, kind) in stack.items()
        }


def must_be_savable(method: str, program: ExportedProgram, base: Path) -> None:
    """Check what torch.export.save or the server would refuse without a reason.

    Args:
        base: folder that names of source files are relative to.

    Raises:
        EXPORT_FAILED: it has a tensor of torch.func.grad, an assignment to `.data`, or changes the size of a tensor in place.
        UNSUPPORTED_OUTPUT: it returns a string or another object that is neither a tensor nor a number.
    """
    import torch

    for value in program.constants.values():
        if isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
            line = "torch.func.grad, vjp and their like keep tensors of their own."
            raise export_failed(method, "NotImplementedError", line, "", remedy=GRADIENTS)
    for node in program.graph.nodes:
        if "_has_compatible_shallow_copy_type" in str(node.target):
            line = "an assignment to the .data of a tensor is not part of the program."
            raise export_failed(method, "NotImplementedError", line, "", remedy=DATA)
    if (reshaping := find_reshaping(program.graph, _REFUSED)) is not None:
        name, remedy, node = reshaping
        place = place_in(node.meta.get("stack_trace") or "", base)
        line = f"programs have no {name}, which changes the size of a tensor in place."
        raise export_failed(method, "NotImplementedError", line, str(place or ""), remedy=remedy)
    outputs = [spec for spec in program.graph_signature.output_specs if spec.kind.name == "USER_OUTPUT"]
    for index, spec in enumerate(outputs):
        value = getattr(spec.arg, "value", None)
        if value is not None and not isinstance(value, bool | int | float):
            raise unsupported_output(method, type(value).__name__, "", _output_name(program, index))


def _output_name(program: ExportedProgram, index: int) -> str:
    """Return the name of one of the outputs in flattened order: `kind`, `0`, `boxes[1]`."""
    from torch.utils import _pytree as pytree

    spec: Any = program.call_spec.out_spec
    outputs = to_plain(pytree.tree_unflatten(list(range(spec.num_leaves)), spec))
    path = next(path for path, leaf in pytree.tree_flatten_with_path(outputs)[0] if leaf == index)
    first = path[0] if path else None
    return f"{getattr(first, 'key', getattr(first, 'idx', 0))}{pytree.keystr(path[1:])}"
