"""The description of a program in its flatbuffer: methods with their values, operators and delegates.

Loads neither torch nor ExecuTorch, whose reader takes ten seconds of CPU time to import.

Source: executorch/schema/program.fbs and scalar_type.fbs; a test compares the results with those of ExecuTorch's reader.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from etfarm.wire.flatbuffer import BadBuffer, Buffer, Table
from etfarm.wire.tensors import SCALAR_TYPES

_PLANS, _CONSTANTS, _DELEGATE_DATA, _SEGMENTS = 1, 2, 3, 4  # fields of Program
_NAME, _VALUES, _INPUTS, _OUTPUTS, _CHAINS, _OPERATORS, _DELEGATES, _BUFFER_SIZES = 0, 2, 3, 4, 5, 6, 7, 8  # of ExecutionPlan
_SCALAR_TYPE, _SIZES, _DIM_ORDER, _DYNAMISM = 0, 2, 3, 8  # of Tensor
_INSTRUCTIONS: Final = 2  # of Chain
_OTHER_KINDS: Final = (1, 7, 8, 9, 10, 11)  # of KernelTypes: Null and lists
_WITH_ARGUMENTS: Final = (1, 2)  # KernelCall and DelegateCall of InstructionArguments
_LAST_CALL: Final = 5
_INLINE, _SEGMENT = 0, 1  # of DataLocation
_STATIC: Final = 0  # of TensorShapeDynamism

DTYPES: Final = SCALAR_TYPES | {
    8: "complex32", 9: "complex64", 10: "complex128", 12: "qint8", 13: "quint8", 14: "qint32", 16: "quint4x2", 17: "quint2x4",
    22: "bits16", 25: "float8_e5m2fnuz", 26: "float8_e4m3fnuz",
}  # fmt: skip
"""Names of dtypes in torch by ScalarType."""


@dataclass(frozen=True)
class TensorValue:
    """A tensor of a method."""

    dtype: str
    """The dtype's name in torch, like `float32`."""
    sizes: tuple[int, ...]
    """The size of each dim; the maximum size of a dynamic dim."""
    dim_order: tuple[int, ...]
    is_static: bool
    """Whether all of its dims are static."""


ProgramValue = TensorValue | int | float | bool | str | None
"""A tensor or scalar of a method; None for null and for lists."""


@dataclass
class DataReference:
    """Where a delegate's data are: at `index` of the program's segments, or of the data in the flatbuffer."""

    in_segment: bool
    index: int


@dataclass(frozen=True)
class Delegate:
    """A delegated part of a method."""

    backend: str
    processed: DataReference


@dataclass(frozen=True)
class ExecutionPlan:
    """A method."""

    name: str
    values: list[ProgramValue]
    inputs: list[int]
    """Indices of `values`."""
    outputs: list[int]
    """Indices of `values`."""
    operators: list[str]
    """Names with the overload if there is one, such as `aten::add.out`."""
    delegates: list[Delegate]
    planned_bytes: list[int]
    """Sizes of the memory-planned buffers."""


@dataclass(frozen=True)
class Program:
    """A program without its instructions and data."""

    execution_plan: list[ExecutionPlan]
    constant_bytes: int
    """Size of the constants in the flatbuffer."""
    inline_data_bytes: list[int]
    """Sizes of the delegates' data in the flatbuffer."""
    segment_bytes: list[int]


def parse(flatbuffer: Buffer) -> Program:
    """Return a program's description. Reads the instructions as well, so that damaged ones are refused here.

    Raises:
        BadBuffer: the flatbuffer cannot be read.
    """
    program = Table.root(flatbuffer)
    return Program(
        [_plan(plan) for plan in program.tables(_PLANS)],
        sum(len(buffer.content(0)) for buffer in program.tables(_CONSTANTS)),
        [len(data.content(0)) for data in program.tables(_DELEGATE_DATA)],
        [segment.number(1, "<Q") for segment in program.tables(_SEGMENTS)],
    )


def _plan(plan: Table) -> ExecutionPlan:
    for chain in plan.tables(_CHAINS):
        _read_instructions(chain)
    operators = [(operator.text(0), operator.text(1)) for operator in plan.tables(_OPERATORS)]
    return ExecutionPlan(
        name=plan.text(_NAME),
        values=[read_value(value) for value in plan.tables(_VALUES)],
        inputs=list(plan.numbers(_INPUTS, "<i")),
        outputs=list(plan.numbers(_OUTPUTS, "<i")),
        operators=[f"{name}.{overload}" if overload else name for name, overload in operators],
        delegates=[_delegate(delegate) for delegate in plan.tables(_DELEGATES)],
        planned_bytes=list(plan.numbers(_BUFFER_SIZES, "<q")[1:]),  # buffer 0 stands for constants
    )


def read_value(union: Table) -> ProgramValue:
    kind, value = union.number(0, "<B"), union.table(1)
    if value is None:
        raise BadBuffer("a value is missing")
    match kind:  # members of KernelTypes
        case 2:
            return value.number(0, "<q")
        case 3:
            return bool(value.number(0, "<B"))
        case 4:
            return value.real(0)
        case 5:
            return _tensor(value)
        case 6:
            return value.text(0)
    if kind not in _OTHER_KINDS:
        raise BadBuffer(f"a value has the unknown kind {kind}")
    return None


def _tensor(tensor: Table) -> TensorValue:
    dtype = DTYPES.get(tensor.number(_SCALAR_TYPE, "<b"))
    if dtype is None:
        raise BadBuffer(f"a tensor has the unknown scalar type {tensor.number(_SCALAR_TYPE, '<b')}")
    is_static = tensor.number(_DYNAMISM, "<b") == _STATIC
    return TensorValue(dtype, tensor.numbers(_SIZES, "<i"), tensor.numbers(_DIM_ORDER, "<B"), is_static)


def _delegate(delegate: Table) -> Delegate:
    reference = delegate.table(1)
    if reference is None:
        raise BadBuffer("a delegate has no data")
    location = reference.number(0, "<b")
    if location not in (_INLINE, _SEGMENT):
        raise BadBuffer(f"a delegate's data have the unknown location {location}")
    return Delegate(delegate.text(0), DataReference(location == _SEGMENT, reference.number(1)))


def _read_instructions(chain: Table) -> None:
    for instruction in chain.tables(_INSTRUCTIONS):
        kind, call = instruction.number(0, "<B"), instruction.table(1)
        if call is None or not 1 <= kind <= _LAST_CALL:
            raise BadBuffer(f"an instruction has the unknown kind {kind}")
        call.number(0)
        if kind in _WITH_ARGUMENTS:
            call.numbers(1, "<i")
