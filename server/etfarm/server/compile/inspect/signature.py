"""The inputs and outputs of exported programs, whose names and dynamic ranges a .pte lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from etfarm.server.compile.program import loading
from etfarm.server.compile.program.descriptions import describe_control_flow, name_as_called
from etfarm.server.compile.program.places import all_nodes
from etfarm.server.compile.program.values import input_names, output_names
from etfarm.server.compile.result import DimRange, MethodFacts, ValueFacts
from etfarm.wire import size_relations


def add_exported(known: MethodFacts, exact: MethodFacts) -> list[str]:
    """Add information that only the exported program has to the facts of a .pte's method: names, and the range of each dim.

    Args:
        exact: facts of the exported program, from before it was lowered, which fixes dims in both.

    Returns:
        The dims of inputs that are smaller in the .pte, such as `dim 0 of 'x' (2..6, only 3 on the device)`.
    """
    lost = []
    known["relations"] = exact["relations"]
    for known_values, exact_values in ((known["inputs"], exact["inputs"]), (known["outputs"], exact["outputs"])):
        if len(known_values) == len(exact_values):
            for value, exact_value in zip(known_values, exact_values, strict=True):
                value["name"] = exact_value["name"]
                if value["kind"] == exact_value["kind"] == "tensor":
                    if known_values is known["inputs"]:
                        lost += _lost_dims(value, exact_value)
                    value["dims"] = exact_value["dims"]
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


def _lost_dims(value: ValueFacts, exact: ValueFacts) -> list[str]:
    lost = []
    for place, (dim, wanted) in enumerate(zip(value["dims"] or (), exact["dims"] or (), strict=True)):
        largest = dim["max"] if isinstance(dim, dict) else dim
        if isinstance(wanted, dict) and largest < wanted["max"]:
            what = f"at most {largest}" if isinstance(dim, dict) else f"only {largest}"
            lost.append(f"dim {place} of {exact['name']!r} ({wanted['min']}..{wanted['max']}, {what} on the device)")
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
    return {
        "inputs": inputs, "outputs": outputs, "operators": [], "backends": [], "planned_bytes": [],
        "relations": _relations(program),
    }  # fmt: skip


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


def _exported_value(program: Any, name: str, value: Any, argument: Any) -> ValueFacts:
    if isinstance(value, torch.Tensor):
        dims: list[int | DimRange] = []
        for size in value.shape:
            if isinstance(size, torch.SymInt):
                low, high = loading.bounds(program, size)
                dims.append({"min": low, "max": high if high is not None else 2**62})
            else:
                dims.append(int(size))
        return {
            "name": name or None, "kind": "tensor", "dtype": str(value.dtype).removeprefix("torch."), "dims": dims,
            "dim_order": _dim_order(value),
        }  # fmt: skip
    constant = getattr(argument, "value", None)
    kind: Literal["int", "double", "bool", "none", "str"]
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        kind = "int" if isinstance(value, torch.SymInt) else "double" if isinstance(value, torch.SymFloat) else "bool"
        return {"name": name or None, "kind": kind, "dtype": None, "dims": None, "dim_order": None}
    kind = _kind_of(constant)
    return {"name": name or None, "kind": kind, "dtype": None, "dims": None, "dim_order": None, "value": constant}


def _dim_order(value: torch.Tensor) -> list[int]:
    try:
        return list(value.dim_order())
    except (RuntimeError, NotImplementedError):  # strides of symbols that cannot be compared
        return list(range(value.dim()))


def _kind_of(value: object) -> Literal["int", "double", "bool", "none", "str"]:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int"
    if isinstance(value, float):
        return "double"
    return "none" if value is None else "str"
