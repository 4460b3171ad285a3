"""A reader of the values of each instruction in the numerics pass, from its ETDump and its debug file."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from etfarm.server.reports.trace.flatbuffer import Columns, Positions
from etfarm.wire.errors import DeviceError, Kind
from etfarm.wire.flatbuffer import Table
from etfarm.wire.tensors import SCALAR_TYPES, dtype_of

_IDENTIFIER: Final = b"ED00"
_RUNS: Final = 1  # fields of ETDump
_EVENTS: Final = 3  # of RunData
_DEBUG_EVENT: Final = 2  # of Event
_CHAIN, _INSTRUCTION, _ENTRY, _NUMBER, _TEXT = 0, 1, 2, 3, 4  # of DebugEvent
_KIND, _TENSOR, _LIST, _OUTPUT = 0, 1, 2, 7  # of Value
_SCALAR_TYPE, _SIZES, _STRIDES, _OFFSET = 0, 1, 2, 3  # of Tensor
_TENSOR_KIND, _LIST_KIND = 5, 6  # members of ValueType

_SMALLEST_EVENT: Final = 16
"""Minimum size of an event in bytes: its offset in the vector and a table with one field. A larger count repeats events."""
_MOST_DIMS: Final = 64


class BadRecording(DeviceError):
    """Files of the numerics pass that cannot be read, or that do not belong together."""

    reason = "BAD_RECORDING"
    kind = Kind.INVALID_ARGUMENT


class NothingRecorded(BadRecording):
    """A complete trace of the numerics pass that has no values."""


@dataclass(frozen=True)
class Stored:
    """One tensor in the debug file."""

    dtype: str
    """torch's name of the dtype."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in elements."""
    offset: int
    """Position of its first byte in the file."""


@dataclass(frozen=True)
class Recorded:
    """The values of one instruction."""

    chain: int
    instruction: int
    values: tuple[Stored, ...]
    """The outputs in order, with lists of tensors flattened and without scalars."""


class Recording:
    """The values of one execution.

    Args:
        etdump: the pass's .etdp.
        debug: the file that it refers to.

    Raises:
        NothingRecorded: the ETDump has no values.
        BadRecording: the file is not an ETDump, is truncated, holds the values of several executions, or refers beyond the
            end of the debug file.
    Source: executorch/devtools/etdump/etdump_schema_flatcc.fbs; the logged values are defined in runtime/executor/method.cpp
        (each delegate's outputs) and in the kernels' generated wrappers (each kernel's out arguments).
    """

    def __init__(self, etdump: Path, debug: Path) -> None:
        data = etdump.read_bytes()
        wanted = 4 + int.from_bytes(data[:4], "little")
        if data[8:12] != _IDENTIFIER:
            raise BadRecording(f"The numerics pass's trace of {len(data)} bytes is not an ETDump.", size_bytes=len(data))
        if wanted > len(data):
            raise BadRecording(f"The numerics pass's trace is cut short: {len(data)} of its {wanted} bytes are present.")
        try:
            self.instructions = tuple(_instructions(data))
        except (struct.error, IndexError, ValueError) as error:
            raise BadRecording(f"The numerics pass's trace of {len(data)} bytes is damaged ({error}).") from error
        if not self.instructions:
            raise NothingRecorded("The numerics pass recorded no values: its trace has no debug events.")
        try:
            size = debug.stat().st_size
        except OSError as error:
            raise BadRecording(f"The debug file with the values is missing ({error.strerror}).") from error
        end = max((_end(value) for recorded in self.instructions for value in recorded.values), default=0)
        if end > size:
            raise BadRecording(
                f"The debug file is cut short, or is another run's: it has {size} bytes where the trace refers to {end}.",
                size_bytes=size, expected=end,
            )  # fmt: skip
        with debug.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""

    def array(self, value: Stored) -> NDArray[np.generic]:
        """Return a value's elements, [shape] in its own dtype, as a read-only view of the file."""
        kind = np.dtype(dtype_of(value.dtype))
        strides = [stride * kind.itemsize for stride in value.strides]
        return np.ndarray(value.shape, kind, self._bytes, value.offset, strides)


def _end(value: Stored) -> int:
    """Return the end of a value in the debug file. Its strides are those of a dense tensor in some order of dims."""
    return value.offset + math.prod(value.shape) * np.dtype(dtype_of(value.dtype)).itemsize if 0 not in value.shape else 0


def _instructions(data: bytes) -> Iterator[Recorded]:
    """Yield the values in order of execution, without those of a loop's body, which are recorded several times."""
    columns = Columns(data)
    runs = [run for run in Table.root(data, 4).tables(_RUNS) if run.positions(_EVENTS)]
    tensors_by_place: dict[tuple[int, int], list[Stored]] = {}
    repeated: set[tuple[int, int]] = set()
    before = None
    with_values = events_in_all = 0
    for run in runs:
        events_in_all += len(run.positions(_EVENTS))
        if events_in_all * _SMALLEST_EVENT > len(data):
            raise ValueError("it claims more events than its bytes can hold")
        events = columns.targets(np.array(run.positions(_EVENTS), dtype=np.int64))
        tables = columns.targets(columns.fields(events, _DEBUG_EVENT))
        tables = tables[tables > 0]
        entries = columns.targets(columns.fields(tables, _ENTRY))
        # Skip the method's own outputs, which are recorded a second time.
        own = (entries > 0) & (columns.fields(entries, _OUTPUT) == 0)
        # Skip values inside of a delegate: XNNPACK records none, and other backends' are not the instruction's outputs.
        own &= (columns.scalars(tables, _NUMBER, "<i4", -1) == -1) & (columns.fields(tables, _TEXT) == 0)
        tables, entries = tables[own], entries[own]
        with_values += bool(tables.size)
        chains = columns.scalars(tables, _CHAIN, "<u8", 0).tolist()
        instructions = columns.scalars(tables, _INSTRUCTION, "<i4", -1).tolist()
        for place, values in zip(zip(chains, instructions, strict=True), _values(data, columns, entries), strict=True):
            if place != before and place in tensors_by_place:
                repeated.add(place)
            tensors_by_place.setdefault(place, []).extend(values)
            before = place
    if with_values > 1:
        raise ValueError(f"it holds {with_values} executions, but one was requested")
    for (chain, instruction), tensors in tensors_by_place.items():
        if (chain, instruction) not in repeated and instruction >= 0:
            yield Recorded(chain, instruction, tuple(tensors))


def _values(data: bytes, columns: Columns, entries: Positions) -> Iterator[list[Stored]]:
    """Yield the list of tensors of each Value."""
    kinds = columns.scalars(entries, _KIND, "<i1", 0).tolist()
    tensors = columns.targets(columns.fields(entries, _TENSOR)).tolist()
    lists = columns.targets(columns.fields(entries, _LIST)).tolist()
    left = len(data) // _SMALLEST_EVENT
    for kind, tensor, several in zip(kinds, tensors, lists, strict=True):
        if kind == _TENSOR_KIND:
            yield [_stored(data, tensor)]
        elif kind == _LIST_KIND:
            places = Table(data, several).positions(0)
            if (left := left - len(places)) < 0:
                raise ValueError("it claims more tensors than its bytes can hold")
            yield [_stored(data, at + _offset(data, at)) for at in places]
        else:
            yield []


def _stored(data: bytes, at: int) -> Stored:
    table = Table(data, at)
    code = table.number(_SCALAR_TYPE, "<b")
    if code not in SCALAR_TYPES:
        raise ValueError(f"a tensor has the unknown type {code}")
    if max(len(table.positions(slot, 8)) for slot in (_SIZES, _STRIDES)) > _MOST_DIMS:
        raise ValueError(f"a tensor has more than {_MOST_DIMS} dims")
    shape, strides = table.numbers(_SIZES, "<q"), table.numbers(_STRIDES, "<q")
    if len(shape) != len(strides) or min((*shape, *strides), default=0) < 0:
        raise ValueError(f"a tensor has the sizes {shape} and the strides {strides}")
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if 0 not in shape and reach > math.prod(shape):
        raise ValueError(f"a tensor of the sizes {shape} has gaps, by its strides {strides}")
    offset = table.number(_OFFSET, "<q") if 0 not in shape else 0  # of an empty tensor it is -1
    if offset < 0:
        raise ValueError("a tensor has no place in the debug file")
    return Stored(SCALAR_TYPES[code], shape, strides, offset)


def _offset(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])
