"""Reports without their series: nothing that is made of reports but pages of samples hangs on them."""

from __future__ import annotations

from typing import Any

from etfarm.server.reports.latency.series import without_rows, without_series
from etfarm.v1.report_pb2 import OperatorKind, Report, VerdictStatus
from etfarm.wire import comparison, views
from etfarm.wire.comparison import Side
from etfarm.wire.report import report_json


def measured(factor: float = 1.0) -> Report:
    """A report of a traced and interleaved run, with every series that there is."""
    report = Report(id="r", cell="c", recipe="xnnpack_fp32", method="forward", threads=1, state="SUCCEEDED")
    report.model.name = "net"
    report.device.id = report.device.name = "board"
    report.latency.samples_ns.extend([1000] * 50)
    report.latency.p50_ns = 1000 * factor
    report.latency.p50_ci95_ns.extend([990 * factor, 1010 * factor])
    report.verdict.status = VerdictStatus.VERDICT_STATUS_VALID
    report.profile.iterations = 3
    report.profile.p50_ns = 300 * factor
    report.profile.times_ns.extend([300, 301, 302])
    for index in range(3):
        report.operators.add(
            index=index, kind=OperatorKind.OPERATOR_KIND_OPERATOR, name=f"op{index}", op_types=["add"], share=1 / 3,
            p50_ns=100 * factor, mean_ns=100 * factor, module=f"layer{index}", times_ns=[99, 100, 101],
        )  # fmt: skip
    report.telemetry.cpu_time_ns = 7
    report.telemetry.series.add(elapsed_ms=1)
    report.interleaved.ratio = factor
    report.interleaved.rounds = 2
    report.interleaved.ratios.extend([factor, factor])
    report.numeric_gap.add(ops=["add"], snr_db=20)
    return report


def lists_of(value: Any, name: str) -> list[Any]:
    """All values of a key, however deep."""
    if isinstance(value, dict):
        own = [value[name]] if name in value else []
        return own + [found for one in value.values() for found in lists_of(one, name)]
    return [found for one in value for found in lists_of(one, name)] if isinstance(value, list) else []


def test_the_series_are_gone_and_nothing_else_is() -> None:
    whole, slim = report_json(measured()), report_json(without_series(measured()))
    for name in ("samples_ns", "times_ns", "series", "ratios"):
        assert any(lists_of(whole, name)) and not any(lists_of(slim, name))
    assert len(slim["operators"]) == 3 and slim["numeric_gap"] == whole["numeric_gap"]
    assert slim["latency"] | {"samples_ns": 0} == whole["latency"] | {"samples_ns": 0}


def test_a_comparison_and_every_view_are_the_same_without_the_series() -> None:
    sides = [[report_json(measured(factor))] for factor in (1.0, 1.5)]
    slim = [[report_json(without_series(measured(factor)))] for factor in (1.0, 1.5)]
    document = comparison.compare(Side(sides[0]), Side(sides[1]))
    assert comparison.compare(Side(slim[0]), Side(slim[1])) == document
    assert document["pairs"][0]["operators"]["rows"]
    for by in views.BY:
        assert views.group(slim[0][0]["operators"], by) == views.group(sides[0][0]["operators"], by)


def test_without_rows_there_are_neither_operators_nor_a_gap() -> None:
    slim = without_rows(measured())
    assert not slim.operators and not slim.numeric_gap and not slim.latency.samples_ns
    assert slim.latency.p50_ns == 1000
