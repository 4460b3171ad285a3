"""Differences of a program's outputs: integers that a model does not repeat itself, and the ratio that a warning names."""

from __future__ import annotations

import numpy as np
import pytest

from etfarm.server.graphs import differences
from etfarm.server.graphs.differences import Difference
from etfarm.wire.tensors import Scalar, Tensor


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
    assert output.report.sqnr_db == 0.0 and output.judged_db == pytest.approx(-1.2494, abs=1e-3)
    assert differences.find_problem(output, quantized=True) == "y has 0.0 dB, less than the 10 dB that quantization should keep"


def test_a_ratio_that_only_a_bias_raises_is_named_beside_the_one_that_decides() -> None:
    output = of_floats([10.0, 11.0, 10.0, 9.0], [10.0, 10.0, 10.0, 10.0])
    assert differences.find_problem(output, quantized=True) == (
        "y has 23.0 dB, but only 0.0 dB without the mean of its values, less than the 10 dB that quantization should keep"
    )


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(
    ("expected", "actual", "problem"),
    [
        ([INF, 1.0], [INF, 1.0], ""), ([NAN, 1.0], [NAN, 1.0], ""), ([-INF, -INF], [-INF, -INF], ""),
        ([-INF, 1e5, 2e5], [-INF, 1e5 + 0.03, 2e5], ""),
        ([1.0, 2.0], [1.0, NAN], "y has NaN in 1 of 2 elements where the model gives numbers"),
        ([1.0, -INF, 3.0], [INF, -INF, NAN], "y has NaN in 1 and infinity in 1 of 3 elements where the model gives numbers"),
        ([1.0, -INF, 3.0], [1.0, -1e4, 3.0], "y has a number in 1 of 3 elements where the model gives NaN or infinity"),
        ([1.0, -INF, 3.0], [1.0, INF, 3.0], "y has infinity in 1 of 3 elements where the model gives others"),
    ],
)  # fmt: skip
def test_nan_and_infinity_are_right_only_where_the_model_has_them(
    expected: list[float], actual: list[float], problem: str, quantized: bool
) -> None:
    assert differences.find_problem(of_floats(expected, actual), quantized=quantized) == problem


def test_masked_outputs_are_judged_by_the_others() -> None:
    low = of_floats([1.0, -1.0, -INF, 2.0], [0.0, 1.0, -INF, 0.0])
    assert "y has -1.8 dB, less than" in differences.find_problem(low, quantized=True)
    assert "y has -1.8 dB, where a float32" in differences.find_problem(low, quantized=False)


@pytest.mark.parametrize(
    ("expected", "actual", "problem"),
    [
        ([0.0, 0.0, 0.0], [50.0, -50.0, 0.0], "y is up to 50 where the model gives zeros"), ([0.0, 0.0], [0.05, 0.0], ""),
        ([5.0, 5.0, 5.0], [50.0, -50.0, 0.0], "y has -18.3 dB, less than the 10 dB that quantization should keep"),
        ([5.0, 5.0, 5.0], [5.3, 4.8, 5.0], ""),
    ],
)  # fmt: skip
def test_a_quantizer_is_judged_by_zeros_and_constants_too(expected: list[float], actual: list[float], problem: str) -> None:
    assert differences.find_problem(of_floats(expected, actual), quantized=True) == problem


@pytest.mark.parametrize(
    ("first", "problem"),
    [
        (199, ""),  # another class, as of nearly equal scores
        (10**9, "y has 1 of 200 integers that rounding does not explain, off by up to 1e+09"),
        (-1, "y has 1 of 200 integers that rounding does not explain, off by up to 1"),
    ],
)
def test_an_integer_that_no_choice_between_equal_scores_gives_is_wrong(first: int, problem: str) -> None:
    expected = np.arange(200, dtype=np.int64)
    actual = np.r_[first, expected[1:]]
    both = [Tensor("y", "int64", (200,), values.astype(np.int64).tobytes()) for values in (expected, actual)]
    output = differences.difference("y", *both)
    assert differences.find_problem(output, quantized=False) == problem
    assert not differences.find_problem(output, quantized=True)


def test_large_integers_may_differ_by_the_rounding_of_floats() -> None:
    expected = np.arange(1, 201, dtype=np.int64) * 10**8
    both = [Tensor("y", "int64", (200,), values.tobytes()) for values in (expected, expected + (expected == 10**8))]
    assert not differences.find_problem(differences.difference("y", *both), quantized=False)


@pytest.mark.parametrize(("dtype", "other"), [("float32", "float64"), ("int64", "int32")])
def test_another_dtype_than_the_models_is_named(dtype: str, other: str) -> None:
    first, second = (Tensor("y", each, (2,), np.array([1, 2], each).tobytes()) for each in (dtype, other))
    problem = differences.find_problem(differences.difference("y", first, second), quantized=False)
    assert problem == f"y has the dtype {other} where the model gives {dtype}"


def test_samples_are_judged_together() -> None:
    samples = [(Tensor("y", "float32", (), np.float32([a]).tobytes()), Scalar("y", b)) for a, b in ((3, 3), (4, 3))]
    output = differences.difference_of_samples("y", samples)
    assert output.report.sqnr_db == pytest.approx(10 * np.log10(25))


def of_channels(expected: np.ndarray, actual: np.ndarray) -> Difference:
    sides = (Tensor("y", "float32", values.shape, np.float32(values).tobytes()) for values in (expected, actual))
    return differences.difference("y", *sides)


OFFSETS = np.array([1013.0, 290.0, 60.0])


@pytest.mark.parametrize("axis", [1, 2])
def test_offsets_of_channels_do_not_hide_that_their_values_are_lost(axis: int) -> None:
    varying = 0.3 * np.random.default_rng(0).standard_normal((1, 12, 3)).cumsum(1)
    expected, step = varying + OFFSETS, 1013 / 255
    actual = np.round(expected / step) * step
    if axis == 1:
        expected, actual = expected.swapaxes(1, 2), actual.swapaxes(1, 2)
    output = of_channels(expected, actual)
    assert output.report.sqnr_db > 40 and output.judged_db is not None and output.judged_db > 40
    assert "dB without the mean of each channel: the program loses how its values vary" in differences.find_problem(
        output, quantized=True
    )
    assert differences.find_problem(output, quantized=False) == ""


@pytest.mark.parametrize("shape", [(1, 12, 3), (8, 10), (1, 4, 1, 1), (1, 3, 6, 6)])
def test_channels_that_vary_or_have_few_values_are_near(shape: tuple[int, ...]) -> None:
    expected = 10 * np.random.default_rng(0).standard_normal(shape) + 5
    assert differences.find_problem(of_channels(expected, expected + 0.5), quantized=True) == ""
    assert differences.find_problem(of_channels(np.full(shape, 7.0), np.full(shape, 7.1)), quantized=True) == ""


@pytest.mark.parametrize("shape", [(0, 3, 4, 2), (2, 0, 4), (2, 3, 0)])
def test_an_output_without_elements_is_equal(shape: tuple[int, ...]) -> None:
    output = of_channels(np.zeros(shape), np.zeros(shape))
    assert output.report.equal and differences.find_problem(output, quantized=True) == ""
    # Other samples of it count.
    one, two = (lambda n, v=v: Tensor("y", "float32", (n, 3, 4), np.full((n, 3, 4), v, np.float32).tobytes()) for v in (1, 2))
    assert differences.find_problem(differences.difference_of_samples("y", [(one(n), two(n)) for n in (0, 2)]), quantized=False)
