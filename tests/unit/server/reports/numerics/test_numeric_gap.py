"""Each operator's values of real numerics passes against the host's, the first bad operator, and files that do not fit."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from etfarm.server.reports.numerics import operator_check
from etfarm.server.reports.request import AnalyzeRequest, Numerics
from etfarm.server.reports.trace.recording import Recording
from etfarm.v1 import report_pb2
from etfarm.wire import tensors
from tests.support.analyses import analyze_request, analyzed
from tests.support.recordings import RecordedRun, line_of, recorded

pytestmark = [pytest.mark.numeric, pytest.mark.slow(reason="compiles and runs a dozen networks, where they are not cached")]


def _request(run: RecordedRun) -> AnalyzeRequest:
    numerics = Numerics(run.pte, run.etrecord, run.etdump, run.debug, run.outputs, run.quantized, False)
    files = {name: getattr(run, name) for name in ("pte", "etdump", "etrecord", "model", "inputs", "outputs", "quantized")}
    return analyze_request(**files, method=run.method, numerics=numerics)


def _warnings(report: report_pb2.Report) -> dict[str, str]:
    return {warning.code: warning.message for warning in report.compile.warnings if "NUMERICS" in warning.code}


def _names(row: report_pb2.NumericGap) -> list[str]:
    return [op.split(".")[-2] for op in row.ops]


def _own(row: report_pb2.NumericGap) -> list[str]:
    return [name for name in _names(row) if "quantize" not in name and name != "choose_qparams"]


@pytest.mark.parametrize(
    "name", ["cnn", "mixed", "lstm", "several", "counter", "any_batch", "methods", "lines", "looked_up", "halves"]
)
def test_a_right_program_is_near_eager_in_every_value_and_has_no_bad_operator(name: str, tmp_path: Path) -> None:
    report = analyzed(_request(recorded(name)), tmp_path)
    assert _warnings(report) == {}
    assert report.numeric_gap and {row.reference for row in report.numeric_gap} == {report_pb2.REFERENCE_EAGER}
    assert report.numerics.threshold_db == 20 and not report.numerics.HasField("first_bad")
    assert report.numerics.judged == len(report.numeric_gap)
    for row in report.numeric_gap:
        values = row.expected
        assert row.snr_db > 100 or (values.min == values.max == 0 and not row.HasField("snr_db")), row
        assert not row.first_bad and list(row.expected.shape) == list(row.actual.shape)
        assert (row.expected.nan_count, row.actual.nan_count) == (0, 0)
        assert row.source.file.endswith("recordings.py") and row.source.code


def test_rows_are_in_the_order_of_execution_with_lines_modules_and_backends(tmp_path: Path) -> None:
    report = analyzed(_request(recorded("cnn")), tmp_path)
    assert [_names(row) for row in report.numeric_gap] == [
        ["convolution"], ["_native_batch_norm_legit_no_training"], ["relu"], ["convolution"], ["add"], ["max_pool2d"],
        ["convolution", "relu"], ["mean"], ["linear"],
    ]  # fmt: skip
    assert [row.backend for row in report.numeric_gap] == ["XnnpackBackend"] * 7 + [""] + ["XnnpackBackend"]
    last, head = report.numeric_gap[6], report.numeric_gap[8]
    assert (last.source.line, last.module) == (line_of("wide = F.relu"), "last")
    assert (head.source.line, head.source.code, head.module) == (
        line_of("return self.head(pooled)"),
        "return self.head(pooled)",
        "head",
    )
    assert last.debug_handles and list(last.actual.shape) == [1, 24, 8, 8] and last.actual.dtype == "float32"


def test_the_numbers_are_those_of_the_recorded_values(tmp_path: Path) -> None:
    run = recorded("cnn")
    report = analyzed(_request(run), tmp_path)
    (output,) = tensors.decode(run.outputs.read_bytes())
    values = tensors.to_array(output)
    row = report.numeric_gap[-1]
    assert (row.actual.min, row.actual.max) == (values.min(), values.max())
    assert row.actual.mean == pytest.approx(values.mean()) and row.actual.stddev == pytest.approx(values.std())
    assert row.mse == pytest.approx(10 ** (-row.snr_db / 10) * (row.expected.mean**2 + row.expected.stddev**2), rel=1e-3)
    assert row.max_abs_error <= row.l1 <= values.size * row.max_abs_error
    for one in report.numeric_gap:
        assert len(one.histogram.expected) == len(one.histogram.actual) == 32
        assert sum(one.histogram.expected) == sum(one.histogram.actual) == math.prod(one.actual.shape)
        assert one.histogram.low <= one.actual.min and one.actual.max <= one.histogram.high


def test_int8_has_each_operator_against_the_quantized_program_and_against_eager(tmp_path: Path) -> None:
    report = analyzed(_request(recorded("cnn_int8")), tmp_path)
    assert _warnings(report) == {}
    assert not report.numerics.HasField("first_bad")
    quantized = [row for row in report.numeric_gap if row.reference == report_pb2.REFERENCE_QUANTIZED]
    eager = [row for row in report.numeric_gap if row.reference == report_pb2.REFERENCE_EAGER]
    assert [_own(row) for row in eager] == [
        ["convolution", "relu"], ["convolution"], ["add"], ["max_pool2d"], ["convolution", "relu"], ["mean"], ["linear"],
    ]  # fmt: skip
    assert min(row.snr_db for row in quantized) > 35, "a right kernel is at most a step off here and there"
    assert 20 < min(row.snr_db for row in eager) < 45, "int8 itself costs more than that"
    stem = eager[0]
    # The batch norm behind the stem is in its weights: what it gives is compared, not what the bare convolution would.
    assert (stem.source.line, stem.snr_db > 30) == (line_of("stemmed = F.relu"), True)
    assert (stem.actual.dtype, stem.expected.dtype) == ("int8", "float32")
    assert stem.actual.max == pytest.approx(stem.expected.max, rel=0.05), "the numbers that integers stand for are compared"


def test_an_int8_program_with_a_wrong_kernel_has_it_named_with_its_line(tmp_path: Path) -> None:
    report = analyzed(_request(recorded("cnn_int8_wrong")), tmp_path)
    (bad,) = [row for row in report.numeric_gap if row.first_bad]
    assert report.numeric_gap[report.numerics.first_bad] == bad
    assert (_own(bad), bad.reference) == (["convolution", "relu"], report_pb2.REFERENCE_QUANTIZED)
    assert (bad.source.line, bad.source.code) == (line_of("wide = F.relu"), "wide = F.relu(self.last(small))")
    before = [row for row in report.numeric_gap[: report.numerics.first_bad] if row.reference == report_pb2.REFERENCE_QUANTIZED]
    assert bad.snr_db < 20 < 50 < min(row.snr_db for row in before)
    # Behind it everything is wrong, and none of that is named.
    assert report.numeric_gap[-1].snr_db < 30
    by_reference = {row.reference: row for row in report.accuracy}
    assert set(by_reference) == {report_pb2.REFERENCE_EAGER, report_pb2.REFERENCE_QUANTIZED}
    assert by_reference[report_pb2.REFERENCE_QUANTIZED].sqnr_db < 30


def test_a_wrong_kernel_of_a_float_program_is_named_beside_a_branch_that_is_right(tmp_path: Path) -> None:
    report = analyzed(_request(recorded("cnn_wrong")), tmp_path)
    (bad,) = [row for row in report.numeric_gap if row.first_bad]
    assert (_own(bad), bad.source.line, bad.reference) == (
        ["convolution"],
        line_of("mixed = self.middle"),
        report_pb2.REFERENCE_EAGER,
    )


def test_a_right_int8_program_is_nearer_to_the_quantized_program_than_to_eager(tmp_path: Path) -> None:
    report = analyzed(_request(recorded("cnn_int8")), tmp_path)
    eager, quantized = report.accuracy
    assert (eager.reference, quantized.reference) == (report_pb2.REFERENCE_EAGER, report_pb2.REFERENCE_QUANTIZED)
    assert quantized.sqnr_db > eager.sqnr_db and quantized.relative_error < eager.relative_error
    assert quantized.top1_agreement == 1 and (quantized.nan_count, quantized.reference_nan_count) == (0, 0)


def test_what_one_operator_of_the_model_became_is_one_row_with_all_its_operators(tmp_path: Path) -> None:
    report = analyzed(_request(recorded("attention_int8")), tmp_path)
    assert _warnings(report) == {} and not report.numerics.HasField("first_bad")
    attention = [row for row in report.numeric_gap if row.source.line == line_of("seen = torch.nn.functional")]
    assert {row.reference for row in attention} == {report_pb2.REFERENCE_QUANTIZED, report_pb2.REFERENCE_EAGER} and len(
        attention
    ) == 2
    assert {"bmm", "_softmax", "where"} <= set(_names(attention[0]))
    (cell,) = [row for row in analyzed(_request(recorded("lstm")), tmp_path).numeric_gap if "tanh" in _names(row)]
    assert cell.source.line == line_of("states, _ = self.cell(x)")


def test_each_output_of_an_operator_with_several_is_a_row(tmp_path: Path) -> None:
    report = analyzed(_request(recorded("several")), tmp_path)
    rows = [(_names(row), row.actual.dtype, list(row.actual.shape)) for row in report.numeric_gap]
    assert rows == [
        (["split_with_sizes_copy"], "float32", [4, 3]), (["split_with_sizes_copy"], "float32", [4, 5]),
        (["topk"], "float32", [4, 2]), (["topk"], "int64", [4, 2]), (["max"], "float32", [4]), (["max"], "int64", [4]),
        (["gt"], "bool", [4, 3]),
    ]  # fmt: skip
    assert all(row.snr_db == 300 for row in report.numeric_gap)


def test_buffers_begin_as_they_were_exported(tmp_path: Path) -> None:
    report = analyzed(_request(recorded("counter")), tmp_path)
    (counted,) = [row for row in report.numeric_gap if row.source.line == line_of("self.calls.add_(1.0)")]
    assert (counted.expected.max, counted.actual.max) == (42, 42)


def test_inputs_with_nan_are_compared_and_blame_no_kernel(tmp_path: Path) -> None:
    report = analyzed(_request(recorded("cnn_nan")), tmp_path)
    assert not report.numerics.HasField("first_bad")
    stem = report.numeric_gap[0]
    assert stem.expected.nan_count == stem.actual.nan_count > 0
    assert not stem.HasField("snr_db") and stem.max_abs_error < 1e-5
    assert all(np.isfinite([row.l1, row.mse, row.actual.max]).all() for row in report.numeric_gap)


def test_an_operator_that_ends_in_a_view_has_its_row_and_is_named_where_it_is_wrong(tmp_path: Path) -> None:
    report = analyzed(_request(recorded("lines_wrong")), tmp_path)
    assert [row.source.line for row in report.numeric_gap] == [
        line_of(code) for code in ("turned =", "positive =", "again =", "return torch.sigmoid(again)")
    ]
    (bad,) = [row for row in report.numeric_gap if row.first_bad]
    assert (_names(bad), bad.source.code) == (["permute_copy", "addmm"], "turned = self.a(x)")


def test_operators_without_a_recorded_value_are_named_with_the_next_one_that_has_one(tmp_path: Path) -> None:
    report = analyzed(_request(recorded("rounded")), tmp_path)
    group, last = report.numeric_gap[-2:]
    assert "relu" in _names(group) and _names(last) == ["sigmoid"]
    lines = {line.line for line in group.sources}
    assert {line_of("short ="), line_of("long =")} <= lines and line_of("return long.sigmoid") not in lines
    (reported,) = _warnings(report).values()
    assert reported.startswith("ExecuTorch's ETDump records no bfloat16 values: 2 of 5 operators produce them")
    assert not report.numerics.HasField("first_bad")


def test_a_program_of_bfloat16_says_that_none_of_its_values_are_recorded(tmp_path: Path) -> None:
    report = analyzed(_request(recorded("short")), tmp_path)
    assert _warnings(report) == {
        "ANALYSIS_NUMERICS_FAILED": "ExecuTorch's ETDump records no bfloat16 values, and the program produces no other values."
    }


def _with_place(run: RecordedRun, folder: Path, place: int) -> AnalyzeRequest:
    """As if the device had given that place for the first row of `looked_up`."""
    request = _request(run)
    assert request.numerics is not None
    (chosen,) = [v for one in Recording(run.etdump, run.debug).instructions for v in one.values if v.dtype == "int64"]
    data = bytearray(run.debug.read_bytes())
    data[chosen.offset : chosen.offset + 8] = place.to_bytes(8, "little")
    folder.joinpath("spoilt").write_bytes(data)
    return replace(request, numerics=replace(request.numerics, debug=folder / "spoilt"))


@pytest.mark.parametrize("place", [0, 3, 99])
def test_a_place_is_bad_where_another_element_or_none_is_at_it(place: int, tmp_path: Path) -> None:
    report = analyzed(_with_place(recorded("looked_up"), tmp_path, place), tmp_path)
    assert _warnings(report) == {} and len(report.numeric_gap) == 4
    bad = [_names(row) for row in report.numeric_gap if row.first_bad]
    # At 3 is the same element as at 2, and then it is the row of the table that was recorded, that at 2, which is not right.
    assert bad == ([["embedding"]] if place == 3 else [["argmax"]])


def test_a_value_that_the_host_cannot_take_blames_what_gave_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_check, "CHOOSING", frozenset())  # so that nothing else tells
    report = analyzed(_with_place(recorded("looked_up"), tmp_path, 99), tmp_path)
    assert _warnings(report) == {} and len(report.numeric_gap) == 4
    assert [_names(row) for row in report.numeric_gap if row.first_bad] == [["argmax"]]


def test_without_the_quantized_program_nothing_is_judged_and_integers_are_not_compared_with_numbers(tmp_path: Path) -> None:
    request = _request(recorded("cnn_int8_wrong"))
    assert request.numerics is not None and request.quantized is not None
    cut = _cut(request.quantized, tmp_path, 0.5)
    report = analyzed(replace(request, numerics=replace(request.numerics, quantized=cut)), tmp_path)
    assert "quantized program" in _warnings(report)["ANALYSIS_NUMERICS_REFERENCE_FAILED"]
    assert report.numerics.judged == 0 and not report.numerics.HasField("first_bad")
    (row,) = report.numeric_gap
    assert (row.actual.dtype, row.reference) == ("float32", report_pb2.REFERENCE_EAGER)
    assert row.source.line == line_of("stemmed = F.relu") and _names(row)[-1] == "mean"


@pytest.mark.remedy("OUT_OF_TIME")
def test_a_host_out_of_time_reports_its_results_so_far_and_that_it_stopped_comparing(tmp_path: Path) -> None:
    report = analyzed(replace(_request(recorded("cnn")), limit_s=0.0), tmp_path)
    assert (
        "within the analysis's time limit. Raise `etfarm serve --analysis-timeout`"
        in _warnings(report)["ANALYSIS_NUMERICS_FAILED"]
    )
    assert report.operators and report.accuracy
    assert analyzed(_request(recorded("cnn")), tmp_path).numeric_gap, "with more time"


def _cut(path: Path, folder: Path, part: float) -> Path:
    cut = folder / f"cut-{path.name}"
    cut.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    return cut


def _without_handles(etrecord: Path, folder: Path) -> Path:
    """As it would be of a compiler that gives none."""
    path = folder / "bare.etrecord"
    with zipfile.ZipFile(etrecord) as old, zipfile.ZipFile(path, "w") as new:
        for entry in old.namelist():
            new.writestr(entry, json.dumps({"forward": {}}) if entry == "debug_handle_map" else old.read(entry))
    return path


@pytest.mark.remedy("OTHER_EXPORT", "BAD_RECORDING")
@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda n, folder: replace(n, etrecord=recorded("mixed").etrecord), "of another export"),
        (lambda n, folder: replace(n, etrecord=_without_handles(n.etrecord, folder)), "no debug handles"),
        (lambda n, folder: replace(n, etrecord=_cut(n.etrecord, folder, 0.5)), "cannot be read"),
        (lambda n, folder: replace(n, debug=folder / "gone"), "debug file with the values is missing"),
        (lambda n, folder: replace(n, debug=_cut(n.debug, folder, 0.5)), "debug file is cut short, or is another run's"),
        (lambda n, folder: replace(n, etdump=_cut(n.etdump, folder, 0.5)), "cut short"),
        (lambda n, folder: replace(n, etdump=_cut(n.etdump, folder, 0)), "not an ETDump"),
        (lambda n, folder: replace(n, etdump=recorded("attention_int8").etdump), "from another program"),
        (lambda n, folder: replace(n, pte=recorded("mixed").pte), "of another export"),
    ],
    ids=["other record", "no handles", "cut record", "no file", "cut file", "cut dump", "no dump", "other dump", "other pte"],
)
def test_files_that_do_not_match_are_reported_and_the_rest_of_the_report_stays(
    spoil: Callable[[Numerics, Path], Numerics], expected: str, tmp_path: Path
) -> None:
    request = _request(recorded("cnn"))
    assert request.numerics is not None
    report = analyzed(replace(request, numerics=spoil(request.numerics, tmp_path)), tmp_path)
    assert expected in _warnings(report)["ANALYSIS_NUMERICS_FAILED"]
    assert not report.numeric_gap and not report.HasField("numerics")
    assert report.operators and report.accuracy[0].sqnr_db > 100
    assert analyzed(request, tmp_path).numeric_gap, "with the files that were written with the program"


def test_a_model_of_another_export_has_nothing_to_compare_and_says_so(tmp_path: Path) -> None:
    request = replace(_request(recorded("methods")), model=recorded("any_batch").model)
    report = analyzed(request, tmp_path)
    assert "different exports" in _warnings(report)["ANALYSIS_NUMERICS_FAILED"]
    assert not report.numeric_gap


def test_a_host_that_cannot_run_the_one_program_leaves_the_other(tmp_path: Path) -> None:
    run = recorded("cnn_int8")
    report = analyzed(replace(_request(run), model=_cut(run.model, tmp_path, 0.5)), tmp_path)
    assert "program before quantization" in _warnings(report)["ANALYSIS_NUMERICS_REFERENCE_FAILED"]
    assert {row.reference for row in report.numeric_gap} == {report_pb2.REFERENCE_QUANTIZED}
