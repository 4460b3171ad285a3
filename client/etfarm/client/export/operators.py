"""Operators and values of an exported program that torch.export lets through, and that no archive or server can have."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from etfarm.client.export.errors import ExportFailed, UnsupportedOutput
from etfarm.client.export.remedies import DATA, GRADIENTS
from etfarm.client.export.structures import to_plain
from etfarm.client.export.traces import place_in

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph, Node

_PREDISPATCH: Final = "torch._functorch.predispatch"
"""Functions that begin and end torch.vmap and torch.func.jvp, and torch's own loops such as associative_scan."""

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


def plain_operators(program: ExportedProgram) -> ExportedProgram:
    """Return a program without the functions of torch.vmap, which servers refuse: with the operators that it stands for."""
    from torch.fx import GraphModule

    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, GraphModule)]  # also of branches
    targets = {getattr(node.target, "__module__", "") for graph in graphs for node in graph.nodes}
    if _PREDISPATCH not in targets:
        return program
    plain = program.run_decompositions({})
    for node in plain.graph.nodes:
        _unlink_layer(node)
    return plain


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
        ExportFailed: it has a tensor of torch.func.grad, an assignment to `.data`, or changes the size of a tensor in place.
        UnsupportedOutput: it returns a string or another object that is neither a tensor nor a number.
    """
    import torch

    for value in program.constants.values():
        if isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
            line = "torch.func.grad, vjp and their like keep tensors of their own."
            raise ExportFailed(method, "NotImplementedError", line, "", remedy=GRADIENTS)
    for node in program.graph.nodes:
        if "_has_compatible_shallow_copy_type" in str(node.target):
            line = "an assignment to the .data of a tensor is not part of the program."
            raise ExportFailed(method, "NotImplementedError", line, "", remedy=DATA)
    if (reshaping := find_reshaping(program.graph, _REFUSED)) is not None:
        name, remedy, node = reshaping
        place = place_in(node.meta.get("stack_trace") or "", base)
        line = f"programs have no {name}, which changes the size of a tensor in place."
        raise ExportFailed(method, "NotImplementedError", line, str(place or ""), remedy=remedy)
    outputs = [spec for spec in program.graph_signature.output_specs if spec.kind.name == "USER_OUTPUT"]
    for index, spec in enumerate(outputs):
        value = getattr(spec.arg, "value", None)
        if value is not None and not isinstance(value, bool | int | float):
            raise UnsupportedOutput(method, type(value).__name__, "", _output_name(program, index))


def _output_name(program: ExportedProgram, index: int) -> str:
    """Return the name of one of the outputs in flattened order: `kind`, `0`, `boxes[1]`."""
    from torch.utils import _pytree as pytree

    spec: Any = program.call_spec.out_spec
    outputs = to_plain(pytree.tree_unflatten(list(range(spec.num_leaves)), spec))
    path = next(path for path, leaf in pytree.tree_flatten_with_path(outputs)[0] if leaf == index)
    first = path[0] if path else None
    return f"{getattr(first, 'key', getattr(first, 'idx', 0))}{pytree.keystr(path[1:])}"
