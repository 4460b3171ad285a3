"""Tensor files: what goes in comes out, bit by bit, and what is none says so."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.wire import tensors
from etfarm.wire.tensors import ITEM_BYTES, BadTensorFile, Scalar, Tensor, Value
from tests.support.golden import Golden


@st.composite
def tensor_values(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    order = tuple(draw(st.permutations(range(len(shape)))))
    size = math.prod(shape) * ITEM_BYTES[dtype]
    return Tensor(draw(st.text(max_size=8)), dtype, shape, draw(st.binary(min_size=size, max_size=size)), order)


scalars = st.builds(
    Scalar, st.text(max_size=8), st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False)
)
files = st.lists(tensor_values() | scalars, max_size=5)


@given(files)
def test_a_file_gives_back_the_same_values(values: list[Value]) -> None:
    again = tensors.decode(tensors.encode(values))
    assert again == values
    assert [type(value.value) for value in again if isinstance(value, Scalar)] == [
        type(value.value) for value in values if isinstance(value, Scalar)
    ]


@given(files)
def test_payloads_are_aligned_and_equal_values_give_equal_bytes(values: list[Value]) -> None:
    data = tensors.encode(values)
    assert data == tensors.encode(tensors.decode(data))
    (size,) = struct.unpack("<I", data[4:8])
    entries = json.loads(data[8 : 8 + size])["values"]
    assert all(entry["offset"] % 64 == 0 for entry in entries if entry["kind"] == "tensor")


@given(st.lists(tensor_values(), min_size=1, max_size=3), st.data())
def test_a_file_that_is_cut_off_is_refused_and_never_read_short(values: list[Tensor], data: st.DataObject) -> None:
    whole = tensors.encode(values)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    try:
        assert tensors.decode(cut) == values  # only padding is missing
    except BadTensorFile as refused:
        assert refused.reason == "BAD_TENSOR_FILE"
    else:
        assert len(whole) - len(cut) < 64


@pytest.mark.remedy("BAD_TENSOR_FILE")
def test_a_payload_that_lacks_one_byte_is_refused_by_name(golden: Golden) -> None:
    whole = tensors.encode([Tensor("left", "float32", (16,), bytes(64))])
    with golden.refuses("BAD_TENSOR_FILE"):
        tensors.decode(whole[:-1])
    assert tensors.decode(whole)


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(data: bytes) -> None:
    for content in (data, tensors.MAGIC + data):
        with pytest.raises(BadTensorFile):
            tensors.decode(content if content[:4] != tensors.MAGIC or data else tensors.MAGIC)


def with_header(header: object, payload: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return tensors.MAGIC + struct.pack("<I", len(text)) + text + payload


ENTRY = {"name": "x", "kind": "tensor", "dtype": "float32", "shape": [2, 2], "dim_order": [0, 1], "offset": 0, "size_bytes": 16}


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [-2, -2]},
        {"shape": [4.0]},
        {"shape": [True, 4]},
        {"shape": ["2", 2]},
        {"shape": None},
        {"shape": [2, 3]},
        {"dim_order": [0, 0]},
        {"dim_order": [0.0, 1]},
        {"dim_order": [0]},
        {"dtype": "complex64"},
        {"dtype": None},
        {"offset": -4},
        {"offset": 4},
        {"offset": "0"},
        {"size_bytes": 15},
        {"size_bytes": 1 << 70},
        {"kind": "scalar", "value": "text"},
        {"kind": "scalar", "value": [1]},
    ],
)
def test_a_header_that_lies_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(BadTensorFile):
        tensors.decode(with_header({"values": [ENTRY | change]}, bytes(16)))


@pytest.mark.parametrize(
    "header", [[], {}, {"values": 3}, {"values": ["x"]}, {"values": {"a": 1}}, b"{", b"\xff", b"[" * 100_000, {"values": [{}]}]
)
def test_a_header_of_another_form_is_refused(header: object) -> None:
    with pytest.raises(BadTensorFile):
        tensors.decode(with_header(header))


@pytest.mark.parametrize("name", sorted(ITEM_BYTES))
def test_every_dtype_has_a_numpy_dtype_of_its_size_and_name(name: str) -> None:
    assert tensors.dtype_of(name).itemsize == ITEM_BYTES[name]
    array = np.zeros((2, 3), dtype=tensors.dtype_of(name))
    assert tensors.from_array("x", array).dtype == name


@given(st.permutations(range(3)))
def test_an_array_keeps_its_values_in_any_dim_order(order: list[int]) -> None:
    array = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    laid = tensors.from_array("x", array, order)
    (again,) = tensors.decode(tensors.encode([laid]))
    assert isinstance(again, Tensor)
    assert again.is_contiguous == (list(order) == [0, 1, 2])
    np.testing.assert_array_equal(tensors.to_array(again), array)
    assert again.data == array.transpose(order).tobytes()


def test_bfloat16_goes_through_bit_by_bit() -> None:
    array = np.array([1.0, -0.0, np.inf, np.nan, 3.140625], dtype=ml_dtypes.bfloat16)
    back = tensors.to_array(tensors.from_array("x", array))
    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes()


def test_a_scalar_tensor_has_no_dims() -> None:
    tensor = tensors.from_array("x", np.array(2.5, dtype=np.float64))
    assert (tensor.shape, tensor.dim_order) == ((), ())
    assert tensors.to_array(tensor) == 2.5


def test_arrays_of_another_byte_order_or_layout_are_laid_out_little_endian() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for same in (array.astype(">f4"), np.asfortranarray(array), np.repeat(array, 2, axis=1)[:, ::2]):
        assert tensors.from_array("x", same).data == array.tobytes()


def test_what_etfarm_does_not_carry_is_refused_by_name(golden: Golden) -> None:
    with golden.refuses("BAD_TENSOR_FILE"):
        tensors.from_array("x", np.zeros(2, dtype=np.complex64))


def test_a_file_of_too_many_dims_values_or_names_is_refused_before_they_are_looked_at(golden: Golden) -> None:
    rank = 60_000
    dims = ENTRY | {"shape": [(1 << 62) + 1] * rank, "dim_order": list(range(rank))}
    named = ENTRY | {"name": "n" * 1_001}
    many = [{"name": "s", "kind": "scalar", "value": 1}] * 10_001
    for values, match in (([dims], "at most 64 dims"), ([named], "at most 1000 characters"), (many, "at most 10000 values")):
        with pytest.raises(BadTensorFile, match=match):
            tensors.decode(with_header({"values": values}, bytes(16)))
    with golden.refuses("BAD_TENSOR_FILE"):
        tensors.decode(with_header(b" " * (2 << 20) + b"{}"))


def test_payloads_that_overlap_are_refused() -> None:
    with pytest.raises(BadTensorFile, match="overlap"):
        tensors.decode(with_header({"values": [ENTRY] * 2}, bytes(16)))


def test_a_header_is_read_without_its_payloads(golden: Golden, tmp_path: Path) -> None:
    values = [Tensor("x", "float32", (2, 3), bytes(24), (1, 0)), Scalar("k", 3), Tensor("y", "int8", (5,), bytes(5))]
    path = tmp_path / "x.ett"
    path.write_bytes(tensors.encode(values))
    read = tensors.read_header(path)
    assert [(v.name, v.dtype, v.shape, v.dim_order, v.size_bytes) for v in read if isinstance(v, tensors.Layout)] == [
        ("x", "float32", (2, 3), (1, 0), 24), ("y", "int8", (5,), (0,), 5),
    ]  # fmt: skip
    assert read[1] == Scalar("k", 3)
    sparse = tmp_path / "sparse.ett"
    entry = ENTRY | {"name": "z", "dtype": "uint8", "shape": [1 << 33], "dim_order": [0], "size_bytes": 1 << 33}
    sparse.write_bytes(with_header({"values": [entry]}))
    os.truncate(sparse, sparse.stat().st_size + (1 << 33))
    (layout,) = tensors.read_header(sparse)
    assert isinstance(layout, tensors.Layout) and layout.size_bytes == 1 << 33
    os.truncate(sparse, sparse.stat().st_size - 1)
    with golden.refuses("BAD_TENSOR_FILE"):
        tensors.read_header(sparse)
