"""What in an exported program is the likely cause of a wrong output, a crash or a refusal, with what works instead."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

from etfarm.server.compile.errors import FORMATS
from etfarm.server.compile.program.descriptions import (
    CONTROL_FLOW,
    NAMED,
    describe,
    describe_node,
    describe_operators,
    list_first,
    schema_name,
)
from etfarm.server.compile.program.integer_ranges import IntegerRanges
from etfarm.server.compile.program.places import all_nodes, places
from etfarm.v1.compile_pb2 import OperatorDelegation

_KERNEL = re.compile(r"'(\w+)::(\w+)(?:\.\w+)?'")
_SUSPECTS: Final = {
    "control": "Compute both branches and choose with torch.where, and unroll loops of a fixed length.",
    "remainder": (
        "The runtime's remainder of integers has the sign of the dividend, as in C. "
        "Write x - torch.div(x, n, rounding_mode='floor') * n."
    ),
    "sizes": "Use operators whose output sizes follow from input sizes, such as torch.where with a mask.",
}
"""What works instead of operators that ExecuTorch often computes wrongly."""
_XNNPACK_DIMS: Final = 6
"""Source: XNN_MAX_TENSOR_DIMS of xnnpack.h."""
SYMBOL = re.compile(r"\bu\d+\b")
"""Names of sizes that depend on values."""


def missing_kernels(why: str, program: Any, operators: Iterable[OperatorDelegation]) -> str:
    """Return the operators whose kernels the runtime lacks, with their source lines; empty if `why` names no kernel.

    Args:
        why: the runtime's reason, like "... kernels 'aten::histc.out', 'aten::polygamma.out' not found".
        program: the exported method, for operators that keep their names.
        operators: the method's delegation table, which has the operators after decomposition.
    """
    if not why.endswith("not found"):
        return ""
    rows = [row for row in operators if row.places]
    return list_first(_describe_missing(match[1], match[2], program, rows) for match in _KERNEL.finditer(why))


def _describe_missing(namespace: str, operator: str, program: Any, rows: Sequence[OperatorDelegation]) -> str:
    name, start = f"{namespace}::{operator}", f"{namespace}_{operator}_"
    # Names in the table end in the overload. The shortest match is the operator: aten_max_default, not aten_max_pool2d_default.
    row = min((row for row in rows if row.op.startswith(start)), key=lambda row: len(row.op), default=None)
    shown = describe(name, row.places) if row is not None else name
    return describe_operators([name], {"": program}) if shown == name else shown


def find_suspects(program: Any) -> str:
    """Return the operators of an exported program that ExecuTorch often computes wrongly, with what works; empty without any."""
    suspects: dict[str, list[Any]] = defaultdict(list)
    for node in all_nodes(program):
        if node.op != "call_function":
            continue
        name = str(getattr(node.target, "__name__", node.target))
        if name in CONTROL_FLOW and not hasattr(node.target, "_schema"):
            suspects["control"].append((CONTROL_FLOW[name], node))
        elif _is_remainder(node):
            suspects["remainder"].append((schema_name(node), node))
        elif schema_name(node) and _has_own_size(node):
            suspects["sizes"].append((schema_name(node), node))
    sentences = []
    for kind, rows in suspects.items():
        shown = "; ".join(dict.fromkeys(describe(name, places([node])) for name, node in rows[:NAMED]))
        sentences.append(f"{shown}. {_SUSPECTS[kind]}")
    return " ".join(sentences)


def find_remainders(program: Any) -> str:
    """Return the remainders of integers that may be negative in an exported program, with what works; empty without any."""
    nodes = [node for node in all_nodes(program) if _is_remainder(node)]
    if nodes:
        ranges = IntegerRanges(program)
        nodes = [node for node in nodes if not (ranges.of(node.args[0])[0] >= 0 and ranges.of(node.args[1])[0] >= 1)]
    shown = "; ".join(dict.fromkeys(map(describe_node, nodes[:NAMED])))
    return f"{shown}. {_SUSPECTS['remainder']}" if nodes else ""


def _is_remainder(node: Any) -> bool:
    dtype = getattr(node.meta.get("val"), "dtype", None)
    signed = dtype is not None and dtype.is_signed and not dtype.is_floating_point
    return signed and str(schema_name(node)).startswith("aten::remainder")


def _has_own_size(node: Any) -> bool:
    """Return whether an operator's output has a size that its inputs do not have, which depends on values."""
    sizes = {symbol for size in getattr(node.meta.get("val"), "shape", ()) for symbol in SYMBOL.findall(str(size))}
    known = {
        symbol
        for each in node.all_input_nodes
        for size in getattr(each.meta.get("val"), "shape", ())
        for symbol in SYMBOL.findall(str(size))
    }
    return bool(sizes - known)


def find_many_dims(program: Any) -> str:
    """Return the first operator of a program whose output has more dims than XNNPACK takes, with its source line; else empty."""
    for node in all_nodes(program):
        name = schema_name(node)
        if name is not None and len(getattr(node.meta.get("val"), "shape", ())) > _XNNPACK_DIMS:
            return describe(name, places([node]))
    return ""


def find_only_kernel(program: Any) -> str:
    """Return the operator of a program that has no other, with its source line; else empty."""
    nodes = [node for node in all_nodes(program) if schema_name(node) is not None]
    names = {str(schema_name(node)) for node in nodes}
    return describe(names.pop(), places(nodes)) if len(names) == 1 else ""


def _has_other_strides(shape: Sequence[Any], strides: Sequence[Any]) -> bool:
    expected = 1
    for size, stride in zip(map(_in_example, reversed(shape)), map(_in_example, reversed(strides)), strict=True):
        if not isinstance(size, int) or not isinstance(stride, int):
            return False
        if stride != expected:
            return True
        expected *= max(size, 1)
    return False


def _in_example(size: Any) -> Any:
    """Return a size as it is in the example inputs: a dynamic one is not an int, but may know its value there."""
    return size if isinstance(size, int) else getattr(getattr(size, "node", None), "hint", None)


def owned_names(program: Any) -> dict[str, str]:
    """Return the names of parameters, buffers and constants by their placeholders."""
    signature = program.graph_signature
    return {**signature.inputs_to_parameters, **signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}


def advise_of_columns(program: Any, why: str) -> str:
    """Return what to do about indices that an operator refuses for their memory format; empty if that is not the reason."""
    if "different dim orders" not in why or not any(_gives_indices(node) for node in all_nodes(program)):
        return ""
    return (
        "torch.nonzero returns indices in column-major order, which other kernels do not accept. Copy them first: "
        "torch.nonzero(c).clone(memory_format=torch.contiguous_format), and take [:, 0] of that copy for torch.where(c)[0]."
    )


def advise_of_bounds(program: Any, why: str) -> str:
    """Return which bounds of a clamp are none of its dtype's values; empty if that is not the reason `why`."""
    import torch

    rows = []
    for node in all_nodes(program) if "value out of bounds" in why else ():
        dtype = getattr(node.meta.get("val"), "dtype", None)
        if schema_name(node) != "aten::clamp" or dtype is None or dtype.is_floating_point or dtype is torch.bool:
            continue
        limits = torch.iinfo(dtype)
        bounds = dict(zip(("min", "max"), node.args[1:3], strict=False)) | dict(node.kwargs)
        outside = [
            f"{name}={bound}" for name, bound in bounds.items() if bound is not None and not limits.min <= bound <= limits.max
        ]
        if outside:
            range_of_dtype = f"{str(dtype).removeprefix('torch.')} has {limits.min} to {limits.max}"
            rows.append(f"{' and '.join(outside)} ({range_of_dtype}) of {describe_node(node)}")
    if not rows:
        return ""
    return (
        f"The kernel takes bounds of the dtype only, and not {'; '.join(dict.fromkeys(rows[:NAMED]))}. Give a bound within that "
        "range, or clamp in a larger dtype: torch.clamp(x.to(torch.int32), a, b).to(x.dtype)."
    )


def find_inner_size(program: Any) -> str:
    """Return the first operator whose output has a size that depends on values in a later dim, with its line; else empty."""
    for node in all_nodes(program):
        shape = getattr(node.meta.get("val"), "shape", ())
        if schema_name(node) and any(SYMBOL.search(str(size)) for size in shape[1:]):
            return describe_node(node)
    return ""


def advise_of_formats(program: Any, why: str) -> str:
    """Return where a model itself changes the memory format that an operator refuses; empty if that is not the reason `why`."""
    if not FORMATS.search(why):
        return ""
    for node in all_nodes(program):
        if node.op == "call_function" and str(node.kwargs.get("memory_format")).startswith("torch.channels_last"):
            return (
                f"The model changes the memory format itself: {describe_node(node)}. Leave that out: XNNPACK chooses its own "
                "formats, and the portable kernels take the usual one."
            )
    return ""


def find_channels_last(program: Any) -> str:
    """Return the inputs and weights of a program with other strides than new tensors have, such as `x, weight`; at most three.

    torch calls channels-last tensors with one channel contiguous, too.
    """
    owned, names = owned_names(program), []
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and hasattr(value, "stride") and _has_other_strides(value.shape, value.stride()):
            names.append(owned.get(node.name, node.name))
    return ", ".join(names[:NAMED])


def _gives_indices(node: Any) -> bool:
    name = schema_name(node)
    return name in ("aten::nonzero", "aten::nonzero_numpy") or (name == "aten::where" and len(node.args) == 1)
