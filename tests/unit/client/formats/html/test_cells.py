"""Several cells and several runs on one scale."""

from __future__ import annotations

from typing import Any

import pytest

from etfarm.client.formats import html
from etfarm.client.formats.html import cells, charts
from tests.support.documents import document, report


def _measured(p50_ns: float, low_ns: float, high_ns: float, **more: Any) -> dict[str, Any]:
    return report(latency={"p50_ns": p50_ns, "p50_ci95_ns": [low_ns, high_ns]}, **more)


def test_bars_of_all_reports_have_one_scale_that_begins_at_zero() -> None:
    one, other, failed = cells.bars([_measured(50.0, 40.0, 60.0), _measured(150.0, 100.0, 200.0), report(latency=None)])
    assert (one, failed) == (cells.Bar(25.0, 20.0, 30.0), None)
    assert other == cells.Bar(75.0, 50.0, 100.0) and other.width == 50.0
    assert cells.bars([]) == [] and cells.bars([report(latency=None)]) == [None]


def test_a_bars_interval_covers_the_variation_between_runs_if_it_is_known() -> None:
    spread = {"source": "REPEATS", "runs": 5, "relative_stddev": 0.1, "p50_ci95_ns": [50.0, 200.0]}
    (bar,) = cells.bars([_measured(100.0, 99.0, 101.0, run_spread=spread)])
    assert bar == cells.Bar(50.0, 25.0, 100.0)


def test_runs_are_shown_only_if_there_are_several() -> None:
    def run(p50_ns: float, status: str) -> dict[str, Any]:
        return {"iterations": 3, "p50_ns": p50_ns, "p50_ci95_ns": [p50_ns - 1e4, p50_ns + 1e4], "verdict": {"status": status}}

    assert cells.runs(report(runs=[run(1e6, "VALID")])) == []
    first, second = cells.runs(report(runs=[run(1e6, "VALID"), run(2e6, "INVALID")]))
    assert first.bar.low < first.bar.middle < first.bar.high < second.bar.low < second.bar.high <= 100
    assert (first.text, second.number, second.status) == ("1.00 ms [0.99, 1.01]", 2, "INVALID")


@pytest.mark.parametrize(
    ("source", "words"),
    [("REPEATS", "from 5 runs in this report"), ("PRIOR", "an assumption"), ("HISTORY", "in the history of this program")],
)
def test_the_spread_says_what_it_was_estimated_from(source: str, words: str) -> None:
    spread = {"source": source, "runs": 5, "relative_stddev": 0.021, "p50_ci95_ns": [1_800_000.0, 1_900_000.0]}
    text = cells.spread(_measured(1_840_000.0, 1_820_000.0, 1_860_000.0, run_spread=spread))
    assert text.startswith("±2.1 % between runs") and words in text and "[1.80, 1.90]" in text
    assert cells.spread(report()) == ""


def test_a_spread_without_any_run_is_called_an_assumption() -> None:
    spread = {"source": "PRIOR", "runs": 0, "relative_stddev": 0.05, "p50_ci95_ns": [1_700_000.0, 2_000_000.0]}
    text = cells.spread(_measured(1_840_000.0, 1_820_000.0, 1_860_000.0, run_spread=spread))
    assert text.startswith("±5.0 % between runs (standard deviation), an assumption: too few runs of similar programs")


def test_short_labels_have_only_what_distinguishes_the_reports() -> None:
    assert cells.short_labels([report(), report(recipe="portable")]) == ["xnnpack_fp32", "portable"]
    assert cells.short_labels([report(), report()]) == ["report 0", "report 1"]
    assert cells.short_labels([report()]) == ["resnet8 · xnnpack_fp32 · pi5-a, 4 threads"]


def test_a_phase_or_a_run_without_its_values_is_still_shown() -> None:
    measured = _measured(1e6, 9e5, 1.1e6, runs=[{"p50_ns": 1e6}, {"p50_ns": 2e6, "p50_ci95_ns": [1.9e6]}], timeline=[{}])
    for run in measured["runs"]:
        run["iterations"] = None
    measured["timeline"][0] |= {"phase": None, "actor": None}
    assert b"0-latency" in html.write(document(measured))


def test_a_page_without_reports_has_no_contents() -> None:
    assert b'aria-label="Contents">' in html.write(document(report()))
    assert b'aria-label="Contents" hidden>' in html.write(document())


def _readings(*elapsed_ms: float) -> list[dict[str, Any]]:
    return [{"elapsed_ms": at, "frequency_hz": [1e9], "busy_cpus": 1.0} for at in elapsed_ms]


def test_the_devices_readings_of_several_runs_are_joined_without_the_waits_between_them() -> None:
    points = charts.joined(_readings(0.0, 10.0, 20.0, 5000.0, 5010.0, 5020.0, 9000.0))
    breaks = [points.pop(place) for place in (7, 3)]
    assert breaks[1] == {"elapsed_ms": 25.0, "frequency_hz": [], "busy_cpus": None}
    assert points == _readings(0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0)
    assert charts.joined(_readings(0.0, 10.0, 21.0)) == _readings(0.0, 10.0, 21.0)
    assert charts.joined([]) == []


def test_a_chart_of_several_runs_says_that_it_spans_them() -> None:
    telemetry = {"series": _readings(0.0, 10.0, 20.0, 5000.0, 5010.0)}
    one = report(runs=[{"iterations": 3}], telemetry=telemetry)
    two = report(runs=[{"iterations": 3, "p50_ns": 1e6}, {"iterations": 3, "p50_ns": 1e6}], telemetry=telemetry)
    assert "The device during the timed pass<" in html.write(document(one)).decode()
    assert "The device during the timed passes of 2 runs, without the waits between them" in html.write(document(two)).decode()
