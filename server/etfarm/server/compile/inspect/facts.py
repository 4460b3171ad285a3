"""The facts of a program: inputs, outputs and requirements from the .pte; names and dynamic ranges from the .pt2."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from executorch.exir.schema import Bool, Double, Int, Null, Program, String, TensorShapeDynamism
from executorch.exir.schema import Tensor as PteTensor

from etfarm.server.compile.errors import UnsupportedProgram
from etfarm.server.compile.inspect import sizes
from etfarm.server.compile.program import loading
from etfarm.server.compile.program.toolchain import toolchain
from etfarm.server.compile.program.values import input_names, output_names
from etfarm.server.compile.request import InspectRequest
from etfarm.server.compile.result import DimRange, LowerResult, MethodFacts, ProgramFacts, ProgramSizes, ValueFacts, encode
from etfarm.server.compile.screening import screen

_DTYPES = {
    "BYTE": "uint8", "CHAR": "int8", "SHORT": "int16", "INT": "int32", "LONG": "int64", "HALF": "float16",
    "FLOAT": "float32", "DOUBLE": "float64", "BOOL": "bool", "BFLOAT16": "bfloat16", "UINT16": "uint16",
    "UINT32": "uint32", "UINT64": "uint64", "FLOAT8E5M2": "float8_e5m2", "FLOAT8E4M3FN": "float8_e4m3fn",
    "COMPLEX64": "complex64", "COMPLEX128": "complex128",
}  # fmt: skip

_SCALARS: dict[type[Any], tuple[Literal["int", "double", "bool", "none", "str"], str]] = {
    Int: ("int", "int_val"), Bool: ("bool", "bool_val"), Double: ("double", "double_val"), String: ("str", "string_val"),
}  # fmt: skip


def inspect_pte(request: InspectRequest, folder: Path, emit: Callable[[bytes], None]) -> bytes:
    """Task: describe an uploaded .pte. Return a CompileResult with facts and sizes.

    Raises:
        NotAPte, TruncatedProgram: as `screen_pte`.
        UnsupportedProgram: its flatbuffer cannot be read.
    """
    screen.screen_pte(request.pte)
    facts, program_sizes = describe(sizes.read(request.pte))
    result: LowerResult = {
        "stages": [], "program": None, "etrecord": None, "stage_files": {}, "inputs": {}, "delegation": {},
        "toolchain": toolchain(), "warnings": [], "facts": facts, "sizes": program_sizes, "modules": [], "checks": [],
        "stayed_fp32": {},
    }  # fmt: skip
    return encode(result)


def describe(described: sizes.Described) -> tuple[ProgramFacts, ProgramSizes]:
    """Return the facts and sizes of an uploaded program.

    Raises:
        UnsupportedProgram: the program refers to values or segments that it does not have.
    """
    try:
        return of_program(described.program), sizes.of_program(described)
    except (IndexError, AttributeError, TypeError) as error:
        raise UnsupportedProgram(
            f"The program's description contradicts itself: {error}.", "Export it again with ExecuTorch 1.x."
        ) from error


def of_program(program: Program) -> ProgramFacts:
    """Return the facts of a deserialized program, as `sizes.read` returns it."""
    return {"methods": {plan.name: _method(plan) for plan in program.execution_plan}}


def add_exported(facts: ProgramFacts, method: str, program: Any) -> None:
    """Add information that only the exported program has to a method's facts: names, and the range of each dim."""
    known, exact = facts["methods"][method], of_exported(program)
    for known_values, exact_values in ((known["inputs"], exact["inputs"]), (known["outputs"], exact["outputs"])):
        if len(known_values) == len(exact_values):
            for value, exact_value in zip(known_values, exact_values, strict=True):
                value["name"] = exact_value["name"]
                if value["kind"] == exact_value["kind"] == "tensor":
                    value["dims"] = exact_value["dims"]


def of_exported(program: Any) -> MethodFacts:
    """Return the inputs and outputs of an exported program with names and ranges, without operators, backends and memory."""
    by_name = {node.name: node for node in program.graph.nodes}
    specs = program.graph_signature.input_specs
    inputs = [
        _exported_value(program, s.arg.name, by_name[s.arg.name].meta.get("val") if s.arg.name in by_name else None, s.arg)
        for s in specs
        if s.kind.name == "USER_INPUT"
    ]
    outputs = []
    for spec in program.graph_signature.output_specs:
        if spec.kind.name == "USER_OUTPUT":
            name = getattr(spec.arg, "name", "") or ""
            value = by_name[name].meta.get("val") if name in by_name else None
            outputs.append(_exported_value(program, name, value, spec.arg))
    assert len(inputs) == len(input_names(program))
    assert len(outputs) == len(output_names(program))
    return {"inputs": inputs, "outputs": outputs, "operators": [], "backends": [], "planned_bytes": []}


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


def _method(plan: Any) -> MethodFacts:
    operators = {f"{op.name}.{op.overload}" if op.overload else op.name for op in plan.operators}
    return {
        "inputs": _values(plan, plan.inputs),
        "outputs": _values(plan, plan.outputs),
        "operators": sorted(operators),
        "backends": sorted({delegate.id for delegate in plan.delegates}),
        "planned_bytes": sizes.planned_bytes(plan),
    }


def _values(plan: Any, indices: Iterable[int]) -> list[ValueFacts]:
    rows: list[ValueFacts] = []
    for index in indices:
        value = plan.values[index].val
        if isinstance(value, PteTensor):
            is_static = value.shape_dynamism == TensorShapeDynamism.STATIC
            dims: list[int | DimRange] = [int(n) if is_static else {"min": 0, "max": int(n)} for n in value.sizes]
            name = value.scalar_type.name
            rows.append(
                {"name": None, "kind": "tensor", "dtype": _DTYPES.get(name, name.lower()), "dims": dims,
                 "dim_order": [int(d) for d in value.dim_order]}
            )  # fmt: skip
        elif isinstance(value, Null) or type(value) not in _SCALARS:
            rows.append({"name": None, "kind": "none", "dtype": None, "dims": None, "dim_order": None, "value": None})
        else:
            kind, field = _SCALARS[type(value)]
            rows.append(
                {"name": None, "kind": kind, "dtype": None, "dims": None, "dim_order": None, "value": getattr(value, field)}
            )
    return rows
