"""The facts of a program: inputs, outputs and requirements from the .pte. Loads neither torch nor ExecuTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Literal

from etfarm.server.compile.inspect import sizes
from etfarm.server.compile.inspect.program import ExecutionPlan, Program, TensorValue
from etfarm.server.compile.program.toolchain import toolchain
from etfarm.server.compile.request import InspectRequest
from etfarm.server.compile.result import DimRange, LowerResult, MethodFacts, ProgramFacts, ProgramSizes, ValueFacts, encode
from etfarm.server.compile.screening import screen
from etfarm.wire.errors import error_for
from etfarm.wire.tensors import ITEM_BYTES

_KINDS: Final[dict[type, Literal["int", "double", "bool", "str", "none"]]] = {
    int: "int", bool: "bool", float: "double", str: "str", type(None): "none",
}  # fmt: skip


def inspect_pte(request: InspectRequest, folder: Path, emit: Callable[[bytes], None]) -> bytes:
    """Task: describe an uploaded .pte. Return a CompileResult with facts and sizes.

    Raises:
        NOT_A_PTE, TruncatedProgram: as `screen_pte`.
        UNSUPPORTED_PROGRAM: its flatbuffer cannot be read.
    """
    screen.screen_pte(request.pte)
    facts, program_sizes = describe(sizes.read(request.pte))
    result: LowerResult = {
        "stages": [], "program": None, "etrecord": None, "stage_files": {}, "inputs": {}, "delegation": {},
        "toolchain": toolchain(), "warnings": [], "facts": facts, "sizes": program_sizes, "modules": [], "checks": [],
        "stayed_fp32": {}, "located": {}, "shared_buffers": [], "stateful_methods": [],
    }  # fmt: skip
    return encode(result)


def describe(described: sizes.Described) -> tuple[ProgramFacts, ProgramSizes]:
    """Return the facts and sizes of an uploaded program.

    Raises:
        UNSUPPORTED_PROGRAM: the program refers to values or segments that it does not have.
    """
    try:
        return of_program(described.program), sizes.of_program(described)
    except IndexError as error:
        raise error_for(
            "UNSUPPORTED_PROGRAM",
            f"The program's description contradicts itself: {error}.",
            "Export it again with ExecuTorch 1.x.",
        ) from error


_MOST_BYTES: Final = (1 << 63) - 1


def of_program(program: Program) -> ProgramFacts:
    """Return the facts of a deserialized program, as `sizes.read` returns it."""
    return {"methods": {plan.name: _method(plan) for plan in program.execution_plan}}


def _method(plan: ExecutionPlan) -> MethodFacts:
    return {
        "inputs": _values(plan, plan.inputs),
        "outputs": _values(plan, plan.outputs),
        "operators": sorted(set(plan.operators)),
        "backends": sorted({delegate.backend for delegate in plan.delegates}),
        "planned_bytes": plan.planned_bytes,
        "state_bytes": _state_bytes(plan),
    }


def _state_bytes(plan: ExecutionPlan) -> int | None:
    """Return the size of the planned tensors that keep state; None if one has a dtype of unknown size or impossible dims."""
    sizes_by_place: dict[tuple[int, int] | None, int] = {}
    for index in plan.state:
        value = plan.values[index]
        if isinstance(value, TensorValue):
            width = ITEM_BYTES.get(value.dtype)
            if width is None or min(value.sizes, default=0) < 0:
                return None
            # Two values may stand for one tensor before and after it is changed in place.
            size = width * math.prod(value.sizes)
            sizes_by_place[value.place] = max(size, sizes_by_place.get(value.place, 0))
    total = sum(sizes_by_place.values())
    return total if total <= _MOST_BYTES else None


def _values(plan: ExecutionPlan, indices: Iterable[int]) -> list[ValueFacts]:
    rows: list[ValueFacts] = []
    for index in indices:
        value = plan.values[index]
        if isinstance(value, TensorValue):
            dims: list[int | DimRange] = [size if value.is_static else {"min": 0, "max": size} for size in value.sizes]
            rows.append({"name": None, "kind": "tensor", "dtype": value.dtype, "dims": dims, "dim_order": list(value.dim_order)})
        else:
            rows.append(
                {"name": None, "kind": _KINDS[type(value)], "dtype": None, "dims": None, "dim_order": None, "value": value}
            )
    return rows
