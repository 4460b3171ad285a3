"""Answers to `generate` of a runner that a hostile program controls."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from etfarm.device_agents.runners.answers import BadAnswer
from etfarm.device_agents.runners.generation import COUNTERS, GenerateRequest, read_generated

REQUEST = GenerateRequest("forward", "forward", [1, 2, 3], 0, 2, 3, 1, 10**9)
ROW = [900, 1_000, 100, 5, 6]
EVENT: dict[str, Any] = {
    "repetitions": 1, "stop_reason": "ENOUGH", "first_run_ns": None, "warmup_ns": 1, "duration_ns": 2, "wall_ns": 3,
    "peak_rss_bytes": None, **dict.fromkeys(COUNTERS, 7),
}  # fmt: skip


def test_a_row_has_the_time_of_the_prompt_then_those_of_the_tokens_then_the_tokens() -> None:
    generated = read_generated(EVENT, array("q", ROW).tobytes(), REQUEST)
    assert (generated.prefill_ns[0], list(generated.token_ns[0]), list(generated.tokens[0])) == (900, [1_000, 100], [5, 6])
    assert (generated.warmup_ns, generated.duration_ns, generated.wall_ns, generated.cpu_ns) == (1, 2, 3, 7)


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({"repetitions": 0}, []),
        ({"repetitions": 4}, ROW * 4),
        ({"repetitions": 2}, ROW),
        ({"warmup_ns": 1 << 60}, ROW),
        ({"duration_ns": -1}, ROW),
        ({"wall_ns": 1.5}, ROW),
        ({"minor_faults": 1 << 62}, ROW),
        ({}, [-1, *ROW[1:]]),
        ({}, [*ROW[:4], -1]),
    ],
)
def test_impossible_answers_are_refused(changes: dict[str, Any], row: list[int]) -> None:
    with pytest.raises(BadAnswer):
        read_generated({**EVENT, **changes}, array("q", row).tobytes(), REQUEST)
