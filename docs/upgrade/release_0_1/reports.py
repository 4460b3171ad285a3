"""Reports of etfarm 0.1, which had their series inline."""

from __future__ import annotations

from typing import Any

from etfarm.v1 import report_pb2
from etfarm.wire.series import encode_samples, encode_trace_times
from release_0_1.convert import fill
from release_0_1.messages import message_class


def converted_report(body: bytes) -> tuple[report_pb2.Report, bytes | None, bytes | None]:
    """Return the current report for a serialized one, and the files of its series: samples and traced times.

    A file is None if the report has no such values. The report does not refer to the file of traced times yet.

    Raises:
        google.protobuf.message.DecodeError: the body is no report.
    """
    old = message_class("Report").FromString(body)
    new = report_pb2.Report()
    fill(old, new)
    return new, _samples(old), _trace_times(old)


def _samples(old: Any) -> bytes | None:
    return encode_samples(old.latency.samples_ns) if old.latency.samples_ns else None


def _trace_times(old: Any) -> bytes | None:
    rows = [old.profile.times_ns, *(row.times_ns for row in old.operators)]
    if not any(len(row) for row in rows):
        return None
    # The profile may be that of a run whose rows are of another: rows of another length are marked as absent.
    return encode_trace_times(rows, old.profile.iterations)
