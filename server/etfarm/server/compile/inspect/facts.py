"""The facts of a program: inputs, outputs and requirements from the .pte. Loads neither torch nor ExecuTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from etfarm.server.compile.inspect import silent_delegates, sizes
from etfarm.server.compile.inspect.program import ExecutionPlan, Program, TensorValue
from etfarm.server.compile.program.toolchain import toolchain
from etfarm.server.compile.request import InspectRequest
from etfarm.server.compile.screening import screen
from etfarm.v1 import child_pb2, common_pb2
from etfarm.v1.compile_pb2 import Compilation, DimRange, MethodFacts, ProgramFacts, ProgramSizes, ValueSpec
from etfarm.wire.errors import error_for
from etfarm.wire.messages import to_scalar
from etfarm.wire.tensors import ITEM_BYTES

_KINDS: Final[dict[type, common_pb2.ValueKind.ValueType]] = {
    int: common_pb2.VALUE_KIND_INT,
    bool: common_pb2.VALUE_KIND_BOOL,
    float: common_pb2.VALUE_KIND_DOUBLE,
    str: common_pb2.VALUE_KIND_STRING,
    type(None): common_pb2.VALUE_KIND_NONE,
}


def inspect_pte(request: InspectRequest, folder: Path, emit: Callable[[bytes], None]) -> bytes:
    """Task: describe an uploaded .pte. Return a CompileResult with facts and sizes.

    Raises:
        NOT_A_PTE, TruncatedProgram: as `screen_pte`.
        UNSUPPORTED_PROGRAM: its flatbuffer cannot be read.
    """
    screen.screen_pte(request.pte)
    facts, program_sizes = describe(sizes.read(request.pte))
    compilation = Compilation(toolchain=toolchain(), facts=facts, sizes=program_sizes)
    if silent := silent_delegates.describe(request.pte):
        compilation.warnings.add(code=silent_delegates.DELEGATE_WITHOUT_OUTPUTS, message=silent)
    return child_pb2.CompileResult(compilation=compilation).SerializeToString()


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
    return ProgramFacts(methods={plan.name: _method(plan) for plan in program.execution_plan})


def _method(plan: ExecutionPlan) -> MethodFacts:
    return MethodFacts(
        inputs=_values(plan, plan.inputs),
        outputs=_values(plan, plan.outputs),
        operators=sorted(set(plan.operators)),
        backends=sorted({delegate.backend for delegate in plan.delegates}),
        planned_bytes=plan.planned_bytes,
        state_bytes=_state_bytes(plan),
    )


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


def _values(plan: ExecutionPlan, indices: Iterable[int]) -> list[ValueSpec]:
    rows = []
    for index in indices:
        value = plan.values[index]
        if isinstance(value, TensorValue):
            kind = common_pb2.VALUE_KIND_TENSOR
            # A .pte has only the maximum size of a dynamic dim.
            dims = [DimRange(min=size if value.is_static else 0, max=size) for size in value.sizes]
            rows.append(ValueSpec(kind=kind, dtype=value.dtype, dims=dims, dim_order=value.dim_order))
        else:
            rows.append(ValueSpec(kind=_KINDS[type(value)], value=to_scalar(value)))
    return rows
