"""Differences between the outputs of two executions of one program. Pure, and without numpy, which agents do not have."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence

from etfarm.v1 import report_pb2
from etfarm.wire.rounding import tolerance
from etfarm.wire.tensors import ITEM_BYTES, Scalar, Tensor, Value

Executions = tuple[report_pb2.Execution.ValueType, report_pb2.Execution.ValueType]

_UNNAMED: Executions = (report_pb2.EXECUTION_UNSPECIFIED, report_pb2.EXECUTION_UNSPECIFIED)

_CODES = {
    "bool": "B", "uint8": "B", "int8": "b", "int16": "h", "uint16": "H", "float16": "e", "int32": "i", "uint32": "I",
    "float32": "f", "int64": "q", "uint64": "Q", "float64": "d",
}  # fmt: skip
"""Format characters of `struct`, by dtype. bfloat16 is the upper half of a float32; eight-bit floats are compared only as bytes.
"""


def equal(first: Sequence[Value], second: Sequence[Value]) -> bool:
    """Return whether two executions have equal outputs, byte by byte: NaN equals itself, and -0.0 is not 0.0."""
    return len(first) == len(second) and all(map(_equal, first, second))


def compare(
    first: Sequence[Value],
    second: Sequence[Value],
    executions: Executions = _UNNAMED,
) -> list[report_pb2.OutputDifference]:
    """Return the outputs that differ, in their order.

    Args:
        first: outputs of an execution.
        second: the same number of outputs of another execution.
        executions: the two executions.
    """
    differences: list[report_pb2.OutputDifference] = []
    for index, (left, right) in enumerate(zip(first, second, strict=True)):
        if _equal(left, right):
            continue
        difference = report_pb2.OutputDifference(output=left.name or str(index), first=executions[0], second=executions[1])
        if isinstance(left, Scalar) and isinstance(right, Scalar):
            difference.differing = difference.elements = 1
            if isinstance(left.value, int | float) and isinstance(right.value, int | float):
                _set_largest(difference, left.value - right.value)
        elif isinstance(left, Tensor) and isinstance(right, Tensor) and _layout(left) == _layout(right):
            _compare(difference, left, right)
        differences.append(difference)
    return differences


def is_rounding(differences: Sequence[report_pb2.OutputDifference]) -> bool:
    """Return whether rounding explains all of these differences; True if there are none."""
    return all(
        each.HasField("rounding") and each.HasField("max_abs_difference") and each.max_abs_difference <= each.rounding
        for each in differences
    )


def _equal(left: Value, right: Value) -> bool:
    if isinstance(left, Scalar) and isinstance(right, Scalar):
        return repr(left.value) == repr(right.value)
    return left == right


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.dim_order


def _compare(difference: report_pb2.OutputDifference, first: Tensor, second: Tensor) -> None:
    size = ITEM_BYTES[first.dtype]
    count = len(first.data) // size
    left, right = memoryview(first.data), memoryview(second.data)
    places = [
        index for index in range(count) if left[index * size : (index + 1) * size] != right[index * size : (index + 1) * size]
    ]
    difference.elements, difference.differing = count, len(places)
    numbers = _numbers(first.dtype, first.data), _numbers(second.dtype, second.data)
    if numbers[0] is None or numbers[1] is None:
        return
    gaps = [(abs(numbers[0][index] - numbers[1][index]), index) for index in places]
    # NaN and infinity have no distance; without any other difference, report the first position.
    largest = max(((gap, -index) for gap, index in gaps if math.isfinite(gap)), default=None)
    if all(math.isfinite(gap) for gap, _ in gaps):
        limit = tolerance(first.dtype, max((abs(number) for number in numbers[0] if math.isfinite(number)), default=0.0))
        if limit is not None:
            difference.rounding = limit
    place = -largest[1] if largest is not None else places[0]
    if largest is not None:
        _set_largest(difference, largest[0])
    difference.at.extend(_coordinates(place, first))


def _set_largest(difference: report_pb2.OutputDifference, gap: float) -> None:
    if math.isfinite(gap):
        difference.max_abs_difference = abs(gap)


def _numbers(dtype: str, data: bytes) -> Sequence[float] | None:
    """Return the elements as Python numbers; None for a dtype that Python cannot read."""
    if dtype == "bfloat16":
        halves = array("H", data)
        return struct.unpack(f"<{len(halves)}f", array("I", (half << 16 for half in halves)).tobytes())
    code = _CODES.get(dtype)
    return None if code is None else struct.unpack(f"<{len(data) // ITEM_BYTES[dtype]}{code}", data)


def _coordinates(place: int, tensor: Tensor) -> list[int]:
    """Return the index of the element that lies at `place` in memory, in the order of the dims."""
    index = [0] * len(tensor.shape)
    for dim in reversed(tensor.dim_order):
        place, index[dim] = divmod(place, tensor.shape[dim])
    return index
