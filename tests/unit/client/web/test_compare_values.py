"""Comparisons as the page shows them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from etfarm.client.reports import Comparison
from etfarm.client.web.compare_values import Scale, describe_pairs, fit_scale

RECORDED = Path(__file__).parents[3] / "support" / "recorded_comparisons"


def recorded(name: str) -> dict[str, Any]:
    """Return a recorded comparison, with the keys that were added since."""
    document = json.loads((RECORDED / f"{name}.json").read_text())
    return Comparison.from_dict(document.get("comparison", document)).to_dict()


@pytest.mark.parametrize("file", sorted(RECORDED.glob("*.json")), ids=lambda file: file.stem)
def test_every_recorded_comparison_is_shown(file: Path) -> None:
    pairs = describe_pairs(recorded(file.stem))
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
