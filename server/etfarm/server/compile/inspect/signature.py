"""The inputs and outputs of exported programs, whose names and dynamic ranges a .pte lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from etfarm.server.compile.program import loading
from etfarm.server.compile.program.descriptions import describe_control_flow, name_as_called
from etfarm.server.compile.program.places import all_nodes
from etfarm.server.compile.program.values import input_names, output_names
from etfarm.v1 import common_pb2
from etfarm.v1.compile_pb2 import DimRange, MethodFacts, ValueSpec
from etfarm.wire import size_relations
from etfarm.wire.messages import to_scalar


def add_exported(known: MethodFacts, exact: MethodFacts) -> list[str]:
    """Add information that only the exported program has to the facts of a .pte's method: names, and the range of each dim.

    Args:
        exact: facts of the exported program, from before it was lowered, which fixes dims in both.

    Returns:
        The dims of inputs that are smaller in the .pte, such as `dim 0 of 'x' (2..6, only 3 on the device)`.
    """
    lost = []
    known.relations[:] = exact.relations
    for is_input, known_values, exact_values in ((True, known.inputs, exact.inputs), (False, known.outputs, exact.outputs)):
        if len(known_values) == len(exact_values):
            for value, exact_value in zip(known_values, exact_values, strict=True):
                value.name = exact_value.name
                if value.kind == exact_value.kind == common_pb2.VALUE_KIND_TENSOR:
                    if is_input:
                        lost += _lost_dims(value, exact_value)
                    value.ClearField("dims")
                    value.dims.extend(exact_value.dims)
    return lost


def describe_lost(method: str, program: Any, dims: Sequence[str]) -> str:
    """Return a sentence about dims of `add_exported`, with the loops of the exported program that are the reason."""
    loops = describe_control_flow([node for node in all_nodes(program) if name_as_called(node) == "map"])
    why = (
        f"ExecuTorch fixes the number of steps of map at that of the example inputs: {loops}"
        if loops
        else "A pass of ExecuTorch computed with the sizes of the example inputs"
    )
    other = ", or write the loop as a scan, whose number of steps stays dynamic" if loops else ""
    return (
        f"Lowering fixed sizes of {method} that are dynamic in the exported program: {', '.join(dims)}. {why}. Export with "
        f"example inputs of the largest sizes{other}."
    )


def _lost_dims(value: ValueSpec, exact: ValueSpec) -> list[str]:
    lost = []
    for place, (dim, wanted) in enumerate(zip(value.dims, exact.dims, strict=True)):
        if wanted.min != wanted.max and dim.max < wanted.max:
            what = f"{'at most' if dim.min != dim.max else 'only'} {dim.max}"
            lost.append(f"dim {place} of {exact.name!r} ({wanted.min}..{wanted.max}, {what} on the device)")
    return lost


def of_exported(program: Any) -> MethodFacts:
    """Return the inputs and outputs of an exported program with names and ranges, without operators, backends and memory."""
    by_name = {node.name: node for node in program.graph.nodes}
    specs = program.graph_signature.input_specs
    inputs = [
        _exported_value(program, s.arg.name, by_name[s.arg.name].meta.get("val") if s.arg.name in by_name else None, s.arg)
        for s in specs
        if s.kind.name == "USER_INPUT"
    ]
    returned = [spec for spec in program.graph_signature.output_specs if spec.kind.name == "USER_OUTPUT"]
    outputs = []
    for name, spec in zip(output_names(program), returned, strict=True):
        node = by_name.get(getattr(spec.arg, "name", "") or "")
        outputs.append(_exported_value(program, name, None if node is None else node.meta.get("val"), spec.arg))
    assert len(inputs) == len(input_names(program))
    return MethodFacts(inputs=inputs, outputs=outputs, relations=_relations(program))


def _relations(program: Any) -> list[str]:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    dims: dict[str, list[int | str | None]] = {
        name: [
            str(size.node.expr) if isinstance(size, torch.SymInt) else int(size)
            for size in getattr(values.get(name), "shape", ())
        ]
        for name in input_names(program)
    }
    return size_relations.relations_of(dims, getattr(program, "_guards_code", None) or ())


def _exported_value(program: Any, name: str, value: Any, argument: Any) -> ValueSpec:
    if isinstance(value, torch.Tensor):
        dims = [_dim(program, size) for size in value.shape]
        dtype = str(value.dtype).removeprefix("torch.")
        return ValueSpec(name=name, kind=common_pb2.VALUE_KIND_TENSOR, dtype=dtype, dims=dims, dim_order=_dim_order(value))
    for symbol, kind in _SYMBOLS:
        if isinstance(value, symbol):
            return ValueSpec(name=name, kind=kind)
    constant = getattr(argument, "value", None)
    return ValueSpec(name=name, kind=_kind_of(constant), value=to_scalar(constant))


_SYMBOLS: Final = (
    (torch.SymInt, common_pb2.VALUE_KIND_INT),
    (torch.SymFloat, common_pb2.VALUE_KIND_DOUBLE),
    (torch.SymBool, common_pb2.VALUE_KIND_BOOL),
)
"""The kinds of numbers that an exported program takes as inputs or computes."""


def _dim(program: Any, size: int | torch.SymInt) -> DimRange:
    if not isinstance(size, torch.SymInt):
        return DimRange(min=int(size), max=int(size))
    low, high = loading.bounds(program, size)
    return DimRange(min=low, max=high if high is not None else 2**62)


def _dim_order(value: torch.Tensor) -> list[int]:
    try:
        return list(value.dim_order())
    except (RuntimeError, NotImplementedError):  # strides of symbols that cannot be compared
        return list(range(value.dim()))


def _kind_of(value: object) -> common_pb2.ValueKind.ValueType:
    if isinstance(value, bool):
        return common_pb2.VALUE_KIND_BOOL
    if isinstance(value, int):
        return common_pb2.VALUE_KIND_INT
    if isinstance(value, float):
        return common_pb2.VALUE_KIND_DOUBLE
    return common_pb2.VALUE_KIND_NONE if value is None else common_pb2.VALUE_KIND_STRING
