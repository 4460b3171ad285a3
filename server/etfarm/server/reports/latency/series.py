"""Removal of the large parts of reports: a long run has a million samples, and a time per operator and iteration."""

from __future__ import annotations

from etfarm.v1 import report_pb2


def without_series(report: report_pb2.Report) -> report_pb2.Report:
    """Remove the values of each iteration, round and reading from a report, in place; statistics stay."""
    for holder, name in (("latency", "samples_ns"), ("profile", "times_ns"), ("telemetry", "series"), ("interleaved", "ratios")):
        if report.HasField(holder):  # type: ignore[arg-type]
            getattr(report, holder).ClearField(name)
    for row in report.operators:
        row.ClearField("times_ns")
    return report


def without_rows(report: report_pb2.Report) -> report_pb2.Report:
    """Remove operators and numeric gap as well, in place."""
    for name in ("operators", "numeric_gap"):
        report.ClearField(name)
    return without_series(report)
