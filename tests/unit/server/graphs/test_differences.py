"""Differences of a program's outputs: integers that a model does not repeat itself, and the ratio that a warning names."""

from __future__ import annotations

import numpy as np
import pytest

from etfarm.server.graphs import differences
from etfarm.server.graphs.differences import Difference
from etfarm.wire.tensors import Tensor


def of_integers(differing: int, count: int = 100) -> Difference:
    """Return the difference of integers of which some differ."""
    expected = np.arange(count, dtype=np.int64)
    actual = expected + (expected < differing)
    first, second = (Tensor("y", "int64", (count,), values.tobytes()) for values in (expected, actual))
    return differences.difference("y", first, second)


@pytest.mark.parametrize(
    ("by_chance", "differing", "is_chance"), [(1, 10, True), (1, 11, False), (1, 100, False), (50, 100, True)]
)
def test_integers_differ_by_chance_only_if_about_as_many_do_in_a_second_run(
    by_chance: int, differing: int, is_chance: bool
) -> None:
    assert differences.is_chance(of_integers(differing), of_integers(by_chance)) is is_chance


def test_a_class_that_the_model_does_not_repeat_differs_by_chance() -> None:
    assert differences.is_chance(of_integers(1, count=1), of_integers(1, count=1))
    assert not differences.is_chance(of_integers(1, count=1), None)


def of_floats(expected: list[float], actual: list[float]) -> Difference:
    first, second = (Tensor("y", "float32", (len(values),), np.float32(values).tobytes()) for values in (expected, actual))
    return differences.difference("y", first, second)


def test_a_warning_names_the_ratio_that_the_report_shows() -> None:
    output = of_floats([1.0, 1.0, 1.0, -1.0], [0.0, 0.0, 0.0, 0.0])
    assert output.report["sqnr_db"] == 0.0 and output.judged_db == pytest.approx(-1.2494, abs=1e-3)
    assert differences.find_problem(output, quantized=True) == "y has 0.0 dB, less than the 10 dB that quantization should keep"


def test_a_ratio_that_only_a_bias_raises_is_named_beside_the_one_that_decides() -> None:
    output = of_floats([10.0, 11.0, 10.0, 9.0], [10.0, 10.0, 10.0, 10.0])
    assert differences.find_problem(output, quantized=True) == (
        "y has 23.0 dB, but only 0.0 dB without the mean of its values, less than the 10 dB that quantization should keep"
    )


def test_equal_infinities_are_compared_without_a_mean() -> None:
    assert not differences.find_problem(of_floats([np.inf, 1.0], [np.inf, 1.0]), quantized=True)
