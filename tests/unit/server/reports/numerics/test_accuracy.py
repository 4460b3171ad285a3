"""Outputs against references: the numbers, and where there is no number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.server.reports.numerics import accuracy
from etfarm.wire import tensors
from etfarm.wire.tensors import Scalar, Tensor
from tests.support.golden import Golden

FLOATS = st.floats(-1e6, 1e6, allow_subnormal=False)


def _tensor(values: Any, dtype: str = "float32") -> Tensor:
    return tensors.from_array("out", np.array(values).astype(tensors.dtype_of(dtype)))


@given(st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=50))
def test_the_numbers_are_those_of_their_definitions(pairs: list[tuple[float, float]]) -> None:
    r, a = np.array(pairs).T
    result = accuracy.difference(r, a)
    assert result.equal == bool((r == a).all())
    assert result.max_abs_error == np.abs(r - a).max()
    assert result.mean_abs_error == pytest.approx(np.abs(r - a).mean())
    signal, noise = float((r * r).sum()), float(((r - a) ** 2).sum())
    if signal > 1e-200 and noise > 1e-200:
        assert result.sqnr_db == pytest.approx(min(300.0, 10 * math.log10(signal / noise)), abs=1e-6)
    if signal > 1e-200 and float((a * a).sum()) > 1e-200:
        assert result.cosine == pytest.approx(float(np.dot(r, a)) / math.sqrt(signal) / math.sqrt(float((a * a).sum())), abs=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_an_exact_match_has_the_cap(dtype: str) -> None:
    value = _tensor([[1, 0, 1], [1, 1, 0]], dtype)
    result = accuracy.compare("out", value, value)
    assert result == accuracy.Difference(True, 0.0, 0.0, pytest.approx(1.0), 300.0, 0.0, 1.0, 0, 0)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "bool"])
def test_an_exact_match_of_integers_is_equal_everywhere(dtype: str) -> None:
    value = _tensor([[1, 0, 1], [1, 1, 0]], dtype)
    result = accuracy.compare("out", value, value)
    assert result == accuracy.Difference(True, 0.0, 0.0, pytest.approx(1.0), None, None, None, 0, 0, 1.0)


def test_a_known_ratio_is_in_decibels() -> None:
    result = accuracy.compare("out", _tensor([1.0, -1.0]), _tensor([1.125, -1.125]))
    assert result.sqnr_db == pytest.approx(20 * math.log10(8))
    assert (result.equal, result.max_abs_error, result.mean_abs_error) == (False, 0.125, 0.125)


def test_a_difference_below_float64_is_capped() -> None:
    assert accuracy.sqnr_db(np.array([1e200, 1.0]), np.array([1e200, 1.0 + 1e-15])) == 300.0


@pytest.mark.parametrize("masked", [math.nan, math.inf, -math.inf])
def test_what_both_mask_is_left_out_and_what_one_has_alone_has_no_numbers(masked: float) -> None:
    nan_count = int(math.isnan(masked))
    result = accuracy.compare("out", _tensor([3.0, masked, 4.0]), _tensor([3.0, masked, 3.0]))
    assert (result.equal, result.max_abs_error, result.sqnr_db) == (False, 1.0, pytest.approx(10 * math.log10(25)))
    assert result.relative_error == pytest.approx(0.2) and result.cosine == pytest.approx(21 / math.sqrt(25 * 18))
    assert (result.nan_count, result.reference_nan_count) == (nan_count, nan_count)
    appeared = accuracy.compare("out", _tensor([1.0, 2.0]), _tensor([1.0, masked]))
    assert (appeared.equal, appeared.nan_count, appeared.reference_nan_count) == (False, nan_count, 0)
    assert (appeared.max_abs_error, appeared.mean_abs_error, appeared.sqnr_db, appeared.relative_error) == (None,) * 4


def test_the_relative_error_is_that_of_the_norms() -> None:
    result = accuracy.compare("out", _tensor([3.0, 4.0]), _tensor([3.0, 3.5]))
    assert result.relative_error == pytest.approx(0.1)
    assert result.sqnr_db == pytest.approx(-20 * math.log10(result.relative_error))


@pytest.mark.parametrize(
    ("scores", "others", "agreement"),
    [
        ([1.0, 5.0, 2.0], [0.0, 9.0, 8.0], 1.0),
        ([1.0, 5.0, 2.0], [9.0, 5.0, 2.0], 0.0),
        ([[1.0, 2.0], [2.0, 1.0]], [[1.0, 2.0], [1.0, 2.0]], None),  # a pair of numbers
        (
            [[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [5.0, 4.0, 1.0]],
            [[1.0, 2.0, 0.0], [1.0, 2.0, 0.0], [0.0, 3.0, 1.0], [5.0, 4.0, 1.0]],
            0.75,
        ),
        ([[1.0], [2.0]], [[1.0], [2.0]], None),
        ([[[1.0, 2.0]]], [[[1.0, 2.0]]], None),
    ],
)
def test_top_1_agreement_is_of_rows_of_scores(scores: Any, others: Any, agreement: float | None) -> None:
    assert accuracy.compare("out", _tensor(scores), _tensor(others)).top1_agreement == agreement


def test_an_all_zero_reference_has_no_ratio_even_if_matched() -> None:
    result = accuracy.compare("out", _tensor([0.0, 0.0]), _tensor([0.0, 0.0]))
    assert (result.equal, result.max_abs_error, result.cosine, result.sqnr_db) == (True, 0.0, None, None)


def test_large_integers_that_float64_cannot_tell_apart_are_not_equal() -> None:
    result = accuracy.compare("out", _tensor([2**60], "int64"), _tensor([2**60 + 1], "int64"))
    assert (result.equal, result.equal_share) == (False, 0.0)


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool"])
def test_integers_agree_or_not_and_have_no_ratio(dtype: str) -> None:
    result = accuracy.compare("out", _tensor([1, 0, 1, 1], dtype), _tensor([1, 0, 0, 1], dtype))
    assert (result.equal, result.equal_share, result.sqnr_db, result.relative_error) == (False, 0.75, None, None)
    equal = accuracy.compare("out", _tensor([1, 0], dtype), _tensor([1, 0], dtype))
    assert (equal.equal, equal.equal_share, equal.sqnr_db) == (True, 1.0, None)
    assert accuracy.compare("out", _tensor([1.0]), _tensor([2.0])).equal_share is None


def test_an_empty_output_is_equal_and_has_no_numbers() -> None:
    value = _tensor(np.zeros((0, 3)))
    assert accuracy.compare("out", value, value) == accuracy.Difference(
        True, None, None, None, None, nan_count=0, reference_nan_count=0
    )


def test_the_physical_order_does_not_matter() -> None:
    array = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    last = tensors.from_array("out", array, (0, 2, 3, 1))
    assert accuracy.compare("out", tensors.from_array("out", array), last).equal


def test_scalars_compare_with_each_other_and_with_tensors() -> None:
    assert accuracy.compare("out", Scalar("", 3), Scalar("", 3)).equal_share == 1.0
    assert accuracy.compare("out", Scalar("", 3.0), _tensor(3.0)).equal
    assert accuracy.compare("out", Scalar("", None), Scalar("other", None)).equal


@pytest.mark.parametrize("pair", [(_tensor([1.0]), _tensor([[1.0]])), (Scalar("", None), _tensor([1.0]))])
def test_outputs_of_other_shapes_are_refused(pair: tuple[Any, Any]) -> None:
    with pytest.raises(accuracy.OutputsDoNotMatch, match="scores"):
        accuracy.compare("scores", *pair)


@pytest.mark.remedy("OUTPUTS_DO_NOT_MATCH")
def test_another_number_of_outputs_is_refused(golden: Golden) -> None:
    with golden.refuses("OUTPUTS_DO_NOT_MATCH"):
        accuracy.pair([Scalar("", 1), Scalar("", 2)], [Scalar("", 1)])
    assert accuracy.pair([Scalar("", 1)], [Scalar("", 1)]) is not None


def test_the_sqnr_of_samples_sums_signal_and_noise() -> None:
    references = [_tensor([[3, 0, 4]]), _tensor([[30, 0, 40]])]
    outputs = [_tensor([[3, 1, 4]]), _tensor([[30, 0, 43]])]
    together = accuracy.compare_samples("y", list(zip(references, outputs, strict=True)))
    assert together.samples == 2
    assert together.difference.sqnr_db == pytest.approx(10 * np.log10((25 + 2500) / (1 + 9)))
    assert (together.sqnr_db_min, together.sqnr_db_max) == pytest.approx((10 * np.log10(25), 10 * np.log10(2500 / 9)))
    assert together.difference.max_abs_error == 3 and together.difference.top1_agreement == 1
    alone = accuracy.compare_samples("y", [(references[0], outputs[0])])
    assert alone.difference == accuracy.compare("y", references[0], outputs[0])
    assert alone.samples == 1 and alone.sqnr_db_min == alone.sqnr_db_max == alone.difference.sqnr_db
