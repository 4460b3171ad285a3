"""Where rows lie in time: within their parents, one behind the other, and marked where that is made up."""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.server.reports.trace.etdump import Call, Kernel, Spans, Trace
from etfarm.server.reports.trace.graph import Instruction, Record
from etfarm.server.reports.trace.join import Place, join, lay, within
from etfarm.v1 import report_pb2
from tests.support.analyses import analyzed, traced_request
from tests.support.series import traced_times
from tests.support.traces import traced

NAMES = ["residual", "residual_int8", "gated_dynamic", "portable", "methods", "xnnpack"]
OPERATOR = report_pb2.OPERATOR_KIND_OPERATOR
DELEGATE = report_pb2.OPERATOR_KIND_DELEGATE
KERNEL = report_pb2.OPERATOR_KIND_KERNEL
REST = report_pb2.OPERATOR_KIND_REST

NS = st.integers(0, 10**9).map(float)
PLACES = st.lists(st.tuples(NS, NS), max_size=8)


def _report(name: str, folder: Path) -> report_pb2.Report:
    report = analyzed(traced_request(traced(name)), folder)
    assert not report.compile.warnings
    return report


@pytest.mark.parametrize("name", NAMES)
def test_rows_nest_in_the_execution_of_the_median_time(name: str, tmp_path: Path) -> None:
    report = _report(name, tmp_path)
    profile = report.profile
    method_ns, *times_ns = traced_times(report, tmp_path)
    assert method_ns[profile.shown] == statistics.median_low(method_ns)
    placed: dict[int | None, list[Place]] = {None: []}
    for row in report.operators:
        if row.kind == REST:
            assert not row.HasField("start_ns") and not row.HasField("duration_ns")
            continue
        assert row.HasField("start_ns")
        assert row.HasField("duration_ns") == (times_ns[row.index][profile.shown] > 0)
        parent = row.parent if row.HasField("parent") else None
        placed.setdefault(parent, []).append((row.start_ns, row.duration_ns))
    for index, places in placed.items():
        whole = report.operators[index] if index is not None else None
        outer = (whole.start_ns, whole.duration_ns) if whole else (0.0, float(method_ns[profile.shown]))
        assert all(within(place, outer) for place in places)
        assert all(one[0] + one[1] <= other[0] for one, other in pairwise(places))


@pytest.mark.parametrize("name", NAMES)
def test_rows_have_their_time_in_each_execution(name: str, tmp_path: Path) -> None:
    report = _report(name, tmp_path)
    method_ns, *times_ns = traced_times(report, tmp_path)
    count = len(method_ns)
    assert (report.profile.iterations, report.profile.p50_ns) == (count, statistics.median(method_ns))
    tops = np.zeros(count)
    for row, row_ns in zip(report.operators, times_ns, strict=True):
        assert len(row_ns) == count
        low, middle, high = np.percentile(row_ns, (10, 50, 90))
        for field, value in (("p10_ns", low), ("p50_ns", middle), ("p90_ns", high)):
            assert getattr(row, field) == (pytest.approx(value) if row.HasField(field) else 0)
            assert row.HasField(field) or value < row.resolution_ns or value <= min(method_ns)
        if row.kind == KERNEL:
            assert not np.array(row_ns) @ np.ones(count) % 1000, "XNNPACK tells whole microseconds"
        if not row.HasField("parent"):
            tops += np.array(row_ns)
    assert (tops >= np.array(method_ns)).all()


def test_kernels_of_xnnpack_are_marked_as_made_up(tmp_path: Path) -> None:
    for row in _report("residual", tmp_path).operators:
        assert row.reconstructed == (row.kind == KERNEL)


def test_a_kernel_of_several_lines_names_them_all_and_its_own_first(tmp_path: Path) -> None:
    report = _report("residual", tmp_path)
    several = {row.name.split(" (")[0]: row for row in report.operators if row.kind == KERNEL and row.sources}
    fused = several["Convolution"]
    assert fused.sources[0].code == fused.source.code
    assert {"stemmed = self.stem(x)", "normal = self.norm(stemmed)", "active = F.relu(normal)"} in [
        {line.code for line in row.sources} for row in report.operators
    ]
    (delegate,) = [row for row in report.operators if row.kind == DELEGATE]
    assert len(delegate.sources) >= 12 and not delegate.HasField("source")
    assert not delegate.HasField("unaligned_reason")
    assert all(len(row.sources) != 1 for row in report.operators)


def test_starts_that_a_backend_reported_are_kept() -> None:
    def kernel(number: int, start: float, took: float) -> Kernel:
        return Kernel(number, np.array([took]), Spans(np.array([start]), np.array([took])))

    program = {(0, 0): Instruction("OtherBackend", True)}

    def rows(*kernels: Kernel) -> list[tuple[float, float, bool]]:
        call = Call(0, 0, None, True, np.array([50.0]), kernels, Spans(np.array([20.0]), np.array([50.0])))
        result = join(Trace(np.array([100.0]), (call,), 0), Record(), program, "forward").operators
        return [(row.start_ns, row.duration_ns, row.reconstructed) for row in result if row.kind == KERNEL]

    assert rows(kernel(1, 25, 10), kernel(2, 40, 30)) == [(25, 10, False), (40, 30, False)]
    assert rows(kernel(1, 25, 10), kernel(2, 30, 30)) == [(20, 10, True), (30, 30, True)], "one within another"
    assert rows(kernel(1, 5, 10), kernel(2, 40, 30)) == [(20, 10, True), (30, 30, True)], "before its delegate"
    assert rows(kernel(1, 5, 60), kernel(2, 40, 40)) == [(20, 30, True), (50, 20, True)], "longer than the delegate together"


def test_without_starts_there_are_no_places() -> None:
    assert lay([None, (1.0, 2.0)], (0.0, 10.0), has_starts=True) == ([None, None], False)
    assert lay([(1.0, 2.0)], None, has_starts=True) == ([None], False)
    assert lay([], (0.0, 10.0), has_starts=True) == ([], False)


@given(PLACES, st.tuples(NS, NS), st.booleans())
def test_kernels_lie_within_their_delegate_for_any_times(kernels: list[Place], delegate: Place, has_starts: bool) -> None:
    places, made_up = lay(kernels, delegate, has_starts=has_starts)
    assert len(places) == len(kernels)
    result = [place for place in places if place is not None]
    assert len(result) == len(kernels)
    end = delegate[0] + delegate[1]
    for at, took in result:
        assert delegate[0] <= at and took >= 0 and at + took <= end
    assert all(one[0] + one[1] <= other[0] for one, other in pairwise(result))
    assert made_up or result == kernels
