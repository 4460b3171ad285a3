"""How the outputs of two executions of one program differ. Pure, and without numpy, which agents do not have."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence

from etfarm.v1 import report_pb2
from etfarm.wire.tensors import ITEM_BYTES, Scalar, Tensor, Value

_CODES = {
    "bool": "B", "uint8": "B", "int8": "b", "int16": "h", "uint16": "H", "float16": "e", "int32": "i", "uint32": "I",
    "float32": "f", "int64": "q", "uint64": "Q", "float64": "d",
}  # fmt: skip
"""Of `struct`, by dtype. bfloat16 is the upper half of a float32; the eight-bit floats are compared as bytes only."""


def equal(one: Sequence[Value], other: Sequence[Value]) -> bool:
    """Whether two executions gave the same, byte by byte: NaN equals itself, and -0.0 is not 0.0."""
    return len(one) == len(other) and all(map(_equal, one, other))


def compare(one: Sequence[Value], other: Sequence[Value], names: tuple[str, str] = ("", "")) -> list[report_pb2.OutputDifference]:
    """The outputs that differ, in their order.

    Args:
        one: what an execution gave.
        other: what another gave, with as many outputs.
        names: what the two executions are called.
    """
    found = []
    for index, (left, right) in enumerate(zip(one, other, strict=True)):
        if _equal(left, right):
            continue
        told = report_pb2.OutputDifference(output=left.name or str(index), one=names[0], other=names[1])
        if isinstance(left, Scalar) and isinstance(right, Scalar):
            told.differing = told.elements = 1
            if isinstance(left.value, int | float) and isinstance(right.value, int | float):
                _tell_largest(told, left.value - right.value)
        elif isinstance(left, Tensor) and isinstance(right, Tensor) and _layout(left) == _layout(right):
            _compare(told, left, right)
        found.append(told)
    return found


def _equal(one: Value, other: Value) -> bool:
    if isinstance(one, Scalar) and isinstance(other, Scalar):
        return repr(one.value) == repr(other.value)
    return one == other


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.dim_order


def _compare(told: report_pb2.OutputDifference, one: Tensor, other: Tensor) -> None:
    size = ITEM_BYTES[one.dtype]
    count = len(one.data) // size
    left, right = memoryview(one.data), memoryview(other.data)
    places = [
        index for index in range(count) if left[index * size : (index + 1) * size] != right[index * size : (index + 1) * size]
    ]
    told.elements, told.differing = count, len(places)
    numbers = _numbers(one.dtype, one.data), _numbers(other.dtype, other.data)
    if numbers[0] is None or numbers[1] is None:
        return
    gaps = ((abs(numbers[0][index] - numbers[1][index]), index) for index in places)
    # NaN and infinity are no distance; where there is nothing else, the first place is told.
    largest = max(((gap, -index) for gap, index in gaps if math.isfinite(gap)), default=None)
    place = -largest[1] if largest is not None else places[0]
    if largest is not None:
        _tell_largest(told, largest[0])
    told.at.extend(_coordinates(place, one))


def _tell_largest(told: report_pb2.OutputDifference, gap: float) -> None:
    if math.isfinite(gap):
        told.max_abs_difference = abs(gap)


def _numbers(dtype: str, data: bytes) -> Sequence[float] | None:
    """The elements as Python numbers; None for a dtype whose numbers Python cannot read."""
    if dtype == "bfloat16":
        halves = array("H", data)
        return struct.unpack(f"<{len(halves)}f", array("I", (half << 16 for half in halves)).tobytes())
    code = _CODES.get(dtype)
    return None if code is None else struct.unpack(f"<{len(data) // ITEM_BYTES[dtype]}{code}", data)


def _coordinates(place: int, tensor: Tensor) -> list[int]:
    """The index of the element that lies at `place` in memory, in the order of the dims."""
    found = [0] * len(tensor.shape)
    for dim in reversed(tensor.dim_order):
        place, found[dim] = divmod(place, tensor.shape[dim])
    return found
