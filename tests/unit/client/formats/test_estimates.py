"""An estimate and its interval are shown with equally many decimals, as many as the interval's width justifies."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from etfarm.client.formats import answers, units


@pytest.mark.parametrize(
    ("value", "low", "high", "shown"),
    [
        (1.84e6, 1.82e6, 1.86e6, "1.84 ms [1.82, 1.86]"),
        (160_700, 160_300, 161_100, "160.7 µs [160.3, 161.1]"),
        (52_213, 52_188, 52_237, "52.21 µs [52.19, 52.24]"),
        (1_234_567, 1_234_560, 1_234_570, "1.23457 ms [1.23456, 1.23457]"),
        (1.84e6, 1.5e6, 2.3e6, "1.84 ms [1.50, 2.30]"),
        (184, 184, 184, "184 ns [184, 184]"),
        (999_950, 999_000, 1_001_000, "1000 µs [999, 1001]"),
        (0, 0, 0, "0.00 ns [0.00, 0.00]"),
    ],
)
def test_the_width_decides_how_many_digits_are_shown(value: float, low: float, high: float, shown: str) -> None:
    assert " ".join(units.estimate(value, low, high)) == shown


@pytest.mark.parametrize(
    ("value", "ends", "shown"),
    [
        (-1.52e6, (-3.6e6, 0.56e6), "-1.52 ms [-3.60, +0.56]"),
        (1.5e3, (-1e6, 1.003e6), "+0.00 ms [-1.00, +1.00]"),
        (220.0, (219.8, 220.2), "+220.0 ns [+219.8, +220.2]"),
        (-1.52e6, None, "-1.52 ms"),
        (220.0, (), "+220 ns"),
    ],
)
def test_a_difference_is_shown_with_signs_and_its_interval(value: float, ends: tuple[float, float] | None, shown: str) -> None:
    assert units.difference(value, ends) == shown


@given(st.floats(1, 1e11), st.floats(1e-7, 1), st.floats(0, 1))
def test_no_digit_is_hidden_that_the_interval_resolves(value: float, width: float, place: float) -> None:
    low = value - value * width * place
    high = low + value * width
    assume(0 < low < high)
    text, interval = units.estimate(value, low, high)
    number, unit = text.split()
    ends = re.findall(r"[0-9.]+", interval)
    decimals = {len(part.partition(".")[2]) for part in (number, *ends)}
    assert len(decimals) == 1, "equally many decimals"
    scale = {"s": 1e9, "ms": 1e6, "µs": 1e3, "ns": 1.0}[unit]
    step = scale * 10.0 ** -decimals.pop()
    assert abs(float(number) * scale - value) <= step * 0.51
    assert step <= (high - low) / 2 * 1.01 or len(number.replace(".", "")) >= 6


def test_a_median_without_an_interval_has_three_digits() -> None:
    assert answers.median({"p50_ns": 160_700, "p50_ci95_ns": None}) == ("161 µs", "")
    assert answers.median({"p50_ns": None, "p50_ci95_ns": None}) == ("", "")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1.84, "1.84"), (9.994, "9.99"), (9.996, "10.0"), (99.96, "100"), (0.184, "0.18"), (0.0, "0"), (1840, "1840")],
)
def test_a_number_that_rounds_up_to_another_digit_has_no_digit_more(value: float, shown: str) -> None:
    assert units.significant(value) == shown
