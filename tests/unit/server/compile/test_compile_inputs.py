"""Inputs that do not fit are refused before a device sees them, and the sentence says which and how."""

from __future__ import annotations

import pytest

from etfarm.server.compile.inputs import InputMismatch, check_inputs
from etfarm.v1.common_pb2 import VALUE_KIND_INT, VALUE_KIND_TENSOR
from etfarm.v1.compile_pb2 import DimRange, MethodFacts, ValueSpec
from etfarm.wire.messages import to_scalar
from etfarm.wire.tensors import Scalar, Tensor, Value
from tests.support.golden import Golden

DIMS = [DimRange(min=1, max=4), DimRange(min=2, max=2)]
FACTS = MethodFacts(
    inputs=[
        ValueSpec(name="x", kind=VALUE_KIND_TENSOR, dtype="float32", dims=DIMS, dim_order=[0, 1]),
        ValueSpec(kind=VALUE_KIND_INT, value=to_scalar(3)),
    ]
)


def tensor(*shape: int, dtype: str = "float32", item: int = 4, order: tuple[int, ...] = ()) -> Tensor:
    size = item
    for dim in shape:
        size *= dim
    return Tensor("anything", dtype, shape, bytes(size), order)


@pytest.mark.parametrize("batch", [1, 4])
def test_what_fits_passes(batch: int) -> None:
    assert check_inputs("forward", FACTS, [tensor(batch, 2), Scalar("", 3)]) is None  # type: ignore[func-returns-value]


def test_orders_that_lay_the_same_bytes_are_one() -> None:
    assert check_inputs("forward", FACTS, [tensor(1, 2, order=(1, 0)), Scalar("", 3)]) is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([tensor(1, 2)], ["forward takes 2 inputs (x, 1), got 1. Give one value for each, in this order."]),
        ([], ["forward takes 2 inputs (x, 1), got none."]),
        ([tensor(1, 2)] * 3, ["forward takes 2 inputs (x, 1), got 3."]),
        ([tensor(5, 2), Scalar("", 3)], ["'x'", "[1..4, 2]", "[5, 2]"]),
        ([tensor(2), Scalar("", 3)], ["'x'", "shape", "[2]"]),
        ([tensor(1, 2, dtype="float64", item=8), Scalar("", 3)], ["'x'", "float64", "float32", "astype"]),
        ([tensor(2, 2, order=(1, 0)), Scalar("", 3)], ["'x'", "dim order", "[1, 0]"]),
        ([Scalar("", 1.0), Scalar("", 3)], ["'x'", "kind", "tensor"]),
        ([tensor(1, 2), Scalar("", True)], ["'1'", "kind", "int"]),
        ([tensor(1, 2), Scalar("", 4)], ["'1'", "takes 3", "same value"]),
        ([tensor(1, 2), tensor(1, 2)], ["'1'", "kind"]),
    ],
)
def test_what_does_not_fit_is_named(values: list[Value], words: list[str]) -> None:
    with pytest.raises(InputMismatch) as caught:
        check_inputs("forward", FACTS, values)
    assert caught.value.reason == "INPUT_MISMATCH"
    for word in words:
        assert word in str(caught.value)


def test_an_integer_that_no_message_can_hold_is_not_compared() -> None:
    facts = MethodFacts(inputs=[ValueSpec(kind=VALUE_KIND_INT, value=to_scalar(1 << 70))])
    assert check_inputs("forward", facts, [Scalar("", 1 << 70)]) is None  # type: ignore[func-returns-value]


def test_a_method_that_takes_none_is_given_none(golden: Golden) -> None:
    none = MethodFacts()
    assert check_inputs("reset", none, []) is None  # type: ignore[func-returns-value]
    with pytest.raises(InputMismatch) as caught:
        check_inputs("reset", none, [tensor(1)])
    golden.check(caught.value)
    assert (caught.value.metadata["what"], caught.value.metadata["got"]) == ("count", "1")
