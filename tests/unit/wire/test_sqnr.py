"""The signal to quantization noise ratio: its definition at the edges, and its one rounding."""

from __future__ import annotations

import math

import numpy as np
import pytest

from etfarm.wire.sqnr import EXACT_DB, decibels, energies, sqnr_db


@pytest.mark.parametrize(
    ("value_db", "text"),
    [(41.23, "41.2 dB"), (0.04, "0.0 dB"), (-0.04, "0.0 dB"), (-0.05, "-0.1 dB"), (-0.4, "-0.4 dB"), (300.0, "300.0 dB")],
)
def test_a_ratio_that_rounds_to_zero_has_no_sign(value_db: float, text: str) -> None:
    assert decibels(value_db) == text


def test_the_ratio_is_of_squares_and_that_of_a_part_is_of_the_same_noise() -> None:
    reference, actual = np.array([3.0, 4.0, 3.0, 2.0]), np.array([3.0, 4.0, 3.0, 3.0])
    assert sqnr_db(reference, actual) == pytest.approx(10 * math.log10(38))
    assert sqnr_db(reference, actual, reference - reference.mean()) == pytest.approx(10 * math.log10(2))


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_the_ratio_does_not_depend_on_the_scale(scale: float) -> None:
    assert sqnr_db(np.array([3.0, 4.0]) * scale, np.array([3.0, 3.0]) * scale) == pytest.approx(10 * math.log10(25))


@pytest.mark.parametrize(
    ("reference", "actual", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], EXACT_DB), ([0.0, 0.0], [0.0, 0.0], None), ([math.nan], [math.nan], None),
        ([1.0], [math.nan], None), ([math.inf, 1.0], [math.inf, 1.0], EXACT_DB), ([math.inf], [1.0], None), ([], [], None),
        ([math.inf], [math.inf], None), ([1.0, math.inf], [1.0, -math.inf], None), ([math.nan, 1.0], [math.nan, 1.0], EXACT_DB),
    ],
)  # fmt: skip
def test_equal_arrays_are_exact_and_a_ratio_without_a_signal_is_unknown(
    reference: list[float], actual: list[float], expected: float | None
) -> None:
    assert sqnr_db(np.array(reference), np.array(actual)) == expected


@pytest.mark.parametrize("masked", [math.inf, -math.inf, math.nan])
def test_elements_that_both_mask_are_neither_signal_nor_noise(masked: float) -> None:
    reference, actual = np.array([3.0, masked, 4.0]), np.array([3.0, masked, 3.0])
    assert sqnr_db(reference, actual) == pytest.approx(10 * math.log10(25))
    assert sqnr_db(reference, actual, np.array([0.5, masked, 0.5])) == pytest.approx(10 * math.log10(0.5))
    assert energies(reference, np.array([3.0, 1.0, 3.0])) is None
