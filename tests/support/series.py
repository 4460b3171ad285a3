"""The series of reports, as analyses write them and as the store has them."""

from __future__ import annotations

from pathlib import Path

from etfarm.server.reports.request import TRACE_TIMES
from etfarm.v1 import report_pb2
from etfarm.wire.series import decode_trace_times, trace_times_bytes


def traced_times(report: report_pb2.Report, folder: Path) -> list[list[int]]:
    """Return the times that an analysis wrote to its folder: of the method, then of each operator."""
    data = (folder / TRACE_TIMES).read_bytes()
    assert len(data) == report.trace_times.size_bytes == trace_times_bytes(report)
    rows = decode_trace_times(data, 1 + len(report.operators))
    assert None not in rows
    return [row for row in rows if row is not None]
