"""The series beside a report: from values to files and back, and into a document."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.v1 import report_pb2
from etfarm.wire.report import report_json
from etfarm.wire.series import (
    BadSeries,
    Series,
    decode_samples,
    decode_trace_times,
    encode_samples,
    encode_trace_times,
    trace_times_bytes,
)

NS = st.integers(0, 2**63 - 1)


@given(st.lists(NS))
def test_samples_are_read_as_they_were_written(samples_ns: list[int]) -> None:
    assert decode_samples(encode_samples(samples_ns)) == samples_ns


@given(st.integers(1, 9).flatmap(lambda columns: st.lists(st.lists(NS, min_size=columns, max_size=columns), min_size=1)))
def test_trace_times_are_read_as_they_were_written(rows: list[list[int]]) -> None:
    data = encode_trace_times(rows, len(rows[0]))
    report = report_pb2.Report(operators=[report_pb2.OperatorRow()] * (len(rows) - 1))
    report.profile.iterations = len(rows[0])
    assert len(data) == trace_times_bytes(report)
    assert decode_trace_times(data, len(rows)) == rows


def test_bytes_are_int64_in_little_endian_order() -> None:
    assert encode_samples([1, 256]) == b"\x01" + bytes(7) + b"\x00\x01" + bytes(6)


def test_a_row_without_times_is_marked() -> None:
    data = encode_trace_times([[5, 6], [], [7, 8]], 2)
    assert decode_trace_times(data, 3) == [[5, 6], None, [7, 8]]


@pytest.mark.parametrize(("data", "rows"), [(bytes(7), 1), (bytes(8), 2), (bytes(40), 3)])
def test_a_file_that_does_not_divide_into_its_rows_is_refused(data: bytes, rows: int) -> None:
    with pytest.raises(BadSeries):
        decode_trace_times(data, rows)


@pytest.mark.remedy("BAD_SERIES")
def test_samples_that_are_cut_short_are_refused() -> None:
    with pytest.raises(BadSeries):
        decode_samples(bytes(15))
    assert len(decode_samples(bytes(16))) == 2, "computed again"


def test_a_document_has_the_series_in_their_places() -> None:
    report = report_pb2.Report(operators=[report_pb2.OperatorRow(index=0), report_pb2.OperatorRow(index=1)])
    report.latency.p50_ns = 2
    report.profile.iterations = 2
    bare = report_json(report)
    assert bare["latency"]["samples_ns"] == [] and bare["profile"]["times_ns"] is None
    assert [row["times_ns"] for row in bare["operators"]] == [None, None]
    full = report_json(report, Series([1, 2, 3], [[10, 11], [4, 5], None]))
    assert full["latency"] == bare["latency"] | {"samples_ns": [1, 2, 3]}
    assert full["profile"]["times_ns"] == [10, 11]
    assert [row["times_ns"] for row in full["operators"]] == [[4, 5], None]
