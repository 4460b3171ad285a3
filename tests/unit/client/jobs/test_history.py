"""A history's trends: what is compared with what, what is said to have changed, and how it looks."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from etfarm.client.cli.commands import history as cli
from etfarm.client.jobs.history import HistoryEntry, Series, document, trends
from etfarm.client.models import Report
from etfarm.v1 import common_pb2, report_pb2
from etfarm.wire.report import dumps, report_json
from tests.support.documents import completed
from tests.support.generated import generated_report, point

START = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)


def report(p50_ns: float | None = 1000.0, verdict: str = "VALID", **changed: Any) -> dict[str, Any]:
    """Return a REPORT of a network on a board, as the contract's projection has it."""
    created = report_pb2.Report(
        id="r", cell="c", recipe="xnnpack_fp32", method="forward", threads=4, state=common_pb2.CELL_STATE_SUCCEEDED
    )
    created.model.CopyFrom(report_pb2.ReportModel(name="net", digest="a" * 64))
    created.device.CopyFrom(report_pb2.ReportDevice(id="board", name="pi5-a"))
    created.runner.kind = common_pb2.RUNNER_KIND_NATIVE
    compiled = created.compile.compilation
    compiled.program.digest, compiled.program.pte.size_bytes = "d" * 64, 2048
    compiled.toolchain.torch = "2.13.0"
    created.accuracy.add(output="logits", sqnr_db=300, reference=report_pb2.REFERENCE_EAGER)
    created.accuracy.add(output="logits", sqnr_db=20, reference=report_pb2.REFERENCE_QUANTIZED)
    created.verdict.status = report_pb2.VerdictStatus.Value(f"VERDICT_STATUS_{verdict}")
    if verdict == "INVALID":
        created.verdict.reasons.add(code="CPU_STARVED", message="It had no cpu.")
    if p50_ns is not None:
        created.latency.p50_ns = p50_ns
        created.latency.p50_ci95_ns.extend([0.99 * p50_ns, 1.01 * p50_ns])
    result = report_json(created)
    for path, value in changed.items():
        *route, key = path.split("__")
        target = result
        for name in route:
            target = target[name]
        target[key] = value
    return result


def observed(p50_ns: float, program: str, spread: float = 0.01) -> dict[str, Any]:
    """Return a REPORT of a program whose runs are known to vary by that much."""
    known = {"source": "REPEATS", "runs": 5, "relative_stddev": spread, "p50_ci95_ns": None}
    return report(p50_ns, compile__program__digest=program * 64, run_spread=known)


def entries(*reports: dict[str, Any]) -> list[HistoryEntry]:
    """Newest first, as a farm gives them; the reports are given oldest first."""
    created = [
        HistoryEntry(f"job{place}", ("baseline",) if place == 0 else (), START + timedelta(hours=place), Report.from_dict(each))
        for place, each in enumerate(reports)
    ]
    return created[::-1]


def only(*reports: dict[str, Any]) -> Series:
    (series,) = trends(entries(*reports))
    return series


def test_points_go_from_the_oldest_to_the_newest_and_each_is_compared_with_the_one_before() -> None:
    points = only(observed(1000, "a"), observed(1005, "b"), observed(1200, "c"), observed(600, "d")).points
    assert [point.entry.job for point in points] == ["job0", "job1", "job2", "job3"]
    assert [point.ratio for point in points] == [None, 1.005, pytest.approx(1200 / 1005), 0.5]
    assert [point.overlaps for point in points] == [None, True, False, False]
    assert [cli.change(point)[0] for point in points] == ["", "≈ +0.5 %", "19.4 % slower", "50.0 % faster"]


def test_separate_runs_of_one_program_are_neither_faster_nor_slower() -> None:
    points = only(observed(1000, "a"), observed(1120, "a"), report(1000), report(1120)).points
    assert [point.overlaps for point in points[1:]] == [False, False, False]
    assert [point.outcome for point in points] == [None, "inconclusive", "inconclusive", "inconclusive"]
    assert [cli.change(point)[0] for point in points] == ["", "? +12.0 %", "? -10.7 %", "? +12.0 %"]


def test_a_difference_within_the_spread_between_runs_is_none_found() -> None:
    points = only(observed(1000, "a", 0.05), observed(1050, "b", 0.05)).points
    assert (points[1].outcome, points[1].overlaps, cli.change(points[1])[0]) == ("no_difference", False, "≈ +5.0 %")


def test_other_programs_of_an_unknown_spread_are_not_called_different() -> None:
    other = report(1120, compile__program__digest="e" * 64)
    assert [point.outcome for point in only(report(1000), other).points] == [None, "inconclusive"]


@pytest.mark.parametrize("verdict", ["INVALID", "NOT_BENCHMARKABLE"])
def test_what_is_no_evidence_is_not_compared_and_nothing_with_it(verdict: str) -> None:
    points = only(report(1000), report(5000, verdict), report(1100)).points
    assert [point.ratio for point in points] == [None, None, 1.1]
    assert [point.is_comparable for point in points] == [True, False, True]
    assert cli.sparkline(points) == "▁·█"


def test_a_report_without_numbers_has_its_state_for_a_verdict() -> None:
    failed = report(None, state="FAILED", latency=None, compile=None, accuracy=None)
    failed |= {"verdict": None, "error": {"reason": "PROGRAM_CRASHED"}}
    point = only(report(1000), failed).points[1]
    assert (point.verdict, point.ratio, point.p50_ns, point.size_bytes, point.sqnr_db) == ("FAILED", None, None, None, None)


def test_an_accuracy_is_against_the_program_before_quantization_or_absent() -> None:
    rows = report()["accuracy"]
    assert [point.sqnr_db for point in only(report(), report(accuracy=rows[::-1]), report(accuracy=rows[1:])).points] == [
        300,
        300,
        None,
    ]


def test_changes_of_a_point_are_against_the_base_of_its_ratio() -> None:
    other = report(1500, compile__toolchain__torch="2.14.0")
    points = only(report(1000), report(1000, "INVALID", compile__toolchain__torch="2.14.0"), other).points
    assert [[change["what"] for change in point.changes] for point in points] == [[], ["torch"], ["torch"]]
    assert points[2].changes[0] == {"what": "torch", "base": "2.13.0", "candidate": "2.14.0"}


def without_a_program() -> dict[str, Any]:
    """Return what a cell that failed to compile leaves: no device, no program, no numbers."""
    failed = report(None, state="FAILED", latency=None, compile=None, accuracy=None, device=None, runner=None)
    return failed | {"verdict": None, "error": {"reason": "EXPORT_FAILED"}}


def compiled(program: str) -> dict[str, Any]:
    """Return what is only compiled."""
    created = report(None, latency=None, device=None, runner=None, compile__program__digest=program * 64)
    return created | {"verdict": None}


def test_a_report_that_failed_hides_no_change_of_the_program() -> None:
    points = only(compiled("a"), without_a_program(), compiled("b"), without_a_program(), compiled("b")).points
    assert [[change["what"] for change in point.changes] for point in points] == [[], [], ["program"], [], []]
    assert (points[2].changes[0]["base"], points[2].changes[0]["candidate"]) == ("a" * 64, "b" * 64)


def test_a_report_that_failed_hides_no_change_between_measurements_that_are_no_evidence() -> None:
    crashed = report(None, latency=None, state="FAILED") | {"verdict": None}
    slower = report(1200, "INVALID", compile__toolchain__torch="2.14.0", telemetry={"before": {"charging": True}})
    first = report(1000, "INVALID", telemetry={"before": {"charging": False}})
    points = only(first, crashed, slower).points
    assert [change["what"] for change in points[2].changes] == ["torch", "charging"]
    assert [point.ratio for point in points] == [None, None, None]


def test_recipes_devices_methods_and_threads_are_series_of_their_own() -> None:
    on_another = report()
    on_another["device"]["id"] = "other"
    created = trends(
        entries(report(), report(recipe="portable"), on_another, report(method="encode"), report(threads=1), report(1001))
    )
    assert [len(series.points) for series in created] == [2, 1, 1, 1, 1]
    assert [series.threads for series in created] == [4, 1, 4, 4, 4], "that with the newest report first"


def test_a_models_own_change_is_reported_within_its_series() -> None:
    points = only(report(), report(model__digest="b" * 64)).points
    assert [change["what"] for change in points[1].changes] == ["model"]


def test_small_differences_are_not_blown_up() -> None:
    assert cli.sparkline(only(report(1000), report(1001), report(1000)).points) == "▁▂▁"
    assert cli.sparkline(only(report(1000), report(2000), report(1500)).points) == "▁█▅"
    assert cli.sparkline(only(report(1000), report(1000)).points) == "▁▁"


def test_the_document_has_every_point_with_its_report_and_is_strict_json() -> None:
    created = document("net", entries(report(1000), report(1200)), None)
    assert json.loads(dumps(created), parse_constant=pytest.fail) == created
    assert (created["schema"], created["error"]) == ("etfarm.history/1", None)
    (series,) = created["series"]
    assert series["device"] == {"id": "board", "name": "pi5-a"}
    assert [(point["job"], point["tags"], point["ratio"]) for point in series["points"]] == [
        ("job0", ["baseline"], None),
        ("job1", [], 1.2),
    ]
    assert series["points"][0]["report"] == report(1000)


def test_the_table_says_what_became_of_it_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    slower = observed(1500, "")
    slower["compile"]["toolchain"]["torch"] = "2.14.0"
    unknown = report(9000, "INVALID", compile__program__digest="")
    series = only(observed(1000, ""), observed(1010, ""), unknown, slower)
    cli._show(series, blank=False, to_stderr=False)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "net · xnnpack_fp32 · pi5-a · 4 threads   ▁▁·█   p50 1.00 µs to 1.50 µs"
    assert printed[1].split() == ["WHEN", "JOB", "P50", "CHANGE", "VERDICT", "SIZE", "SQNR"]
    assert "job0 baseline" in printed[2] and printed[2].endswith("2.00 KiB  exact")
    assert "≈ +1.0 %" in printed[3]
    assert "INVALID" in printed[4] and printed[5].strip() == "cpu starved"
    assert "48.5 % slower" in printed[6]
    assert printed[7].strip() == "changed: torch 2.13.0 -> 2.14.0"
    assert printed[8].startswith("≈: ") and len(printed) == 9


def test_the_accuracy_of_a_language_model_is_in_its_history() -> None:
    references = [
        {"reference": "quantized program", "sqnr_db": 90.0, "top1_agreement": 1.0},
        {"reference": "program before quantization", "sqnr_db": 31.25, "top1_agreement": 0.953},
    ]
    measured = {**generated_report("c", point(100.0)), "accuracy": []}
    generation = {**measured["generation"], "accuracy": {"tokens": 64, "perplexity": 1234.5, "references": references}}
    series = only(completed({**measured, "generation": generation}))
    (newest,) = series.points
    assert (newest.sqnr_db, newest.top1_agreement, newest.perplexity) == (31.25, 0.953, 1234.5)
    head, row, *_ = [line.plain for line in cli._lines(series.points, None)]
    narrow = cli._lines(series.points, len(head) - 1)[0].plain
    assert "SIZE" in head and "SIZE" not in narrow and "P50" in narrow
    assert head.split()[-3:] == ["SQNR", "TOP-1", "PERPLEXITY"] and row.split()[-5:] == ["31.2", "dB", "95.3", "%", "1,234"]
    (written,) = document("net", entries(completed({**measured, "generation": generation})), None)["series"]
    assert written["points"][0]["top1_agreement"] == 0.953 and written["points"][0]["perplexity"] == 1234.5
    (other,) = only(report()).points
    assert (other.sqnr_db, other.top1_agreement, other.perplexity) == (300.0, None, None)
