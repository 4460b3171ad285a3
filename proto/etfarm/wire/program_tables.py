"""The tables of a program's flatbuffer by name: its methods with their values, operators, instructions and delegates.

Readers take from them what they need; nothing else is read. Everything here raises `BadBuffer` for what cannot be read.

Source: executorch/schema/program.fbs.
"""

from __future__ import annotations

import enum
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from etfarm.wire.flatbuffer import BadBuffer, Buffer, Table
from etfarm.wire.pte import HEAD_BYTES, read_extended_header

Scalar = int | float | bool | str

_PLANS, _CONSTANTS, _DELEGATE_DATA, _SEGMENTS, _NAMED_DATA = 1, 2, 3, 4, 7  # fields of Program
_NAME, _VALUES, _INPUTS, _OUTPUTS, _CHAINS, _OPERATORS, _DELEGATES, _BUFFER_SIZES = 0, 2, 3, 4, 5, 6, 7, 8  # of ExecutionPlan
_SCALAR_TYPE, _SIZES, _DIM_ORDER, _DATA, _ALLOCATION, _DYNAMISM, _EXTRA = 0, 2, 3, 5, 6, 8, 9  # of Tensor
_MEMORY, _OFFSET_LOW, _OFFSET_HIGH = 0, 1, 2  # of AllocationDetails
_FULL_NAME, _LOCATION = 1, 2  # of ExtraTensorInfo
_INSTRUCTIONS = 2  # of Chain
_INLINE, _SEGMENT = 0, 1  # of DataLocation
_STATIC = 0  # of TensorShapeDynamism
_EXTERNAL = 1  # of TensorDataLocation
_XNNPACK_MAGIC = b"XH00"


class ValueKind(enum.IntEnum):
    """Members of KernelTypes."""

    NULL = 1
    INT = 2
    BOOL = 3
    DOUBLE = 4
    TENSOR = 5
    STRING = 6
    INT_LIST = 7
    DOUBLE_LIST = 8
    BOOL_LIST = 9
    TENSOR_LIST = 10
    OPTIONAL_TENSOR_LIST = 11


class InstructionKind(enum.IntEnum):
    """Members of InstructionArguments."""

    KERNEL_CALL = 1
    DELEGATE_CALL = 2
    MOVE_CALL = 3
    JUMP_FALSE_CALL = 4
    FREE_CALL = 5


Union = tuple[int, Table | None]
"""The kind of a value or an instruction, which may be unknown, and its table."""


@dataclass(frozen=True)
class Delegate:
    """A delegated part of a method, whose data are at `index` of the program's segments, or of the data in the flatbuffer."""

    backend: str
    in_segment: bool
    index: int


class TensorTable:
    """A tensor of a method."""

    __slots__ = ("_table",)

    def __init__(self, table: Table) -> None:
        self._table = table

    @property
    def scalar_type(self) -> int:
        """The number of the dtype; see `etfarm.wire.tensors.SCALAR_TYPES`."""
        return self._table.number(_SCALAR_TYPE, "<b")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each dim; the maximum size of a dynamic dim."""
        return self._table.numbers(_SIZES, "<i")

    @property
    def dim_order(self) -> tuple[int, ...]:
        """The dims in the order of their strides."""
        return self._table.numbers(_DIM_ORDER, "<B")

    @property
    def is_static(self) -> bool:
        """Whether all of its dims are static."""
        return self._table.number(_DYNAMISM, "<b") == _STATIC

    @property
    def has_data(self) -> bool:
        """Whether the flatbuffer has its values: it is a constant."""
        return self._table.number(_DATA) != 0

    @property
    def place(self) -> tuple[int, int] | None:
        """Its buffer of the memory plan and the offset there; None for constants, and for inputs that are not planned."""
        allocation = self._table.table(_ALLOCATION)
        if allocation is None:
            return None
        return allocation.number(_MEMORY), allocation.number(_OFFSET_HIGH) << 32 | allocation.number(_OFFSET_LOW)

    @property
    def name(self) -> str:
        """Its name; empty if the program has none."""
        extra = self._table.table(_EXTRA)
        return extra.text(_FULL_NAME) if extra else ""

    @property
    def is_external(self) -> bool:
        """Whether a data file must hold its bytes, under its name."""
        extra = self._table.table(_EXTRA)
        return extra is not None and extra.number(_LOCATION, "<b") == _EXTERNAL


class PlanTable:
    """A method."""

    def __init__(self, table: Table) -> None:
        self._table = table

    @property
    def name(self) -> str:
        """The method's name."""
        return self._table.text(_NAME)

    @property
    def inputs(self) -> tuple[int, ...]:
        """Indices of values."""
        return self._table.numbers(_INPUTS, "<i")

    @property
    def outputs(self) -> tuple[int, ...]:
        """Indices of values."""
        return self._table.numbers(_OUTPUTS, "<i")

    @property
    def planned_bytes(self) -> tuple[int, ...]:
        """Sizes of the memory-planned buffers, without the first entry, which stands for constants."""
        return self._table.numbers(_BUFFER_SIZES, "<q")[1:]

    def values(self) -> Iterator[Union]:
        """Yield the tensors and scalars; kinds as in `ValueKind`."""
        return map(_union, self._table.tables(_VALUES))

    def chains(self) -> Iterator[Iterator[Union]]:
        """Yield the instructions of each chain; kinds as in `InstructionKind`."""
        for chain in self._table.tables(_CHAINS):
            yield map(_union, chain.tables(_INSTRUCTIONS))

    def operators(self) -> list[str]:
        """Return the kernels' names with the overload if there is one, such as `aten::add.out`."""
        names = [(operator.text(0), operator.text(1)) for operator in self._table.tables(_OPERATORS)]
        return [f"{name}.{overload}" if overload else name for name, overload in names]

    def delegates(self) -> list[Delegate]:
        """Return the delegated parts."""
        return [_delegate(delegate) for delegate in self._table.tables(_DELEGATES)]


class ProgramTables:
    """A program.

    Args:
        file: the whole file, or its flatbuffer, which does not have the segments.
    """

    def __init__(self, file: Buffer) -> None:
        self._file = file
        self._table = Table.root(file)

    def plans(self) -> Iterator[PlanTable]:
        """Yield the methods."""
        return map(PlanTable, self._table.tables(_PLANS))

    def constants(self) -> Iterator[memoryview]:
        """Yield the constants in the flatbuffer."""
        return (constant.content(0) for constant in self._table.tables(_CONSTANTS))

    @cached_property
    def inline_data(self) -> list[memoryview]:
        """The delegates' data in the flatbuffer."""
        return [data.content(0) for data in self._table.tables(_DELEGATE_DATA)]

    @cached_property
    def segments(self) -> list[tuple[int, int]]:
        """The offset and the size of each segment."""
        return [(segment.number(0, "<Q"), segment.number(1, "<Q")) for segment in self._table.tables(_SEGMENTS)]

    def keys(self) -> Iterator[str]:
        """Yield the keys of the weights that the file itself holds by name."""
        return (data.text(0) for data in self._table.tables(_NAMED_DATA))

    def data_of(self, delegate: Delegate) -> Buffer:
        """Return what the backend's own compiler produced for a delegate; less where the file ends within it."""
        count = len(self.segments if delegate.in_segment else self.inline_data)
        if delegate.index >= count:
            raise BadBuffer(f"a delegate's data are number {delegate.index} of {count}")
        if not delegate.in_segment:
            return self.inline_data[delegate.index]
        header = read_extended_header(self._file)
        if header is None:
            raise BadBuffer("it has segments and no extended header")
        return header.segment(self._file, *self.segments[delegate.index])


def read_scalar(kind: int, value: Table) -> Scalar | None:
    """Return a number or a string; None for other kinds."""
    match kind:
        case ValueKind.INT:
            return value.number(0, "<q")
        case ValueKind.BOOL:
            return bool(value.number(0, "<B"))
        case ValueKind.DOUBLE:
            return value.real(0)
        case ValueKind.STRING:
            return value.text(0)
    return None


def xnnpack_graph(data: Buffer) -> Table | None:
    """Return the graph in the data of an XNNPACK delegate, without its weights; None if they have no header of XNNPACK's.

    Source: executorch/backends/xnnpack/serialization/schema.fbs, and XNNHeader beside it.
    """
    if bytes(data[4:8]) != _XNNPACK_MAGIC:
        return None
    try:
        start, size = struct.unpack_from("<II", data, 10)
    except struct.error:
        raise BadBuffer(f"a header of XNNPACK's ends after {len(data)} bytes") from None
    return Table.root(data[start : start + size])


def read_method_names(path: Path) -> list[str]:
    """Return the names of a program's methods; empty if the file is not a program."""
    with path.open("rb") as file:
        header = read_extended_header(head) if len(head := file.read(HEAD_BYTES)) == HEAD_BYTES else None
        file.seek(0)
        # A hostile header declares more than fits into memory.
        content = file.read(-1 if header is None else min(header.program_bytes, os.fstat(file.fileno()).st_size))
    try:
        return [plan.name for plan in ProgramTables(content).plans()]
    except BadBuffer:
        return []


def _union(table: Table) -> Union:
    return table.number(0, "<B"), table.table(1)


def _delegate(table: Table) -> Delegate:
    reference = table.table(1)
    if reference is None:
        raise BadBuffer("a delegate has no data")
    location = reference.number(0, "<b")
    if location not in (_INLINE, _SEGMENT):
        raise BadBuffer(f"a delegate's data have the unknown location {location}")
    return Delegate(table.text(0), location == _SEGMENT, reference.number(1))
