"""Tensor files: users' inputs and devices' outputs, `etfarm.wire.tensors`."""

from __future__ import annotations

from etfarm.wire import tensors

TOKENS = (
    b'"shape":[',
    b'"dim_order":[',
    b'"offset":',
    b'"size_bytes":',
    b'"kind":"scalar"',
    b'"value":',
    b'"dtype":"bool"',
    b"null",
    b"[]",
    b"{}",
    b"true",
    b"-1",
    b"18446744073709551616",
    b"1e400",
)
_MOST_ELEMENTS = 1 << 16


def seeds() -> list[bytes]:
    """Return files of each kind of value."""
    tensor = tensors.Tensor("x", "float32", (1, 2, 2), bytes(16))
    strided = tensors.Tensor("y", "bfloat16", (2, 3), bytes(12), (1, 0))
    scalars = [tensors.Scalar(name, value) for name, value in (("a", None), ("b", True), ("c", 3), ("d", 0.5))]
    empty = tensors.Tensor("e", "int64", (0, 4), b"")
    return [
        tensors.encode(values) for values in ([], [tensor], [strided, *scalars], [empty, tensors.Tensor("s", "bool", (), b"\1")])
    ]


def fuzz(data: bytes) -> None:
    """A file is refused, or its values come back from their encoding."""
    try:
        values = tensors.decode(data)
    except tensors.BadTensorFile:
        return
    again = tensors.decode(tensors.encode(values))
    assert [repr(value) for value in again] == [repr(value) for value in values]
    for value in values:
        if isinstance(value, tensors.Tensor) and max(value.shape, default=0) < _MOST_ELEMENTS and len(value.shape) < 32:
            assert tensors.to_array(value).shape == value.shape
