"""What the server reads of a child's answer: nothing that is too large, unknown, or no value that a child may give."""

from __future__ import annotations

import math
from typing import Any

import pytest
from google.protobuf.message import Message

from etfarm.server.reports.findings import Findings
from etfarm.server.workers import answers, output_files
from etfarm.server.workers.answers import MAX_BYTES, MAX_TEXT, decode
from etfarm.server.workers.errors import BadWorkerAnswer
from etfarm.v1 import child_pb2, common_pb2, compile_pb2, report_pb2
from etfarm.v1.compile_pb2 import Compilation

COMPILED = ("compilation", "pte", "data", "stage_files")
MEASURED = ("latency", "interleaved", "operators", "compile.warnings", "numerics.judged")


def compiled(message: Message, fields: tuple[str, ...] = COMPILED) -> child_pb2.CompileResult:
    return decode(message.SerializeToString(), child_pb2.CompileResult, fields)


def measured(message: Message) -> report_pb2.Report:
    return decode(message.SerializeToString(), report_pb2.Report, MEASURED)


def warned(text: str) -> child_pb2.CompileResult:
    return child_pb2.CompileResult(compilation=Compilation(warnings=[compile_pb2.Warning(code="A", message=text)]))


def test_an_answer_is_read_as_it_was_sent() -> None:
    facts = compile_pb2.MethodFacts(
        inputs=[
            compile_pb2.ValueSpec(kind=common_pb2.VALUE_KIND_DOUBLE, value=compile_pb2.Scalar(number=math.inf)),
            compile_pb2.ValueSpec(kind=common_pb2.VALUE_KIND_NONE, value=compile_pb2.Scalar()),
        ],
        planned_bytes=[0, 64],
    )
    sent = child_pb2.CompileResult(
        compilation=Compilation(
            stages=[compile_pb2.Stage(stage="QUANTIZE", duration_ms=0.0, methods={"forward": 1.5})],
            facts=compile_pb2.ProgramFacts(methods={"forward": facts}),
        ),
        pte="model.pte", data={"w": "w.ptd"},
    )  # fmt: skip
    assert compiled(sent) == sent


def test_an_answer_that_is_too_large_or_no_message_is_refused() -> None:
    for data in (b" " * (MAX_BYTES + 1), b"\x0b" * 100_000, b"{}", b"\xff", b"\x0a\x7f"):
        with pytest.raises(BadWorkerAnswer):
            decode(data, child_pb2.CompileResult, COMPILED)


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        (("pte",), child_pb2.CompileResult(pte="a", etrecord="b")),
        (("compilation.stages",), child_pb2.CompileResult(compilation=Compilation(key="k"))),
        (("compilation.program.data",), child_pb2.CompileResult(compilation=Compilation(program={"digest": "0" * 64}))),
    ],
)
def test_a_field_that_the_task_does_not_answer_with_is_refused(fields: tuple[str, ...], sent: Message) -> None:
    with pytest.raises(BadWorkerAnswer, match="must not set"):
        compiled(sent, fields)


@pytest.mark.parametrize(
    "sent",
    [
        warned("a\0b"),
        warned("x" * (MAX_TEXT + 1)),
        child_pb2.CompileResult(pte="model\0.pte"),
        child_pb2.CompileResult(data={"w\0": "w.ptd"}),
        child_pb2.CompileResult(data={"w": "\0"}),
        child_pb2.CompileResult(compilation=Compilation(facts={"methods": {"f": {"operators": ["aten::add", "\0"]}}})),
        child_pb2.CompileResult(compilation=Compilation(stages=[{"stage": "QUANTIZE", "where": 77}])),
        child_pb2.CompileResult(compilation=Compilation(stages=[{"stage": "QUANTIZE", "methods": {"forward": math.nan}}])),
        child_pb2.CompileResult(compilation=Compilation(facts={"methods": {"f": {"inputs": [{"kind": -1}]}}})),
    ],
)
def test_a_value_that_no_child_gives_is_refused(sent: Message) -> None:
    with pytest.raises(BadWorkerAnswer) as caught:
        compiled(sent)
    assert len(caught.value.message) < 500 and "\0" not in caught.value.message


@pytest.mark.parametrize(
    "sent",
    [
        report_pb2.Report(interleaved=report_pb2.PairedRatio(ratio=math.inf)),
        report_pb2.Report(interleaved=report_pb2.PairedRatio(ratios=[1.0, math.nan])),
        report_pb2.Report(latency=report_pb2.Latency(p50_ci95_ns=[-math.inf, 1.0])),
        report_pb2.Report(operators=[report_pb2.OperatorRow(kind=99)]),  # type: ignore[arg-type]
        report_pb2.Report(verdict=report_pb2.Verdict(status=report_pb2.VERDICT_STATUS_VALID)),
        report_pb2.Report(etdump=common_pb2.Artifact(digest="0" * 64)),
        report_pb2.Report(compile=report_pb2.ReportCompile(cached=True)),
    ],
)
def test_a_report_that_no_analysis_gives_is_refused(sent: Message) -> None:
    with pytest.raises(BadWorkerAnswer):
        measured(sent)


def test_a_measurement_that_is_no_number_is_absent() -> None:
    row = report_pb2.OperatorRow(index=1, p50_ns=math.nan, mean_ns=2.0, share=-math.inf)
    result = measured(report_pb2.Report(latency={"p50_ns": math.inf, "p90_ns": 3.0}, operators=[row]))
    assert result == report_pb2.Report(latency={"p90_ns": 3.0}, operators=[report_pb2.OperatorRow(index=1, mean_ns=2.0)])


def test_the_number_of_entries_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_ENTRIES", 100)
    few = report_pb2.Report(operators=[report_pb2.OperatorRow(op_types=["a"] * 9)] * 10)
    assert measured(few) == few
    numbers = report_pb2.Report(operators=[report_pb2.OperatorRow(debug_handles=range(1_000))])
    assert measured(numbers) == numbers, "whole numbers are no entries"
    for many in (
        report_pb2.Report(operators=[report_pb2.OperatorRow()] * 101),
        report_pb2.Report(operators=[report_pb2.OperatorRow(op_types=["a"] * 101)]),
        report_pb2.Report(compile=report_pb2.ReportCompile(warnings=[compile_pb2.Warning()] * 101)),
    ):
        with pytest.raises(BadWorkerAnswer, match="at most 100 entries"):
            measured(many)


def test_an_unknown_field_is_dropped_at_any_depth() -> None:
    hidden = compile_pb2.Warning.FromString(b"\xfa\x7f\x03abc")
    result = compiled(child_pb2.CompileResult(compilation=Compilation(warnings=[hidden])))
    assert len(result.compilation.warnings) == 1 and b"abc" not in result.SerializeToString()


def test_one_class_has_the_reason_of_a_bad_answer() -> None:
    def below(kind: type[Any]) -> list[type[Any]]:
        return [kind, *(inner for sub in kind.__subclasses__() for inner in below(sub))]

    from etfarm.wire.errors import EtfarmError

    assert Findings and output_files  # their errors are loaded
    assert [kind for kind in below(EtfarmError) if getattr(kind, "reason", "") == "BAD_WORKER_ANSWER"] == [BadWorkerAnswer]
