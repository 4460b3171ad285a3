"""Files that do not belong together: each is warning_of in one sentence, and costs what only it tells."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etfarm.server.reports.trace import etdump, graph, provenance
from etfarm.server.reports.trace.attribution import attribute
from etfarm.v1 import report_pb2
from tests.support.analyses import analyzed, read, traced_request
from tests.support.etdumps import event, written
from tests.support.series import traced_times
from tests.support.traces import ITERATIONS, Traced, traced

NAMES = ["residual", "residual_int8", "gated_dynamic", "xnnpack", "int8", "portable", "methods", "renamed"]
FORWARD = ["residual", "residual_int8", "gated_dynamic", "xnnpack", "int8", "portable"]
EMPTY_ARCHIVE = b"PK\5\6" + bytes(18)
OTHERS = [(one, other) for one in FORWARD for other in FORWARD if one != other]


def analyzed_with(run: Traced, folder: Path, **changes: Any) -> report_pb2.Report:
    return analyzed(traced_request(run, **changes), folder)


def warning_of(report: report_pb2.Report) -> tuple[str, str]:
    (warning,) = report.compile.warnings
    return warning.code, warning.message


@pytest.mark.parametrize("name", NAMES)
def test_files_of_one_run_belong_together(name: str) -> None:
    trace, program, record = read(name)
    assert provenance.misfit_of_trace(trace, program) is None
    assert provenance.misfit_of_record(record, program) is None
    assert provenance.misfit_of_run(trace, traced(name).traced_ns) is None


@pytest.mark.parametrize(("name", "other"), OTHERS)
def test_an_etrecord_of_another_export_is_reported(name: str, other: str) -> None:
    assert provenance.misfit_of_record(read(other)[2], read(name)[1]) is not None


def test_a_trace_of_another_program_is_reported() -> None:
    # int8 of one network resembles its fp32: there its kernels stay unaligned.
    alike = {("xnnpack", "int8"), ("int8", "xnnpack"), ("residual", "residual_int8"), ("residual_int8", "residual")}
    for name, other in OTHERS:
        (trace, _, _), (_, program, record) = read(other), read(name)
        result = provenance.misfit_of_trace(trace, program)
        assert result is not None or (name, other) in alike, (name, other)
        assert result is not None or attribute(trace, program, record).unaligned, (name, other)


def test_an_etrecord_of_another_export_costs_the_lines_only(tmp_path: Path) -> None:
    report = analyzed_with(traced("xnnpack"), tmp_path, etrecord=traced("residual").etrecord)
    assert warning_of(report) == (
        "ANALYSIS_ETRECORD_OF_ANOTHER_EXPORT",
        "The ETRecord is of another export: it has 1 delegates (XnnpackBackend at instruction 0), but the program has 2 "
        "delegates (XnnpackBackend at instruction 0, XnnpackBackend at instruction 2). The rows have no modules and no source "
        "lines.",
    )
    times_ns = traced_times(report, tmp_path)
    whole = analyzed_with(traced("xnnpack"), tmp_path)
    assert [row.name for row in report.operators] == [row.name for row in whole.operators]
    assert times_ns == traced_times(whole, tmp_path)
    assert not any(row.HasField("source") or row.HasField("module") or row.debug_handles for row in report.operators)
    (reason,) = {row.unaligned_reason for row in report.operators if row.HasField("unaligned_reason")}
    assert reason == "No ETRecord says where its operators come from."


def test_a_trace_of_another_program_costs_the_operators(tmp_path: Path) -> None:
    run = traced("xnnpack")
    report = analyzed_with(run, tmp_path, etdump=traced("portable").etdump)
    code, message = warning_of(report)
    assert code == "ANALYSIS_TRACE_OF_ANOTHER_PROGRAM"
    assert message.startswith("The trace is of another program: instruction 0 is a kernel in it, and a delegate in the program.")
    assert not report.operators
    assert traced_times(report, tmp_path) == [list(run.traced_ns)]


@pytest.mark.parametrize(
    ("traced_ns", "how"),
    [((10**9,) * 3, "it holds 12 executions, and the run had 3"), ((1,) * ITERATIONS, "12 of its 12 executions took longer")],
)
def test_a_trace_of_another_run_costs_the_operators(tmp_path: Path, traced_ns: tuple[int, ...], how: str) -> None:
    report = analyzed_with(traced("xnnpack"), tmp_path, traced_ns=traced_ns)
    code, message = warning_of(report)
    assert code == "ANALYSIS_TRACE_OF_ANOTHER_RUN"
    assert how in message
    assert not report.operators
    assert (report.profile.iterations, traced_times(report, tmp_path)) == (len(traced_ns), [list(traced_ns)])


def test_a_trace_of_an_earlier_run_is_detected_by_its_times() -> None:
    """The same program twice on one machine: executions that all fit into those of another run are rare."""
    trace, _, _ = read("portable")
    mine = np.array(traced("portable").traced_ns)
    assert provenance.misfit_of_run(trace, mine[::-1].tolist()) is not None


@pytest.mark.parametrize(
    ("data", "how"),
    [(b"", "The trace is empty"), (b"\x00" * 40, "is not an ETDump"), (None, "is cut short"), (written(), "holds no execution")],
)
def test_a_trace_that_cannot_be_read_costs_the_operators(tmp_path: Path, data: bytes | None, how: str) -> None:
    run = traced("xnnpack")
    broken = tmp_path / "broken.etdp"
    broken.write_bytes(run.etdump.read_bytes()[:-1] if data is None else data)
    report = analyzed_with(run, tmp_path, etdump=broken)
    code, message = warning_of(report)
    assert (code, how in message) == ("ANALYSIS_JOIN_FAILED", True)
    assert not report.operators
    assert (report.profile.iterations, traced_times(report, tmp_path)) == (len(run.traced_ns), [list(run.traced_ns)])


@pytest.mark.parametrize("where", ["none", "collected"])
def test_a_trace_that_is_not_there_costs_the_operators(tmp_path: Path, where: str) -> None:
    run = traced("xnnpack")
    report = analyzed_with(run, tmp_path, etdump=None if where == "none" else tmp_path / "gone")
    assert warning_of(report) == (
        "ANALYSIS_TRACE_MISSING",
        "The run was traced, but its trace is missing. There are no operators.",
    )
    assert report.profile.iterations == len(run.traced_ns)


def _without_map(entries: dict[str, bytes]) -> None:
    del entries["debug_handle_map"]


def _with_empty_map(entries: dict[str, bytes]) -> None:
    entries["debug_handle_map"] = b"{}"


def _without_node_handles(entries: dict[str, bytes]) -> None:
    name = "edge_dialect_exported_program/forward"
    result = json.loads(entries[name])
    for node in result["graph_module"]["graph"]["nodes"]:
        node["metadata"].pop("debug_handle", None)
    entries[name] = json.dumps(result).encode()


def _rewritten(record: Path, target: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    with zipfile.ZipFile(record) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    change(entries)
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return target


@pytest.mark.parametrize("change", [_without_map, _with_empty_map, _without_node_handles])
def test_an_etrecord_without_debug_handles_costs_the_lines_only(
    tmp_path: Path, change: Callable[[dict[str, bytes]], None]
) -> None:
    run = traced("xnnpack")
    report = analyzed_with(run, tmp_path, etrecord=_rewritten(run.etrecord, tmp_path / "bare.etrecord", change))
    assert warning_of(report) == (
        "ANALYSIS_ETRECORD_WITHOUT_HANDLES",
        "The ETRecord has no debug handles of the method 'forward'. The rows have no modules and no source lines.",
    )
    assert report.operators[0].backend == "XnnpackBackend"
    assert not any(row.HasField("source") for row in report.operators)


@pytest.mark.parametrize(
    "damaged",
    [
        lambda whole: b"",
        lambda whole: whole[:10],
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole[:-1],
        lambda _: b"PK no zip",
        lambda _: EMPTY_ARCHIVE,
        lambda _: traced("methods").etrecord.read_bytes(),
    ],
)
def test_an_etrecord_that_cannot_be_read_costs_the_lines_only(tmp_path: Path, damaged: Callable[[bytes], bytes]) -> None:
    run, record = traced("xnnpack"), tmp_path / "bad.etrecord"
    record.write_bytes(damaged(run.etrecord.read_bytes()))
    report = analyzed_with(run, tmp_path, etrecord=record)
    code, message = warning_of(report)
    assert code == "ANALYSIS_ETRECORD_UNREADABLE"
    assert message.endswith("The rows have no modules and no source lines.")
    assert report.operators[0].backend == "XnnpackBackend"
    assert not any(row.HasField("source") for row in report.operators)


@pytest.mark.remedy("BAD_ETRECORD")
def test_an_etrecord_with_damaged_bytes_is_read_or_refused(tmp_path: Path) -> None:
    """In place: a zip tells most of it by its checksums."""
    whole = traced("gated_dynamic").etrecord.read_bytes()
    damaged = tmp_path / "damaged.etrecord"
    outcomes = set()
    for at in range(0, len(whole), max(1, len(whole) // 150)):
        damaged.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            graph.read_record(damaged, "forward")
            outcomes.add("read")
        except graph.BadRecord:
            outcomes.add("refused")
    assert "refused" in outcomes
    assert graph.read_record(traced("gated_dynamic").etrecord, "forward"), "compiled again"


def test_a_trace_without_its_program_still_gives_rows(tmp_path: Path) -> None:
    report = analyzed_with(traced("xnnpack"), tmp_path, pte=None, etrecord=None)
    assert not report.compile.warnings
    assert [row.name for row in report.operators if not row.HasField("parent")] == [
        "delegate", "mean.out", "delegate", "argmax.out", "rest of forward",
    ]  # fmt: skip


def test_executions_that_were_left_out_still_count_as_the_run_s() -> None:
    usual = [event("native_call_sin.out", 110, 120, 0), event("Method::execute", 100, 200, 0)]
    trace = etdump.read(written(usual, usual, usual[1:]))
    assert trace.left_out == 1
    assert provenance.misfit_of_run(trace, (1000, 1000, 1000)) is None
    assert provenance.misfit_of_run(trace, (1000, 1000)) == "it holds 3 executions, and the run had 2"
