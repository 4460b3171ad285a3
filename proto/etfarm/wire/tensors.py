"""Tensors on the wire and on disk: dtype name, shape, dim order and raw little-endian bytes.

A `.ett` file is the magic `ETT1`, a little-endian u32 with the header's size, a JSON header
`{"values": [{"name", "kind", "dtype", "shape", "dim_order", "offset", "size_bytes"} | {"name", "kind", "value"}]}`
and the payloads, each at `offset` from the end of the header, 64-byte aligned there. Values come in flattened pytree order.
numpy and ml_dtypes are loaded only by the functions that give or take arrays.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, TypeGuard

from etfarm.wire.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAGIC = b"ETT1"
_ALIGN = 64
_MAX_HEADER_BYTES = 16 << 20

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8,
}  # fmt: skip
"""Size of one element by dtype name. The names are torch's, which are numpy's or ml_dtypes' too."""


class BadTensorFile(UserError):
    """Bytes that should be a tensor file are none."""

    reason = "BAD_TENSOR_FILE"


@dataclass(frozen=True)
class Tensor:
    """One dense tensor. `data` holds the elements in the physical order that `dim_order` gives (outermost first)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes
    dim_order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.dim_order:
            object.__setattr__(self, "dim_order", tuple(range(len(self.shape))))
        if self.dtype not in ITEM_BYTES:
            raise BadTensorFile(f"Tensor {self.name!r} has the dtype {self.dtype!r}, which etfarm does not carry.")
        if sorted(self.dim_order) != list(range(len(self.shape))):
            raise BadTensorFile(f"Tensor {self.name!r} has the dim order {self.dim_order}, no order of its dims.")
        expected = math.prod(self.shape) * ITEM_BYTES[self.dtype]
        if len(self.data) != expected:
            raise BadTensorFile(
                f"Tensor {self.name!r} has {len(self.data)} bytes where {self.dtype} {list(self.shape)} needs {expected}."
            )

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in the order of the dims."""
        return self.dim_order == tuple(range(len(self.shape)))


@dataclass(frozen=True)
class Scalar:
    """A non-tensor leaf: a Python bool, int, float or None. Programs bake it in but must be given it all the same."""

    name: str
    value: bool | int | float | None


Value = Tensor | Scalar


def encode(values: Iterable[Value]) -> bytes:
    """A tensor file's bytes; `decode` gives the same values back. Equal values give equal bytes."""
    header: list[dict[str, object]] = []
    payloads: list[bytes] = []
    offset = 0
    for value in values:
        if isinstance(value, Scalar):
            header.append({"name": value.name, "kind": "scalar", "value": value.value})
            continue
        header.append(
            {
                "name": value.name, "kind": "tensor", "dtype": value.dtype, "shape": list(value.shape),
                "dim_order": list(value.dim_order), "offset": offset, "size_bytes": len(value.data),
            }
        )  # fmt: skip
        padding = -len(value.data) % _ALIGN
        payloads.append(value.data + b"\0" * padding)
        offset += len(value.data) + padding
    text = json.dumps({"values": header}, separators=(",", ":")).encode()
    return b"".join([MAGIC, struct.pack("<I", len(text)), text, *payloads])


def decode(data: bytes | memoryview) -> list[Value]:
    """The values of a tensor file.

    Raises:
        BadTensorFile: `data` is none, or a payload lies outside of it.
    """
    view = memoryview(data)
    if len(view) < 8 or bytes(view[:4]) != MAGIC:
        raise BadTensorFile("These bytes are no etfarm tensor file.")
    (size,) = struct.unpack("<I", view[4:8])
    if size > _MAX_HEADER_BYTES or 8 + size > len(view):
        raise BadTensorFile("The tensor file is cut off in its header.")
    payload = view[8 + size :]
    try:
        entries = json.loads(bytes(view[8 : 8 + size]))["values"]
        return [_value(entry, payload) for entry in entries]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadTensorFile(f"The tensor file's header cannot be read: {error}.") from None


def _value(entry: dict[str, object], payload: memoryview) -> Value:
    name = str(entry["name"])
    if entry["kind"] == "scalar":
        value = entry["value"]
        if value is not None and not isinstance(value, bool | int | float):
            raise ValueError(f"scalar {name!r} holds {type(value).__name__}")
        return Scalar(name, value)
    start, size = entry["offset"], entry["size_bytes"]
    shape, order = entry["shape"], entry["dim_order"]
    if not (isinstance(start, int) and isinstance(size, int) and _is_counts(shape) and _is_counts(order)):
        raise ValueError(f"tensor {name!r} lacks its place or its shape")
    if start < 0 or size < 0 or start + size > len(payload):
        raise BadTensorFile(f"The tensor file is cut off in {name!r}.")
    return Tensor(name, str(entry["dtype"]), tuple(shape), bytes(payload[start : start + size]), tuple(order))


def _is_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def read(file: BinaryIO) -> list[Value]:
    """`decode` of a whole open file."""
    return decode(file.read())


def dtype_of(name: str) -> np.dtype:
    """The numpy dtype of a wire dtype name; ml_dtypes gives those that numpy lacks."""
    import numpy as np

    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        import ml_dtypes

        extended: np.dtype = np.dtype(getattr(ml_dtypes, name))
        return extended
    return np.dtype(name)


def to_array(tensor: Tensor) -> NDArray[np.generic]:
    """The tensor as an array of its logical shape; a read-only view with strides where the dim order is not contiguous."""
    import numpy as np

    physical = np.frombuffer(tensor.data, dtype=dtype_of(tensor.dtype)).reshape([tensor.shape[d] for d in tensor.dim_order])
    return physical.transpose(np.argsort(tensor.dim_order).tolist()) if tensor.shape else physical


def from_array(name: str, array: NDArray[np.generic], dim_order: Sequence[int] = ()) -> Tensor:
    """A tensor of an array, its bytes laid in `dim_order` (contiguous when empty)."""
    import numpy as np

    order = tuple(dim_order) or tuple(range(array.ndim))
    # A dtype's name does not tell its byte order.
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return Tensor(name, array.dtype.name, tuple(array.shape), np.ascontiguousarray(little.transpose(order)).tobytes(), order)
