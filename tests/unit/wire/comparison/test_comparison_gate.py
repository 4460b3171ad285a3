"""Gates on a comparison: what passes, what does not, and why."""

from __future__ import annotations

from typing import Any

import pytest

from etfarm.wire.comparison import BadGate, Gate, Limit, Side, compare
from tests.support.comparisons import against, report, timed
from tests.support.golden import Golden


def codes(document: dict[str, Any]) -> list[str]:
    gate = document["gate"]
    assert gate["passed"] == (not gate["reasons"])
    return [reason["code"] for reason in gate["reasons"]]


def notes(document: dict[str, Any]) -> list[str]:
    return [note["code"] for note in document["gate"]["notes"]]


@pytest.mark.parametrize(
    ("text", "metric", "limit", "unit"),
    [
        ("3%", "latency", 3.0, "%"), (" 0.5 % ", "latency", 0.5, "%"), ("latency=10%", "latency", 10.0, "%"),
        ("SIZE=1%", "size", 1.0, "%"), ("memory = 5%", "memory", 5.0, "%"), ("accuracy=1dB", "accuracy", 1.0, "dB"),
        ("accuracy=0.25db", "accuracy", 0.25, "dB"),
    ],
)  # fmt: skip
def test_a_gate_is_a_limit_to_a_metric(text: str, metric: str, limit: float, unit: str) -> None:
    result = Limit.parse(text)
    assert (result.metric, result.limit, result.unit) == (metric, limit, unit)
    assert Limit.parse(result.text.replace(" ", "=", 1)) == result


@pytest.mark.parametrize(
    "text",
    ["", "3", "%", "-3%", "3%%", "1e3%", "nan%", "inf%", "٣%", "latency", "latency=", "latency=3dB", "accuracy=1%",
     "speed=3%", "3% size=1%",
     "1.03x", "99999999999%"],
)  # fmt: skip
def test_what_is_no_gate_is_answered_with_what_is(golden: Golden, text: str) -> None:
    with pytest.raises(BadGate) as refused:
        Limit.parse(text)
    golden.check(refused.value)


def test_a_metric_has_one_gate_and_options_of_gates_want_one(golden: Golden) -> None:
    with pytest.raises(BadGate) as refused:
        Gate.parse(["3%", "latency=4%"])
    golden.check(refused.value)
    with pytest.raises(BadGate) as refused:
        Gate.parse([], accept_invalid=True)
    golden.check(refused.value)
    assert Gate.parse([]) is None
    assert compare(Side([report()]), Side([report()]))["gate"] is None


@pytest.mark.parametrize(
    ("ends", "strict", "reasons", "noted"),
    [
        ((1.02, 1.029), False, [], []),  # slower, and within the limit
        ((0.9, 0.95), False, [], []),
        ((1.02, 1.04), False, [], ["INCONCLUSIVE"]),
        ((1.02, 1.04), True, ["INCONCLUSIVE"], []),
        ((1.031, 1.04), False, ["SLOWER"], []),
        ((1.031, 1.04), True, ["SLOWER"], []),
    ],
)
def test_a_latency_fails_where_all_of_its_interval_is_beyond_the_limit(
    ends: tuple[float, float], strict: bool, reasons: list[str], noted: list[str]
) -> None:
    exact = timed("b", 1000, (1000, 1000))
    other = timed("k", 1000 * sum(ends) / 2, [1000 * end for end in ends])
    document = against(exact, other, "3%", strict=strict)
    assert (codes(document), notes(document)) == (reasons, noted)


def test_without_an_interval_the_ratio_decides() -> None:
    assert codes(against(timed("b", 1000), timed("k", 1029), "3%")) == []
    assert notes(against(timed("b", 1000), timed("k", 1029), "3%")) == ["INCONCLUSIVE"]
    assert codes(against(timed("b", 1000), timed("k", 1029), "3%", strict=True)) == ["INCONCLUSIVE"]
    assert codes(against(timed("b", 1000), timed("k", 1031), "3%")) == ["SLOWER"]


def test_why_a_gate_is_shut_is_a_sentence_that_stays_true() -> None:
    document = against(timed("b", 1000, (1000, 1000)), timed("k", 1310, (1289, 1340)), "10%")
    (reason,) = document["gate"]["reasons"]
    assert reason["message"] == "at least 28 % slower, 1.310x [1.289, 1.340]; 10 % is allowed"


@pytest.mark.parametrize("status", ["INVALID", "NOT_BENCHMARKABLE"])
@pytest.mark.parametrize("side", [0, 1])
def test_a_latency_that_cannot_be_trusted_is_no_evidence_unless_it_is_accepted(status: str, side: int) -> None:
    verdict = {"status": f"VERDICT_STATUS_{status}", "reasons": [{"code": "CPU_STARVED", "message": "So."}]}
    pair = [report("b"), report("k")]
    pair[side] = report("bk"[side], verdict=verdict)
    document = against(*pair, "3%", "size=1%", "accuracy=1dB", "memory=1%")
    (reason,) = document["gate"]["reasons"]
    assert (reason["metric"], reason["code"]) == ("latency", "NO_VALID_EVIDENCE")
    assert reason["message"].startswith("no valid evidence: ") and "CPU_STARVED" in reason["message"]
    assert codes(against(*pair, "3%", accept_invalid=True)) == []
    assert codes(against(*pair, "size=1%")) == []


def test_latencies_of_devices_of_different_kinds_are_no_evidence_unless_accepted() -> None:
    same_kind = report("k", device={"id": "d2", "arch": "aarch64", "soc": "cortex-a76"})
    other_kind = report("k", device={"id": "d3", "arch": "aarch64", "soc": "cortex-a55"})
    assert codes(against(report("b"), same_kind, "3%", "size=1%")) == []
    assert codes(against(report("b"), other_kind, "3%", "size=1%")) == ["NO_VALID_EVIDENCE"]
    assert codes(against(report("b"), other_kind, "3%", accept_invalid=True)) == []


def test_what_was_never_measured_is_not_accepted() -> None:
    compiled = report("k", latency=None, verdict=None)
    assert codes(against(report("b"), compiled, "3%", accept_invalid=True)) == ["NO_VALID_EVIDENCE"]
    nothing = report("k", memory=None, accuracy=[], compile=None)
    assert codes(against(report("b"), nothing, "size=1%", "memory=1%")) == ["NOT_MEASURED"] * 2
    assert codes(against(nothing, report("b"), "accuracy=1dB")) == ["NOT_MEASURED"]


def test_sizes_and_memory_are_exact() -> None:
    def sized(cell: str, size: int, peak: int, planned: int) -> dict[str, Any]:
        return report(
            cell, compile={"program": {"size_bytes": size}}, memory={"peak_rss_bytes": peak, "planned_bytes": [planned]}
        )

    base = sized("b", 1000, 1000, 1000)
    assert codes(against(base, sized("k", 1010, 1050, 1050), "size=1%", "memory=5%")) == []
    assert codes(against(base, sized("k", 1011, 1050, 1051), "size=1%", "memory=5%")) == ["LARGER", "MORE_MEMORY"]
    assert codes(against(base, sized("k", 1000, 1051, 900), "size=0%", "memory=5%")) == ["MORE_MEMORY"]


def outputs(**sqnr: Any) -> list[dict[str, Any]]:
    return [{"output": name, **(value if isinstance(value, dict) else {"sqnr_db": value})} for name, value in sqnr.items()]


@pytest.mark.parametrize(
    ("before", "after", "reasons"),
    [
        (outputs(y=40.0), outputs(y=39.0), []),
        (outputs(y=40.0), outputs(y=38.9), ["LESS_ACCURATE"]),
        (outputs(y=300.0), outputs(y=120.0), []),  # two fp32 kernels
        (outputs(y=120.0), outputs(y=98.9), ["LESS_ACCURATE"]),
        (outputs(y=40.0), outputs(y={"nan_count": 3}), ["LESS_ACCURATE"]),
        (outputs(y=40.0, z=40.0), outputs(y=40.0), ["LESS_ACCURATE"]),
        (outputs(relu_19=40.0), outputs(relu_25=40.0), []),  # the same output behind six more layers
        (outputs(y=50.0, relu_19=40.0), outputs(relu_25=30.0, y=50.0), ["LESS_ACCURATE"]),
        (outputs(y={"equal": True}), outputs(y={"equal": True}), []),  # all zeros have no SQNR
        (outputs(y={"equal": True}), outputs(y={"equal": False}), ["LESS_ACCURATE"]),
        (outputs(y=40.0, z=50.0), outputs(y=40.0, z=10.0), ["LESS_ACCURATE"]),
    ],
)
def test_accuracy_is_gated_by_output(before: list[Any], after: list[Any], reasons: list[str]) -> None:
    assert codes(against(report("b", accuracy=before), report("k", accuracy=after), "accuracy=1dB")) == reasons


def test_accuracies_against_different_references_are_not_measured() -> None:
    base = report("b", accuracy=[{"output": "y", "sqnr_db": 35.0, "reference": "program before quantization"}])
    candidate = report("k", accuracy=[{"output": "y", "sqnr_db": 58.0, "reference": "quantized program"}])
    (reason,) = against(base, candidate, "accuracy=1dB")["gate"]["reasons"]
    assert reason["code"] == "NOT_MEASURED"
    assert reason["message"] == (
        "accuracy is not known for both sides against one reference: the base is compared with the program before quantization, "
        "the candidate with the quantized program"
    )


def test_a_report_that_the_candidate_lacks_shuts_every_gate() -> None:
    base = [report("b1"), report("b2", recipe="portable")]
    document = against(base, [report("k1"), report("k2", recipe="other")], "size=1%")
    assert codes(document) == ["MISSING"]
    assert "resnet8 · portable" in document["gate"]["reasons"][0]["message"]
    assert codes(against([report("k1")], base, "size=1%")) == [], "what is only in the candidate is no loss"


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED"])
def test_a_failed_cell_of_the_candidate_shuts_every_gate(state: str) -> None:
    assert codes(against(report("b"), report("k", state=state), "size=1%", "accuracy=1dB")) == ["FAILED"]


def test_a_failed_cell_that_only_the_candidate_has_shuts_every_gate() -> None:
    error = {"fault": "FAULT_USER", "reason": "PROGRAM_CRASHED", "message": "It was killed."}
    failed = report("k2", recipe="portable", state="FAILED", error=error)
    document = against(report("b"), [report("k1"), failed], "size=1%")
    (reason,) = document["gate"]["reasons"]
    assert (reason["pair"], reason["code"], document["gate"]["passed"]) == (None, "FAILED", False)
    assert reason["message"].startswith("resnet8 · portable") and "PROGRAM_CRASHED" in reason["message"]


def test_a_job_that_is_not_done_shuts_every_gate() -> None:
    live = {"id": "j1", "state": "RUNNING"}
    document = compare(Side([report("b")]), Side([report("k")], live), Gate.parse(["size=1%"]))
    assert codes(document) == ["JOB_LIVE"]
    assert "job j1, the candidate, is still RUNNING" in document["gate"]["reasons"][0]["message"]
    assert document["notes"][0] == "Job j1 is not done: cells that are still live are left out."


def test_reasons_name_their_report_where_there_are_several() -> None:
    base = [timed("b1", 1000, (999, 1001)), timed("b2", 1000, (999, 1001), recipe="portable")]
    worse = [timed("k1", 1000, (999, 1001)), timed("k2", 2000, (1990, 2010), recipe="portable")]
    (reason,) = against(base, worse, "3%")["gate"]["reasons"]
    assert reason["pair"] == 1 and reason["message"].startswith("resnet8 · portable · pi5-a (cortex-a76, 2 threads): at least")
