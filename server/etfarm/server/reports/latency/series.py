"""Reports without what is large: a long run's has a million samples, and a time of every operator for every iteration."""

from __future__ import annotations

from etfarm.v1 import report_pb2


def without_series(report: report_pb2.Report) -> report_pb2.Report:
    """Takes the values of every iteration, round and reading away, in place; the numbers made of them stay."""
    for holder, name in (("latency", "samples_ns"), ("profile", "times_ns"), ("telemetry", "series"), ("interleaved", "ratios")):
        if report.HasField(holder):  # type: ignore[arg-type]
            getattr(report, holder).ClearField(name)
    for row in report.operators:
        row.ClearField("times_ns")
    return report


def without_rows(report: report_pb2.Report) -> report_pb2.Report:
    """Takes operators and numeric gap away, too, in place."""
    for name in ("operators", "numeric_gap"):
        report.ClearField(name)
    return without_series(report)
