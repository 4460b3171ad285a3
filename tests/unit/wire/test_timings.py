"""Statistics that several roles share."""

from __future__ import annotations

import math

import pytest

from etfarm.wire import timings


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (math.inf, timings.NORMAL_QUANTILE)]
)
def test_students_quantile_is_within_1_percent_of_tables(freedom: float, quantile: float) -> None:
    assert timings.student_quantile(freedom) == pytest.approx(quantile, rel=0.01)
