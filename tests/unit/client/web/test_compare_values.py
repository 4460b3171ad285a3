"""Comparisons as the page shows them."""

from __future__ import annotations

import math

import pytest

from etfarm.client.reports import Comparison
from etfarm.client.web.compare_values import Scale, describe_pairs, fit_scale
from tests.support.comparison_examples import EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_comparisons_of_each_kind_are_shown(name: str) -> None:
    pairs = describe_pairs(Comparison.from_dict(EXAMPLES[name]).to_dict())
    scale = fit_scale(pairs)
    for pair in pairs:
        assert pair.heading and pair.answer
        assert all(0 <= row.base_part <= 100 and 0 <= row.candidate_part <= 100 for row in pair.operators)
        if pair.ends:
            low, high = (scale.part(end) for end in pair.ends)
            assert 0 <= low <= scale.part(pair.ratio or 1.0) <= high <= 100


def test_a_ratio_and_its_inverse_are_as_far_from_the_middle() -> None:
    scale = Scale(math.log(2))
    assert (scale.part(1.0), scale.part(2.0), scale.part(0.5), scale.part(10.0)) == (50, 100, 0, 100)


def test_no_ratio_has_an_axis_too() -> None:
    assert fit_scale([]).part(1.0) == 50
