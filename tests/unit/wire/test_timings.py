"""Statistics that several roles share."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.wire import timings


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (math.inf, timings.NORMAL_QUANTILE)]
)
def test_students_quantile_is_within_1_percent_of_tables(freedom: float, quantile: float) -> None:
    assert timings.student_quantile(freedom) == pytest.approx(quantile, rel=0.01)


@given(st.lists(st.integers(0, 1 << 52), min_size=1))
def test_the_median_is_that_of_the_standard_library(samples: list[int]) -> None:
    assert timings.median(samples) == statistics.median(samples)


@pytest.mark.parametrize(("freedom", "quantile"), [(2, 9.925), (4, 4.604), (8, 3.355), (math.inf, 2.575829)])
def test_the_quantile_of_a_wider_interval(freedom: float, quantile: float) -> None:
    assert timings.student_quantile(freedom, 2.575829) == pytest.approx(quantile, rel=0.05)
