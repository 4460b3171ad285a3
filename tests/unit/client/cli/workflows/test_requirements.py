"""What `bench` requires: worse is 3, inconclusive is 5, and each sentence names the report and the numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from etfarm.client.cli.options import duration_of, share_of
from etfarm.client.cli.views import render
from etfarm.client.cli.workflows.requirements import INCONCLUSIVE, WORSE, Requirements, exit_code
from etfarm.client.formats import html, markdown
from etfarm.wire.report import loads
from tests.support.documents import completed, report
from tests.support.golden import Golden
from tests.support.refusals import refuses
from tests.support.rendering import printed


def measured(low: float, high: float, source: str = "REPEATS", **changes: Any) -> dict[str, Any]:
    spread = {"source": source, "runs": 5, "relative_stddev": 0.01, "p50_ci95_ns": [low, high]}
    return completed(report(run_spread=spread, latency={"p50_ns": 2e6, "p50_ci95_ns": [1.99e6, 2.01e6]}, **changes))


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ((1.9e6, 2.1e6), 0),
        ((1.9e6, 3e6), 0),
        ((1.9e6, 3.1e6), INCONCLUSIVE),
        ((3e6, 3.2e6), INCONCLUSIVE),
        ((3.1e6, 3.2e6), WORSE),
    ],
)
@pytest.mark.parametrize("source", ["REPEATS", "HISTORY"])
def test_a_median_is_held_against_the_interval_between_runs(
    golden: Golden, ends: tuple[float, float], code: int, source: str
) -> None:
    shortfalls = Requirements(max_p50_ns=3e6).shortfalls([measured(*ends, source)])
    assert exit_code(shortfalls) == code
    if shortfalls and source == "REPEATS":
        golden.check(shortfalls[0].message)


@pytest.mark.parametrize("required", [Requirements(valid=True), Requirements(max_p50_ns=1e9), Requirements(True, None, 1e9)])
@pytest.mark.parametrize("status", ["INVALID", "NOT_BENCHMARKABLE", None])
def test_without_a_valid_verdict_the_latency_is_inconclusive(required: Requirements, status: str | None) -> None:
    verdict = {"status": status, "reasons": [{"code": "DRIFT"}]} if status else None
    (shortfall,) = required.shortfalls([measured(1.0, 2.0, verdict=verdict)])
    assert shortfall.exit_code == INCONCLUSIVE and (status or "not judged").replace("_", " ") in shortfall.message
    assert ("another device" in shortfall.message) == (status == "NOT_BENCHMARKABLE") != ("Measure again" in shortfall.message)


def test_an_invalid_latency_that_was_measured_again_is_not_to_be_measured_again_only() -> None:
    def message(status: str, retries: int) -> str:
        verdict = {"status": status, "reasons": [{"code": "DRIFT"}]}
        (shortfall,) = Requirements(valid=True, retries=retries).shortfalls([measured(1.0, 2.0, verdict=verdict)])
        return shortfall.message

    assert message("INVALID", 0).endswith(". Measure again, as --retry-invalid does.")
    tries = "--retry-invalid measured it again, 2 times at most: follow the remedies of its report."
    assert message("INVALID", 2).endswith(f"INVALID (DRIFT). {tries}")
    assert message("NOT_BENCHMARKABLE", 2).endswith(". Measure on another device, with --device.")


def test_a_report_of_an_earlier_release_is_held_against_its_own_interval() -> None:
    old = completed(report(latency={"p50_ns": 2e6, "p50_ci95_ns": [1.99e6, 2.01e6]}))
    assert not Requirements(max_p50_ns=2.02e6).shortfalls([old])
    assert exit_code(Requirements(max_p50_ns=2e6).shortfalls([old])) == INCONCLUSIVE
    assert exit_code(Requirements(max_p50_ns=1.9e6).shortfalls([old])) == WORSE
    unknown = completed(report(latency={"p50_ns": 2e6}))
    assert exit_code(Requirements(max_p50_ns=9e6).shortfalls([unknown])) == INCONCLUSIVE


@pytest.mark.parametrize(
    ("source", "limit_ns", "code"),
    [
        ("PRIOR", 1.5e6, INCONCLUSIVE), ("PRIOR", 0.9e6, INCONCLUSIVE), ("PRIOR", 0.8e6, WORSE), ("PRIOR", 2.3e6, 0),
        ("HISTORY", 1.5e6, WORSE), ("REPEATS", 1.5e6, WORSE), ("REPEATS", 2.1e6, INCONCLUSIVE),
    ],
)  # fmt: skip
def test_a_single_run_with_an_assumed_variation_fails_a_limit_by_far_only(source: str, limit_ns: float, code: int) -> None:
    spread = {"source": source, "runs": 0, "relative_stddev": 0.05, "p50_ci95_ns": [1.8e6, 2.2e6]}
    single = completed(report(latency={"p50_ns": 2e6, "p50_ci95_ns": [1.99e6, 2.01e6]}, run_spread=spread))
    shortfalls = Requirements(max_p50_ns=limit_ns).shortfalls([single])
    assert exit_code(shortfalls) == code
    if shortfalls and code == INCONCLUSIVE:
        assert "--repeat 5 or more" in shortfalls[0].message


@pytest.mark.parametrize(
    ("accuracy", "code"),
    [
        ([{"output": "y", "sqnr_db": 30.0}], 0),
        ([{"output": "y", "sqnr_db": 29.9, "reference": "quantized program"}], WORSE),
        ([{"output": "y", "equal": True}], 0),
        ([{"output": "y"}], INCONCLUSIVE),
        ([{"output": "y", "sqnr_db": 50.0}, {"output": "z", "sqnr_db": 20.0}], WORSE),
        ([{"output": "y", "sqnr_db": 50.0, "nan_count": 2}], WORSE),
        ([], INCONCLUSIVE),
    ],
)
def test_every_output_reaches_the_sqnr(accuracy: list[dict[str, Any]], code: int) -> None:
    assert exit_code(Requirements(min_sqnr_db=30.0).shortfalls([completed(report(accuracy=accuracy))])) == code


@pytest.mark.parametrize(("top1", "code"), [([0.97, 0.99], 0), ([0.97, 0.94], WORSE), ([None], INCONCLUSIVE), ([], INCONCLUSIVE)])
@pytest.mark.parametrize("of_logits", [True, False])
def test_the_largest_value_is_the_references_often_enough(top1: list[float | None], code: int, of_logits: bool) -> None:
    rows = [{"reference": "quantized program", "tokens": 64, "top1_agreement": each} for each in top1]
    changes: dict[str, Any] = {"accuracy": [{"output": "y", "top1_agreement": each} for each in top1]}
    if of_logits:
        changes = {"generation": {"accuracy": {"tokens": 64, "references": rows}}}
    shortfalls = Requirements(min_top1=0.95).shortfalls([completed(report(**changes))])
    assert exit_code(shortfalls) == code and all(each.requirement == "--min-top1" for each in shortfalls)
    if code == WORSE:
        assert "94.0 %, below --min-top1 95.0 %" in shortfalls[0].message


@pytest.mark.parametrize(
    ("text", "expected"), [("95%", 0.95), ("95 %", 0.95), ("0.95", 0.95), ("1", 1.0), ("0", 0.0), (None, None)]
)
def test_a_share_is_a_fraction_or_a_percentage(text: str | None, expected: float | None) -> None:
    assert share_of("--min-top1", text) == expected


@pytest.mark.parametrize("text", ["95", "101%", "-1%", "nan", "", "1e-1", "9" * 80])
def test_what_is_no_share_is_refused(text: str) -> None:
    with refuses("USAGE", match="is not a share"):
        share_of("--min-top1", text)


def unquantized(method: str = "forward") -> dict[str, Any]:
    warning = {"code": "QUANTIZED_NOTHING", "message": f"Recipe r found nothing to quantize in {method}: it is plain fp32."}
    return completed(report(compile={"warnings": [warning]}))


def test_a_recipe_that_quantizes_nothing_is_worse_under_strict_quantization() -> None:
    (shortfall,) = Requirements(strict_quantization=True).shortfalls([unquantized()])
    assert shortfall.exit_code == WORSE and "nothing to quantize in forward" in shortfall.message
    assert not Requirements(strict_quantization=True).shortfalls([completed(report())])
    assert Requirements(strict_quantization=True) and not Requirements(valid=True, min_sqnr_db=None).strict_quantization


def test_every_format_says_loudly_that_a_program_is_not_quantized() -> None:
    job = {"id": "j", "state": "SUCCEEDED", "submitted_at": "2026-01-02T03:04:05Z"}
    for method, is_said in (("forward", True), ("other", False)):
        written = {"schema": "etfarm.report/1", "job": job, "reports": [unquantized(method)], "error": None}
        document = loads(json.dumps(written))
        shown = printed(render.reports(document["reports"], width=140), width=140)
        assert ("NOT QUANTIZED  Recipe r found nothing" in shown) == is_said and f"nothing to quantize in {method}" in shown
        text = markdown.write(document).decode()
        assert ("⚠️ **not quantized**" in text) == is_said and f"nothing to quantize in {method}" in text
        page = html.write(document).decode()
        assert (">not quantized</" in page) == is_said and f"nothing to quantize in {method}" in page


def test_worse_wins_over_inconclusive_and_the_document_has_all_reasons() -> None:
    required = Requirements(min_sqnr_db=100.0, max_p50_ns=2e6)
    shortfalls = required.shortfalls([measured(1.9e6, 2.1e6), completed(report(id="r2", state="FAILED", latency=None))])
    assert exit_code(shortfalls) == WORSE
    written = required.json(shortfalls)
    assert (written["valid"], written["min_sqnr_db"], written["max_p50_ns"], written["passed"]) == (False, 100.0, 2e6, False)
    assert [(each["report"], each["requirement"], each["outcome"]) for each in written["reasons"]] == [
        ("r1", "--max-p50", "inconclusive"),
        ("r1", "--min-sqnr", "worse"),
    ]
    assert not Requirements() and required.json([])["passed"]


@pytest.mark.parametrize(
    ("text", "expected_ns"), [("5ms", 5e6), ("1.5 s", 1.5e9), ("250us", 250e3), ("250µs", 250e3), ("80ns", 80.0), (None, None)]
)
def test_a_duration_has_a_unit(text: str | None, expected_ns: float | None) -> None:
    assert duration_of("--max-p50", text) == expected_ns


@pytest.mark.parametrize("text", ["5", "ms", "-5ms", "0ms", "5min", "nan s", "1e3ms", ""])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with refuses("USAGE", match="is not a duration"):
        duration_of("--max-p50", text)
