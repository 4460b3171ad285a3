"""The description of a program in its flatbuffer: methods with their values, operators and delegates.

Loads neither torch nor ExecuTorch, whose reader takes ten seconds of CPU time to import.

Source: executorch/schema/program.fbs and scalar_type.fbs; a test compares the results with those of ExecuTorch's reader.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from etfarm.wire.flatbuffer import BadBuffer, Buffer, Table
from etfarm.wire.program_tables import (
    Delegate,
    InstructionKind,
    PlanTable,
    ProgramTables,
    Scalar,
    TensorTable,
    Union,
    ValueKind,
    read_scalar,
)
from etfarm.wire.tensors import SCALAR_TYPES

_TENSOR_LISTS: Final = (ValueKind.TENSOR_LIST, ValueKind.OPTIONAL_TENSOR_LIST)
_KINDS: Final = frozenset(ValueKind)
_INSTRUCTIONS: Final = frozenset(InstructionKind)

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


ProgramValue = TensorValue | Scalar | None
"""A tensor or scalar of a method; None for null and for lists."""


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
    program = ProgramTables(flatbuffer)
    return Program(
        [_plan(plan) for plan in program.plans()],
        sum(map(len, program.constants())),
        [len(data) for data in program.inline_data],
        [size for _, size in program.segments],
    )


def _plan(plan: PlanTable) -> ExecutionPlan:
    unions, inputs = list(plan.values()), list(plan.inputs)
    values = [read_value(*union) for union in unions]
    lists = {index: table.numbers(0, "<i") for index, (kind, table) in enumerate(unions) if table and kind in _TENSOR_LISTS}
    flow = _Flow(values, lists, inputs)
    for chain in plan.chains():
        _read_instructions(chain, flow)
    return ExecutionPlan(
        name=plan.name,
        values=values,
        inputs=inputs,
        outputs=list(plan.outputs),
        operators=plan.operators(),
        delegates=plan.delegates(),
        planned_bytes=list(plan.planned_bytes),
        state=list(flow.state),
    )


def read_value(kind: int, value: Table | None) -> ProgramValue:
    """Return a value of a method.

    Raises:
        BadBuffer: it is missing, or its kind or dtype is unknown.
    """
    if value is None:
        raise BadBuffer("a value is missing")
    if kind == ValueKind.TENSOR:
        return _tensor(TensorTable(value))
    if kind not in _KINDS:
        raise BadBuffer(f"a value has the unknown kind {kind}")
    return read_scalar(kind, value)


def _tensor(tensor: TensorTable) -> TensorValue:
    dtype = DTYPES.get(tensor.scalar_type)
    if dtype is None:
        raise BadBuffer(f"a tensor has the unknown scalar type {tensor.scalar_type}")
    return TensorValue(dtype, tensor.sizes, tensor.dim_order, tensor.is_static, tensor.place)


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


def _read_instructions(chain: Iterable[Union], flow: _Flow) -> None:
    for kind, call in chain:
        if call is None or kind not in _INSTRUCTIONS:
            raise BadBuffer(f"an instruction has the unknown kind {kind}")
        call.number(0)
        if kind == InstructionKind.KERNEL_CALL:
            flow.call(call.numbers(1, "<i"))
        elif kind == InstructionKind.DELEGATE_CALL:
            # A delegate's inputs and outputs are not distinguished. One that keeps state has it in its own memory.
            flow.write(call.numbers(1, "<i"))
        elif kind == InstructionKind.MOVE_CALL:
            flow.write([call.number(1, "<i")])
