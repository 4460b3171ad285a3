"""Rates of generated text are compared and gated as the times of their tokens."""

from __future__ import annotations

from typing import Any

import pytest

from etfarm.client.cli.commands import compare
from etfarm.client.formats import compared, compared_markdown, html
from etfarm.client.reports import Comparison
from etfarm.v1 import comparison_pb2
from etfarm.wire import comparison
from etfarm.wire.changes import sentence
from etfarm.wire.comparison.remedy import how_to_decide_rates
from etfarm.wire.comparison.sides import name
from etfarm.wire.messages import fill
from etfarm.wire.report_keys import project
from tests.support.comparisons import against
from tests.support.generated import accuracy_of_logits as accuracy
from tests.support.generated import flow_point, generated_report, point
from tests.support.rendering import printed

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
    near, far = generated_report("n", point(120.0)), generated_report("f", point(300.0))
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
        (point(30.0), "failed", ["SLOWER"]),
        (point(300.0), "passed", []),
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
    gate = against(generated_report("s", point(100.0)), generated_report("f", point(300.0)), "decode=5%")["gate"]
    assert gate["outcome"] == "passed" and [note["code"] for note in gate["notes"]] == ["FASTER"]


def test_a_program_is_not_slower_than_itself() -> None:
    again = generated_report("b", point(80.0, 80.0, 80.5, 79.5))
    gate = against(BASE, again, "decode=5%")["gate"]
    assert gate["outcome"] == "passed" and [note["code"] for note in gate["notes"]] == ["SAME_PROGRAM"]


def test_the_farm_sends_the_same_document() -> None:
    document = against(BASE, generated_report("k", point(120.0, 120.0, 121.0, 119.0)))
    assert comparison.document(fill(comparison_pb2.Comparison(), document)) == document
    typed = Comparison.from_dict(document)
    assert typed.pairs[0].generation is not None and typed.pairs[0].generation.points[0].decode is not None
    assert typed.to_dict() == document


def exact(cell: str, known: dict[str, Any] | None) -> dict[str, Any]:
    return generated_report(cell, point(100.0, 100.0, 100.5, 99.5), accuracy_of_logits=known)


def test_the_accuracy_of_logits_is_compared_with_the_first_common_reference() -> None:
    document = against(exact("b", accuracy()), exact("k", accuracy(0.90, 20.0, perplexity=12.1)))
    (pair,) = document["pairs"]
    changed = pair["generation"]["accuracy"]
    assert changed["base"]["reference"] == "program before quantization" and changed["candidate"]["first_difference"] == 5
    assert changed["sqnr_change_db"] == -10.0 and changed["top1_change"] == pytest.approx(-0.07)
    assert changed["top1_tolerance"] == pytest.approx(0.0218, abs=1e-4) and changed["top1_dropped"] is True
    assert changed["perplexity"]["ratio"] == pytest.approx(1.1)
    (note,) = document["notes"]
    assert note.startswith(
        "The candidate's most likely token is the reference's after 90.0 % of 1,000 tokens, the base's after 97.0 %"
    )
    facts = {fact.name: fact for fact in compared.facts(pair)}
    assert facts["SQNR of logits"].change == "-10.0 dB" and facts["top-1 agreement"].change == "-7.0 points (lower)"
    assert facts["perplexity"].change == "+10.0 %" and facts["first other token"].base == "5 of 16"
    for text in (
        compared_markdown.write(document),
        html.write({**_document(exact("k", accuracy(0.90, 20.0)))}, document).decode(),
    ):
        assert "top-1 agreement" in text and "-7.0 points" in text and "after 90.0 % of 1,000 tokens" in text
    assert "| 20.0 dB (-10.0 dB) |" in compared_markdown.write(document)
    assert comparison.document(fill(comparison_pb2.Comparison(), document)) == document
    typed = Comparison.from_dict(document)
    assert typed.to_dict() == document and typed.pairs[0].generation is not None
    assert typed.pairs[0].generation.accuracy is not None and typed.pairs[0].generation.accuracy.top1_dropped


def test_the_terminal_shows_language_models_without_a_latency() -> None:
    document = against(exact("b", accuracy()), exact("k", accuracy(0.90, 20.0)))
    shown = printed(*compare.rendered(document, top=5, width=160), width=160)
    assert "candidate / base  decode 1.000x [" in shown and "-7.0 points (lower)" in shown


def _document(*reports: dict[str, Any]) -> dict[str, Any]:
    return {"schema": "etfarm.report/1", "job": None, "reports": list(reports), "error": None}


@pytest.mark.parametrize(
    ("base", "candidate", "tokens", "dropped"),
    [
        (0.98, 0.97, 1000, False),
        (0.98, 0.94, 64, False),
        (0.98, 0.94, 1000, True),
        (1.0, 0.97, 16_384, True),
        (1.0, 0.981, 16_384, False),
        (0.9, 0.98, 1000, False),
    ],
)
def test_a_drop_of_the_agreement_must_be_more_than_chance(base: float, candidate: float, tokens: int, dropped: bool) -> None:
    document = against(exact("b", accuracy(base, tokens=tokens)), exact("k", accuracy(candidate, tokens=tokens)))
    assert document["pairs"][0]["generation"]["accuracy"]["top1_dropped"] is dropped
    assert any("most likely token" in note for note in document["notes"]) == dropped


def test_logits_after_other_tokens_are_not_compared() -> None:
    for other in (accuracy(0.5, tokens=500), accuracy(0.5, is_text=False, perplexity=None)):
        document = against(exact("b", accuracy()), exact("k", other), "top1=1%")
        changed = document["pairs"][0]["generation"]["accuracy"]
        assert changed["base"]["top1_agreement"] == 0.97 and changed["candidate"]["top1_agreement"] == 0.5
        assert (changed["top1_change"], changed["top1_dropped"], changed["perplexity"]) == (None, None, None)
        assert document["gate"]["outcome"] == "failed"


def test_an_accuracy_without_common_points_is_compared() -> None:
    base, candidate = exact("b", accuracy()), exact("k", accuracy(0.5))
    candidate["generation"]["points"] = []
    (pair,) = against(base, candidate)["pairs"]
    assert pair["generation"]["points"] == [] and pair["generation"]["accuracy"]["top1_dropped"]
    assert compared.answer(pair) == "no latency on both sides"


@pytest.mark.parametrize(
    ("gate", "known", "codes"),
    [
        ("accuracy=1dB", accuracy(sqnr_db=29.5), []),
        ("accuracy=1dB", accuracy(sqnr_db=28.0), ["LESS_ACCURATE"]),
        ("accuracy=1dB", None, ["NOT_MEASURED"]),
        ("top1=2%", accuracy(0.95), []),
        ("top1=2%", accuracy(0.94), ["LESS_ACCURATE"]),
        ("top1=2%", None, ["NOT_MEASURED"]),
        ("perplexity=5%", accuracy(perplexity=11.5), []),
        ("perplexity=5%", accuracy(perplexity=12.0), ["LESS_ACCURATE"]),
        ("perplexity=5%", accuracy(perplexity_tokens=3), ["NOT_MEASURED"]),
        ("perplexity=5%", accuracy(error={"message": "It failed.", "reason": "PROGRAM_FAILED"}), ["NOT_MEASURED"]),
    ],
)
def test_gates_limit_how_much_less_exact_a_language_model_may_be(gate: str, known: Any, codes: list[str]) -> None:
    judged = against(exact("b", accuracy()), exact("k", known), gate)["gate"]
    assert [reason["code"] for reason in judged["reasons"]] == codes, judged
    assert judged["outcome"] == ("failed" if codes else "passed")


def test_the_part_of_each_method_is_compared() -> None:
    (pair,) = against(generated_report("b", flow_point(100.0)), generated_report("k", flow_point(50.0)))["pairs"]
    encoder, decoder = pair["generation"]["points"][0]["parts"]
    assert (encoder["method"], encoder["prefill_ns"]["base"], encoder["decode_ns"]) == ("vision_encoder", 5e6, None)
    assert decoder["decode_ns"] == {"base": 9e6, "candidate": 9e6, "change": 0.0, "ratio": 1.0}
    facts = {fact.name.strip(): fact for fact in compared.facts(pair)}
    assert facts["vision_encoder, first token, prompt 8"].base == "5.00 ms"
    assert Comparison.from_dict(against(generated_report("b", flow_point(1.0)), generated_report("k", flow_point(2.0)))).passed


def with_image(cell: str, *points: dict[str, Any], digest: str | None, **changes: Any) -> dict[str, Any]:
    """Return a REPORT of a vision-language program that began each prompt with an image, or with a made-up one."""
    report = generated_report(cell, *points, **changes)
    (encoder,) = report["generation"]["model"]["flow"]["encoders"]
    encoder["inputs"] = {"digest": digest, "size_bytes": 100} if digest else None
    return report


def test_another_image_is_a_circumstance_of_its_own() -> None:
    same = {"compile": generated_report("b")["compile"]}
    base = with_image("b", flow_point(100.0), digest="8" * 64, **same)
    (pair,) = against(base, with_image("k", flow_point(100.0), digest="9" * 64, **same))["pairs"]
    assert [sentence(change) for change in pair["changes"]] == ["image 88888888 -> 99999999"]
    assert not pair["generation"]["same_program"]
    (pair,) = against(base, with_image("k", flow_point(100.0), digest=None, **same))["pairs"]
    assert [sentence(change) for change in pair["changes"]] == ["image 88888888 -> none"]
    (pair,) = against(base, with_image("k", flow_point(100.0), digest="8" * 64, **same))["pairs"]
    assert pair["changes"] == [] and pair["generation"]["same_program"]


def test_the_command_that_decides_asks_for_the_image() -> None:
    pair = {"latency": None, "size": None, "generation": {"points": [{"prompt_tokens": 8, "depth": 0}]}}
    report = with_image("b", flow_point(100.0), digest="8" * 64)
    assert "--inputs FILE.npz" in how_to_decide_rates({**pair, "base": project(name(report)), "candidate": project(name(report))})
    report = with_image("b", flow_point(100.0), digest=None)
    assert "--inputs" not in how_to_decide_rates({**pair, "base": project(name(report)), "candidate": project(name(report))})
