"""Rates of generated text are compared and gated as the times of their tokens."""

from __future__ import annotations

from typing import Any

import pytest

from etfarm.client.formats import compared
from etfarm.client.reports import Comparison
from etfarm.wire.comparison import from_message, to_message
from tests.support.comparisons import against
from tests.support.generated import generated_report, point

BASE = generated_report("b", point(100.0, 100.0, 100.5, 99.5))


def test_a_rate_has_a_ratio_with_the_spread_between_processes() -> None:
    document = against(BASE, generated_report("k", point(120.0, 120.0, 121.0, 119.0)))
    (pair,) = document["pairs"]
    (changed,) = pair["generation"]["points"]
    decode, ttft = changed["decode"], changed["ttft"]
    assert (changed["prompt_tokens"], changed["depth"], changed["base_verdict"]) == (8, 0, "VALID")
    assert decode["ratio"] == pytest.approx(1.2) and decode["outcome"] == "faster" and decode["spread_observed"]
    assert decode["ratio_ci95"][0] < 1.2 < decode["ratio_ci95"][1]
    assert ttft["ratio"] == pytest.approx(1 / 1.2) and ttft["outcome"] == "faster"
    assert pair["latency"] is None and document["notes"] == []
    assert compared.answer(pair).startswith("decode 1.200x [") and "faster" in compared.answer(pair)
    assert compared.main_change(pair) == ("1.200x", "faster")
    assert any(fact.name == "decode, prompt 8" and fact.change == "+20.0 %" for fact in compared.facts(pair))


def test_single_processes_decide_nothing_but_the_obvious() -> None:
    single = generated_report("s", point(100.0))
    near, far = generated_report("n", point(120.0)), generated_report("f", point(200.0))
    (pair,) = against(single, near)["pairs"]
    assert pair["generation"]["points"][0]["decode"]["outcome"] == "inconclusive"
    document = against(single, near, "decode=3%")
    command = " --generate N --prompt-tokens 8 --depth 0 --repeat 5"
    for text in (document["notes"][0], document["gate"]["reasons"][0]["message"]):
        assert "Measure each with `etfarm bench " in text and command in text and "--method" not in text
    (pair,) = against(single, far)["pairs"]
    assert pair["generation"]["points"][0]["decode"]["outcome"] == "faster"


def test_only_common_points_are_compared() -> None:
    other = generated_report("k", point(100.0, depth=16), point(50.0, depth=32))
    assert against(BASE, other)["pairs"][0]["generation"] is None
    both = generated_report("k", point(90.0), point(50.0, depth=32))
    assert [each["depth"] for each in against(BASE, both)["pairs"][0]["generation"]["points"]] == [0]


@pytest.mark.parametrize(
    ("candidate", "outcome", "codes"),
    [
        (point(100.0, 100.0, 100.5, 99.5), "passed", []),
        (point(90.0, 90.0, 90.5, 89.5), "failed", ["SLOWER"]),
        (point(120.0, 120.0, 121.0, 119.0), "passed", []),
        (point(90.0), "inconclusive", ["NO_SPREAD"]),
        (point(50.0), "failed", ["SLOWER"]),
        (point(200.0), "passed", []),
        (point(90.0, 90.0, 90.5, 89.5, status="INVALID"), "inconclusive", ["NO_VALID_EVIDENCE"]),
        (point(90.0, depth=5), "inconclusive", ["NO_VALID_EVIDENCE"]),
    ],
)
@pytest.mark.parametrize("metric", ["decode", "prefill", "ttft"])
def test_a_gate_limits_how_much_slower_tokens_may_be(
    candidate: dict[str, Any], outcome: str, codes: list[str], metric: str
) -> None:
    gate = against(BASE, generated_report("k", candidate), f"{metric}=5%")["gate"]
    assert (gate["outcome"], [reason["code"] for reason in gate["reasons"]]) == (outcome, codes), gate


@pytest.mark.parametrize("options", [["decode=5%"], ["ttft=5%"]])
def test_a_point_that_failed_on_one_side_is_not_passed_over(options: list[str]) -> None:
    rates = (100.0, 100.0, 100.5, 99.5)
    failed = {**point(*rates, depth=16, status="INVALID"), **dict.fromkeys(("ttft_ns", "decode_tokens_per_s")), "runs": []}
    base = generated_report("b", point(*rates), point(*rates, depth=16))
    candidate = generated_report("k", point(*rates), failed)
    gate = against(base, candidate, *options, accept_invalid=True)["gate"]
    (reason,) = gate["reasons"]
    assert gate["outcome"] == "inconclusive" and reason["code"] == "NO_VALID_EVIDENCE"
    assert "depth 16: no valid evidence: the candidate did not measure it" in reason["message"]


def test_decode_of_other_lengths_is_not_compared() -> None:
    longer = generated_report("k", point(50.0, 50.0, 50.5, 49.5))
    longer["generation"]["generated_tokens"] = 1024
    document = against(BASE, longer, "decode=5%")
    (changed,) = document["pairs"][0]["generation"]["points"]
    assert changed["decode"] is None and changed["ttft"]["outcome"] == "slower"
    (note,) = document["notes"]
    assert note.startswith("Decode is not compared: the base generated 16 tokens, the candidate 1,024.")
    assert document["gate"]["outcome"] == "inconclusive"


def test_an_obviously_faster_single_process_passes_with_a_note() -> None:
    gate = against(generated_report("s", point(100.0)), generated_report("f", point(200.0)), "decode=5%")["gate"]
    assert gate["outcome"] == "passed" and [note["code"] for note in gate["notes"]] == ["FASTER"]


def test_a_program_is_not_slower_than_itself() -> None:
    again = generated_report("b", point(80.0, 80.0, 80.5, 79.5))
    gate = against(BASE, again, "decode=5%")["gate"]
    assert gate["outcome"] == "passed" and [note["code"] for note in gate["notes"]] == ["SAME_PROGRAM"]


def test_the_farm_sends_the_same_document() -> None:
    document = against(BASE, generated_report("k", point(120.0, 120.0, 121.0, 119.0)))
    assert from_message(to_message(document)) == document
    typed = Comparison.from_dict(document)
    assert typed.pairs[0].generation is not None and typed.pairs[0].generation.points[0].decode is not None
    assert typed.to_dict() == document
