"""Comparisons of interleaved measurements as people read them."""

from __future__ import annotations

from typing import Any

import pytest

from etfarm.client.cli.views import render
from tests.support.rendering import printed, report_document


def _compared(ratio: float, ends: list[float], *, base: dict[str, Any] | None = None, **changes: Any) -> str:
    interleaved = {
        "base_cell": "c0",
        "ratio": ratio,
        "ratio_ci95": ends,
        "rounds": 24,
        "process_pairs": 8,
        "ratios": [ratio] * 24,
    }
    documents = [report_document(cell="c0", **(base or {})), report_document(cell="c1", interleaved=interleaved, **changes)]
    shown = printed(render.reports(documents, width=140), width=140)
    (line,) = [line.strip() for line in shown.splitlines() if "process pairs" in line]
    return line


OTHER = {"model": {"name": "tiny", "digest": "2" * 64}}


@pytest.mark.parametrize(
    ("ratio", "ends", "expected"),
    [
        (0.912, [0.905, 0.919], "tiny / resnet8  0.912x [0.905, 0.919]  8.8 % faster  24 rounds, 8 process pairs  (VALID)"),
        (1.5, [1.4, 1.6], "tiny / resnet8  1.500x [1.400, 1.600]  50 % slower  24 rounds, 8 process pairs  (VALID)"),
        (1.01, [0.99, 1.02], "tiny / resnet8  1.010x [0.990, 1.020]  no difference found  24 rounds, 8 process pairs  (VALID)"),
        (1.01, [], "tiny / resnet8  1.010x  too few rounds to tell  24 rounds, 8 process pairs  (VALID)"),
    ],
)
def test_programs_that_took_turns_are_compared_in_one_line(ratio: float, ends: list[float], expected: str) -> None:
    assert _compared(ratio, ends, **OTHER) == expected


def test_what_is_compared_is_told_apart_by_model_recipe_or_place() -> None:
    assert _compared(1, [], recipe="portable").startswith("portable / xnnpack_fp32  ")
    assert _compared(1, []).startswith("resnet8 #1 / resnet8 #0  ")


def test_a_comparison_is_as_valid_as_both_of_its_measurements() -> None:
    invalid = {"verdict": {"status": "INVALID"}}
    assert _compared(1, [], base=invalid).endswith("(INVALID)")
    assert _compared(1, [], **invalid).endswith("(INVALID)")
    assert _compared(1, [], verdict={"status": "NOT_BENCHMARKABLE"}).endswith("(NOT BENCHMARKABLE)")
