"""Answers to `score` of a runner that a hostile program controls."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from etfarm.device_agents.runners.answers import BadAnswer
from etfarm.device_agents.runners.score import ScoreRequest, read_scored

REQUEST = ScoreRequest("forward", "forward", [1, 2, 3], 8, (0, 2), 10**9)
EVENT: dict[str, Any] = {"tokens": 3, "rows": 2, "vocabulary": 2, "duration_ns": 5}
PROBABILITIES = [-1.5, -0.5, 0.0]


def payload_of(probabilities: list[float], values: int) -> bytes:
    return array("f", probabilities).tobytes() + array("i", [0] * len(probabilities)).tobytes() + bytes(4 * values)


def test_an_answer_that_was_cut_short_has_the_rows_of_its_tokens() -> None:
    scored = read_scored({**EVENT, "tokens": 2, "rows": 1}, payload_of(PROBABILITIES[:2], 2), REQUEST)
    assert (scored.tokens, scored.rows, scored.vocabulary, scored.duration_ns) == (2, 1, 2, 5)
    assert REQUEST.max_answer_bytes(2) == 3 * 8 + 2 * 2 * 4


@pytest.mark.parametrize(
    ("changes", "payload"),
    [
        ({"tokens": 0, "rows": 0}, b""),
        ({"tokens": 4}, payload_of([*PROBABILITIES, 0.0], 4)),
        ({"rows": 1}, payload_of(PROBABILITIES, 2)),
        ({"rows": 3}, payload_of(PROBABILITIES, 6)),
        ({"vocabulary": 0}, payload_of(PROBABILITIES, 0)),
        ({"vocabulary": 1 << 25}, payload_of(PROBABILITIES, 4)),
        ({"duration_ns": -1}, payload_of(PROBABILITIES, 4)),
        ({}, payload_of(PROBABILITIES, 3)),
        ({}, payload_of([float("nan"), -0.5, 0.0], 4)),
        ({}, payload_of([0.5, -0.5, 0.0], 4)),
    ],
)
def test_impossible_answers_are_refused(changes: dict[str, Any], payload: bytes) -> None:
    with pytest.raises(BadAnswer):
        read_scored({**EVENT, **changes}, payload, REQUEST)
