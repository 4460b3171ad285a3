"""The description of a program in its flatbuffer: methods with their values, operators and delegates.

Loads neither torch nor ExecuTorch, whose reader takes ten seconds of CPU time to import.

Source: executorch/schema/program.fbs and scalar_type.fbs; a test compares the results with those of ExecuTorch's reader.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from etfarm.wire.flatbuffer import BadBuffer, Buffer, Table
from etfarm.wire.tensors import SCALAR_TYPES

_PLANS, _CONSTANTS, _DELEGATE_DATA, _SEGMENTS = 1, 2, 3, 4  # fields of Program
_NAME, _VALUES, _INPUTS, _OUTPUTS, _CHAINS, _OPERATORS, _DELEGATES, _BUFFER_SIZES = 0, 2, 3, 4, 5, 6, 7, 8  # of ExecutionPlan
_SCALAR_TYPE, _SIZES, _DIM_ORDER, _ALLOCATION, _DYNAMISM = 0, 2, 3, 6, 8  # of Tensor
_MEMORY, _OFFSET_LOW, _OFFSET_HIGH = 0, 1, 2  # of AllocationDetails
_INSTRUCTIONS: Final = 2  # of Chain
_TENSOR_LISTS: Final = (10, 11)  # of KernelTypes: TensorList and OptionalTensorList
_OTHER_KINDS: Final = (1, 7, 8, 9, 10, 11)  # of KernelTypes: Null and lists
_KERNEL_CALL, _DELEGATE_CALL, _MOVE_CALL, _LAST_CALL = 1, 2, 3, 5  # of InstructionArguments
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
    place: tuple[int, int] | None = None
    """Its buffer of the memory plan and the offset there; None for constants, and for inputs that are not planned."""


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
    state: list[int]
    """Indices of `values`: planned tensors that an instruction reads before any writes them, thus keep what an earlier execution
    wrote."""


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
    values, inputs = [read_value(value) for value in plan.tables(_VALUES)], list(plan.numbers(_INPUTS, "<i"))
    flow = _Flow(values, _tensor_lists(plan), inputs)
    for chain in plan.tables(_CHAINS):
        _read_instructions(chain, flow)
    operators = [(operator.text(0), operator.text(1)) for operator in plan.tables(_OPERATORS)]
    return ExecutionPlan(
        name=plan.text(_NAME),
        values=values,
        inputs=inputs,
        outputs=list(plan.numbers(_OUTPUTS, "<i")),
        operators=[f"{name}.{overload}" if overload else name for name, overload in operators],
        delegates=[_delegate(delegate) for delegate in plan.tables(_DELEGATES)],
        planned_bytes=list(plan.numbers(_BUFFER_SIZES, "<q")[1:]),  # buffer 0 stands for constants
        state=list(flow.state),
    )


def _tensor_lists(plan: Table) -> dict[int, tuple[int, ...]]:
    """Return the indices of the tensors in each value that is a list of tensors."""
    lists: dict[int, tuple[int, ...]] = {}
    for index, union in enumerate(plan.tables(_VALUES)):
        value = union.table(1)
        if union.number(0, "<B") in _TENSOR_LISTS and value is not None:
            lists[index] = value.numbers(0, "<i")
    return lists


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
    allocation, place = tensor.table(_ALLOCATION), None
    if allocation is not None:
        place = allocation.number(_MEMORY), allocation.number(_OFFSET_HIGH) << 32 | allocation.number(_OFFSET_LOW)
    return TensorValue(dtype, tensor.numbers(_SIZES, "<i"), tensor.numbers(_DIM_ORDER, "<B"), is_static, place)


def _delegate(delegate: Table) -> Delegate:
    reference = delegate.table(1)
    if reference is None:
        raise BadBuffer("a delegate has no data")
    location = reference.number(0, "<b")
    if location not in (_INLINE, _SEGMENT):
        raise BadBuffer(f"a delegate's data have the unknown location {location}")
    return Delegate(delegate.text(0), DataReference(location == _SEGMENT, reference.number(1)))


class _Flow:
    """The values of a method that its instructions have written so far, and those that they read before: its state."""

    def __init__(self, values: list[ProgramValue], lists: dict[int, tuple[int, ...]], inputs: list[int]) -> None:
        self._values = values
        self._lists = lists
        self._known = set(inputs)
        self._places: set[tuple[int, int]] = set()
        self._read_lists: set[int] = set()
        self._written_lists: set[int] = set()
        self.state: dict[int, None] = {}

    def call(self, arguments: tuple[int, ...]) -> None:
        """Follow the call of a kernel, whose last argument is what it returns: a value, or a list of several."""
        written = set(self._members(arguments[-1:], self._written_lists))
        for index in self._members(arguments, self._read_lists):
            if index not in written and index not in self._known and self._is_new(index):
                self.state[index] = None
        self.write((*arguments, *written))

    def write(self, indices: Iterable[int]) -> None:
        """Note that values have been written, or read."""
        for index in indices:
            self._known.add(index)
            place = self._place(index)
            if place is not None:
                self._places.add(place)

    def _members(self, indices: Iterable[int], expanded: set[int]) -> list[int]:
        """Return values with the tensors of each list, once only: a file may name a long list any number of times."""
        members: list[int] = []
        for index in indices:
            members.append(index)
            if index in self._lists and index not in expanded:
                expanded.add(index)
                members += self._lists[index]
        return members

    def _is_new(self, index: int) -> bool:
        """Return whether a value is planned where no other was before: a view of another value is at its place."""
        place = self._place(index)
        return place is not None and place not in self._places

    def _place(self, index: int) -> tuple[int, int] | None:
        value = self._values[index] if 0 <= index < len(self._values) else None
        return value.place if isinstance(value, TensorValue) else None


def _read_instructions(chain: Table, flow: _Flow) -> None:
    for instruction in chain.tables(_INSTRUCTIONS):
        kind, call = instruction.number(0, "<B"), instruction.table(1)
        if call is None or not 1 <= kind <= _LAST_CALL:
            raise BadBuffer(f"an instruction has the unknown kind {kind}")
        call.number(0)
        if kind == _KERNEL_CALL:
            flow.call(call.numbers(1, "<i"))
        elif kind == _DELEGATE_CALL:
            # A delegate's inputs and outputs are not distinguished. One that keeps state has it in its own memory.
            flow.write(call.numbers(1, "<i"))
        elif kind == _MOVE_CALL:
            flow.write([call.number(1, "<i")])
