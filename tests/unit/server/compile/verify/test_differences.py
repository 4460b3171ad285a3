"""Differences of integers that a model does not repeat itself."""

from __future__ import annotations

import numpy as np
import pytest

from etfarm.server.compile.verify import differences
from etfarm.server.compile.verify.differences import Difference
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
