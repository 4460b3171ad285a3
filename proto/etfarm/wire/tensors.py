"""The format of tensors on the wire and on disk: dtype name, shape, dim order and raw little-endian bytes.

A `.ett` file is the magic `ETT1`, a little-endian u32 with the header's size, a JSON header
`{"values": [{"name", "kind", "dtype", "shape", "dim_order", "offset", "size_bytes"} | {"name", "kind", "value"}]}`
and the payloads, each at `offset` from the end of the header, 64-byte aligned there. Values are in flattened pytree order.
numpy and ml_dtypes are imported only by the functions that convert arrays.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, TypeGuard

from etfarm.wire.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAGIC = b"ETT1"
_ALIGN = 64

MAX_HEADER_BYTES: Final = 2 << 20
"""Maximum size of a file's JSON header, which is read whole; parsing it blocks every other thread."""

MAX_VALUES: Final = 10_000
"""Maximum number of values in one file."""

MAX_RANK: Final = 64
"""Maximum number of dims of a tensor, as in numpy and torch."""

MAX_NAME_CHARACTERS: Final = 1_000
"""Maximum length of a value's name, which is the path of a leaf in its tree."""

_MAX_NUMBER: Final = (1 << 63) - 1

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8,
}  # fmt: skip
"""Size of an element in bytes by dtype name. The names are those of torch, and also of numpy or ml_dtypes."""

SCALAR_TYPES: Final = {
    0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32", 7: "float64", 11: "bool",
    15: "bfloat16", 23: "float8_e5m2", 24: "float8_e4m3fn", 27: "uint16", 28: "uint32", 29: "uint64",
}  # fmt: skip
"""Dtype names by their numbers in ExecuTorch's enum ScalarType, which programs and ETDumps hold."""


class BadTensorFile(UserError):
    """Bytes that are not a valid tensor file."""

    reason = "BAD_TENSOR_FILE"


@dataclass(frozen=True)
class Layout:
    """One tensor of a file, as its header describes it: everything except its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    dim_order: tuple[int, ...]
    offset: int
    """Position of the payload, relative to the end of the header."""
    size_bytes: int

    def __post_init__(self) -> None:
        _validate(self.name, self.dtype, self.shape, self.dim_order, self.size_bytes)


@dataclass(frozen=True)
class Tensor:
    """One dense tensor. `data` holds the elements in the physical order of `dim_order` (outermost first)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes
    dim_order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.dim_order:
            object.__setattr__(self, "dim_order", tuple(range(len(self.shape))))
        _validate(self.name, self.dtype, self.shape, self.dim_order, len(self.data))

    @property
    def is_contiguous(self) -> bool:
        """Whether the physical order is that of the dims."""
        return self.dim_order == tuple(range(len(self.shape)))


@dataclass(frozen=True)
class Scalar:
    """A non-tensor leaf: a Python bool, int, float or None. Programs fix its value at export but still require it."""

    name: str
    value: bool | int | float | None


Value = Tensor | Scalar


def _validate(name: str, dtype: str, shape: tuple[int, ...], dim_order: tuple[int, ...], size_bytes: int) -> None:
    """Raise BadTensorFile for an inconsistent tensor. The rank comes first, since the time of other checks grows with it."""
    if len(shape) > MAX_RANK:
        raise BadTensorFile(f"Tensor {name!r} must have at most {MAX_RANK} dims, got {len(shape)}.")
    if dtype not in ITEM_BYTES:
        raise BadTensorFile(f"Tensor {name!r} has the dtype {dtype[:80]!r}, which etfarm does not carry.")
    if len(dim_order) != len(shape) or sorted(dim_order) != list(range(len(shape))):
        raise BadTensorFile(f"Tensor {name!r} has the dim order {dim_order[:MAX_RANK]}, which is not an order of its dims.")
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    if size_bytes != expected:
        raise BadTensorFile(f"Tensor {name!r} has {size_bytes} bytes where {dtype} {list(shape)} needs {expected}.")


def encode(values: Iterable[Value]) -> bytes:
    """Return a tensor file's bytes, from which `decode` restores the values. Equal values have equal bytes."""
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
    """Return the values of a tensor file.

    Raises:
        BadTensorFile: `data` is not a tensor file, or a payload lies outside of it.
    """
    view = memoryview(data)
    size = _header_size(bytes(view[:8]), len(view))
    payload = view[8 + size :]
    return [
        value if isinstance(value, Scalar) else _tensor(value, payload)
        for value in _parse_header(bytes(view[8 : 8 + size]), len(payload))
    ]


def _tensor(layout: Layout, payload: memoryview) -> Tensor:
    data = bytes(payload[layout.offset : layout.offset + layout.size_bytes])
    return Tensor(layout.name, layout.dtype, layout.shape, data, layout.dim_order)


def read_header(path: Path) -> list[Layout | Scalar]:
    """Return the description of a tensor file's values, without reading their bytes.

    Raises:
        BadTensorFile: the file is not a tensor file, or a payload lies outside of it.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        total = os.fstat(file.fileno()).st_size
        size = _header_size(file.read(8), total)
        return _parse_header(file.read(size), total - 8 - size)


def _header_size(start: bytes, total: int) -> int:
    if len(start) < 8 or start[:4] != MAGIC:
        raise BadTensorFile("These bytes are not an etfarm tensor file.")
    (size,) = struct.unpack("<I", start[4:8])
    if 8 + size > total:
        raise BadTensorFile("The tensor file is cut off in its header.")
    if size > MAX_HEADER_BYTES:
        raise BadTensorFile(f"The header of a tensor file must have at most {MAX_HEADER_BYTES} bytes, got {size}.")
    return int(size)


def _parse_header(text: bytes, payload_bytes: int) -> list[Layout | Scalar]:
    try:
        entries = json.loads(text)["values"]
        if not isinstance(entries, list):
            raise ValueError("`values` is not a list")
        if len(entries) > MAX_VALUES:
            raise BadTensorFile(f"A tensor file must have at most {MAX_VALUES} values, got {len(entries)}.")
        values = [_parse_value(entry, payload_bytes) for entry in entries]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadTensorFile(f"The tensor file's header cannot be read: {error}.") from None
    # Overlapping payloads would let a small file allocate any amount of memory.
    if sum(value.size_bytes for value in values if isinstance(value, Layout)) > payload_bytes:
        raise BadTensorFile("The payloads of the tensor file overlap.")
    return values


def _parse_value(entry: dict[str, object], payload_bytes: int) -> Layout | Scalar:
    name = str(entry["name"])
    if len(name) > MAX_NAME_CHARACTERS:
        raise BadTensorFile(f"A value's name must have at most {MAX_NAME_CHARACTERS} characters, got {len(name)}.")
    if entry["kind"] == "scalar":
        value = entry["value"]
        if value is not None and not isinstance(value, bool | int | float):
            raise ValueError(f"scalar {name!r} holds {type(value).__name__}")
        return Scalar(name, value)
    start, size = entry["offset"], entry["size_bytes"]
    shape, order = entry["shape"], entry["dim_order"]
    if not (_is_count(start) and _is_count(size) and _is_counts(shape) and _is_counts(order)):
        raise ValueError(f"tensor {name!r} lacks its offset or its shape")
    if start + size > payload_bytes:
        raise BadTensorFile(f"The tensor file is cut off in {name!r}.")
    return Layout(name, str(entry["dtype"]), tuple(shape), tuple(order) or tuple(range(len(shape))), start, size)


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _MAX_NUMBER


def _is_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(map(_is_count, value))


def read(file: BinaryIO) -> list[Value]:
    """Return the values of an open tensor file; see `decode`."""
    return decode(file.read())


def dtype_of(name: str) -> np.dtype:
    """Return the numpy dtype of a dtype name; ml_dtypes provides those that numpy lacks."""
    import numpy as np

    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        import ml_dtypes

        extended: np.dtype = np.dtype(getattr(ml_dtypes, name))
        return extended
    return np.dtype(name)


def to_array(tensor: Tensor) -> NDArray[np.generic]:
    """Return the tensor as an array of its logical shape; a read-only view, strided if the dim order is not contiguous."""
    import numpy as np

    physical = np.frombuffer(tensor.data, dtype=dtype_of(tensor.dtype)).reshape([tensor.shape[d] for d in tensor.dim_order])
    return physical.transpose(np.argsort(tensor.dim_order).tolist()) if tensor.shape else physical


def from_array(name: str, array: NDArray[np.generic], dim_order: Sequence[int] = ()) -> Tensor:
    """Return a tensor with the elements of an array, stored in `dim_order` (contiguous if empty)."""
    import numpy as np

    order = tuple(dim_order) or tuple(range(array.ndim))
    # A dtype's name does not include its byte order.
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return Tensor(name, array.dtype.name, tuple(array.shape), np.ascontiguousarray(little.transpose(order)).tobytes(), order)
