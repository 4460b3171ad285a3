"""How far one tensor is from another: the numbers, and where there are none."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.server.reports.numerics.deviation import BINS, deviation, histogram, summary

FLOATS = st.floats(-1e6, 1e6, allow_subnormal=False)
PAIRS = st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=40)


@given(PAIRS)
def test_the_numbers_are_those_of_their_definitions(pairs: list[tuple[float, float]]) -> None:
    e, a = np.array(pairs).T
    result = deviation(e, a)
    assert result.max_abs_error == np.abs(e - a).max() and result.same_kind and not result.has_nan
    assert result.l1 == pytest.approx(np.abs(e - a).sum())
    assert result.mse == pytest.approx(np.square(e - a).mean(), rel=1e-9, abs=1e-300)
    signal, noise = float((e * e).sum()), float(((e - a) ** 2).sum())
    if signal > 1e-200 and noise > 1e-200:
        assert result.snr_db == pytest.approx(min(300.0, 10 * math.log10(signal / noise)), abs=1e-6)


@given(PAIRS)
def test_a_histogram_counts_every_element_once_on_each_side(pairs: list[tuple[float, float]]) -> None:
    e, a = np.array(pairs).T
    result = histogram(e, a)
    assert result is not None
    assert (len(result.expected), len(result.actual)) == (BINS, BINS)
    assert sum(result.expected) == sum(result.actual) == len(pairs)
    assert result.low <= min(e.min(), a.min()) and max(e.max(), a.max()) <= result.high


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int64", "float16", "float32", "float64"])
def test_equal_tensors_of_any_dtype_are_exact(dtype: str) -> None:
    value = np.array([[0, 1], [1, 1]]).astype(dtype)
    result = deviation(value, value)
    assert (result.snr_db, result.mse, result.l1, result.max_abs_error, result.level_db) == (300, 0, 0, 0, 300)


def test_only_what_is_finite_on_both_sides_counts() -> None:
    result = deviation(np.array([1.0, math.nan, math.inf, 4.0]), np.array([1.0, math.nan, math.inf, 5.0]))
    assert (result.max_abs_error, result.same_kind, result.has_nan) == (1.0, True, True)
    lost = deviation(np.array([1.0, math.nan]), np.array([1.0, 2.0]))
    assert (lost.max_abs_error, lost.same_kind, lost.level_db) == (0.0, False, -300)


def test_something_where_nothing_should_be_is_as_bad_as_can_be() -> None:
    zero = np.zeros(3)
    assert deviation(zero, zero).level_db == 300
    assert deviation(zero, zero).snr_db is None
    assert deviation(zero, np.array([0.0, 0.0, 1.0])).level_db == -300


def test_numbers_that_overflow_their_squares_still_have_a_ratio() -> None:
    result = deviation(np.array([1e200, 1e200]), np.array([1.1e200, 0.9e200]))
    assert result.snr_db == pytest.approx(20) and result.mse is None


def test_a_summary_is_of_the_finite_elements_and_counts_the_others() -> None:
    result = summary(np.array([[1.0, 3.0], [math.nan, -math.inf]]), "float16")
    assert (result.min, result.max, result.mean, result.stddev) == (1, 3, 2, 1)
    assert (result.nan_count, result.infinite_count, result.dtype, list(result.shape)) == (1, 1, "float16", [2, 2])
    empty = summary(np.array([math.nan]), "float32")
    assert not empty.HasField("min") and not empty.HasField("mean")


def test_values_that_are_all_the_same_have_a_histogram() -> None:
    result = histogram(np.full(4, 1e20), np.full(4, 1e20))
    assert result is not None and result.low < 1e20 < result.high and sum(result.expected) == 4
    assert histogram(np.array([math.nan]), np.array([1.0])) is None
