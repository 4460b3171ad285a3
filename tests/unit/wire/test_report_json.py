"""The JSON that users keep: every key is there, null means not measured, integers are numbers, and it is strict JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from etfarm.v1 import common_pb2, compile_pb2, job_pb2, report_pb2
from etfarm.wire import report as projection
from etfarm.wire.errors import Fault, error_of
from etfarm.wire.report_keys import LEFT_OUT, project
from etfarm.wire.series import Series
from tests.support.new_fields import with_new_fields
from tests.support.report_keys import assert_keys, documented_keys


def filled(message: Message, number: float = 3.0) -> Message:
    """Return the message with every field set, maps under METHOD or 3, lists of one."""
    for field in message.DESCRIPTOR.fields:
        target = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            of = field.message_type.fields_by_name["value"]
            key: Any = "METHOD" if _type(field.message_type.fields_by_name["key"]) == "string" else 3
            if of.message_type is None:
                target[key] = "text" if _type(of) == "string" else 3
            else:
                filled(target[key], number)
        elif field.message_type is not None:
            if field.message_type.full_name == "google.protobuf.Timestamp":
                target.FromJsonString("2025-01-02T03:04:05Z")
            else:
                filled(target.add() if field.is_repeated else target, number)
        else:
            value: Any = {"string": "text", "bool": True, "double": number, "enum": 1}.get(_type(field), 3)
            target.append(value) if field.is_repeated else setattr(message, field.name, value)
    return message


def _type(field: Any) -> str:
    kinds = {field.TYPE_STRING: "string", field.TYPE_BOOL: "bool", field.TYPE_DOUBLE: "double", field.TYPE_ENUM: "enum"}
    return kinds.get(field.type, "int")


def test_a_full_report_has_every_key_and_no_other() -> None:
    report = projection.report_json(filled(report_pb2.Report()))  # type: ignore[arg-type]
    assert_keys(report)
    for name in ("stages", "warnings"):  # one each of the compilation and of the run
        first, second = report["compile"][name]
        assert first == second


COMPILE = report_pb2.ReportCompile.DESCRIPTOR
COMPILATION = compile_pb2.Compilation.DESCRIPTOR


@pytest.mark.parametrize(
    "field",
    [field for field in (*COMPILE.fields, *COMPILATION.fields) if field.name != "compilation"],
    ids=lambda field: field.name,
)
def test_each_field_of_a_compilation_is_in_the_report_or_left_out_by_name(field: FieldDescriptor) -> None:
    run: Any = filled(report_pb2.ReportCompile())
    before = project(run)
    holder = run if field.containing_type is COMPILE else run.compilation
    holder.ClearField(field.name)
    assert (project(run) == before) is (field.name in LEFT_OUT[COMPILE.full_name])


def test_a_new_field_of_a_compilation_is_in_the_report() -> None:
    run = with_new_fields(COMPILE, COMPILE, COMPILATION)()
    before = [*documented_keys("ReportCompile")]
    assert project(run) == project(report_pb2.ReportCompile()) | {"new_reportcompile": None, "new_compilation": None}
    run.new_reportcompile, run.compilation.new_compilation = "of the run", "of the compilation"
    after = project(run)
    assert [*after] == [*before, "new_reportcompile", "new_compilation"]
    assert (after["new_reportcompile"], after["new_compilation"]) == ("of the run", "of the compilation")


def test_an_empty_report_has_every_top_key_and_measures_nothing() -> None:
    report = projection.report_json(report_pb2.Report(id="r", cell="c", state=common_pb2.CELL_STATE_CANCELLED))
    assert list(report) == list(documented_keys())
    assert {key: value for key, value in report.items() if value is not None} == {
        "id": "r",
        "cell": "c",
        "state": "CANCELLED",
        "timeline": [],
        "runs": [],
    }


def test_what_is_absent_within_is_null_and_never_zero_or_empty() -> None:
    message = report_pb2.Report()
    for name in ("model", "device", "runner", "compile", "latency", "load", "memory", "verdict", "telemetry"):
        getattr(message, name).SetInParent()
    message.operators.add(index=0)
    message.accuracy.add(output="0")
    message.compile.compilation.toolchain.SetInParent()
    report = projection.report_json(message)
    assert report["latency"] == {**dict.fromkeys(documented_keys("Latency")), "samples_ns": []}
    assert report["load"] == dict.fromkeys(documented_keys("Load"))
    assert report["memory"] == dict.fromkeys(documented_keys("Memory"))
    lists: dict[str, Any] = {"series": [], "settings": [], "waits": []}
    assert report["telemetry"] == dict.fromkeys(documented_keys("RunTelemetry")) | lists
    assert report["verdict"] == {"status": None, "reasons": []}
    assert report["device"]["soc"] is None
    assert report["runner"] == dict.fromkeys(documented_keys("Runner"))
    assert report["compile"]["stages"] == report["compile"]["warnings"] == []
    assert report["compile"]["delegation"] == {}
    assert report["compile"]["etrecord"] is None
    assert report["compile"]["toolchain"]["torchao"] is None
    (row,) = report["operators"]
    nulls = ("kind", "parent", "backend", "p50_ns", "mean_ns", "resolution_ns", "share", "module", "source", "aligned")
    assert {key: row[key] for key in nulls} == dict.fromkeys(nulls)
    assert (row["index"], row["instruction_id"], row["op_types"], row["debug_handles"]) == (0, None, [], [])
    (accuracy,) = report["accuracy"]
    assert {accuracy[key] for key in ("dtype", "equal", "max_abs_error", "mean_abs_error", "cosine", "sqnr_db")} == {None}


def test_a_zero_that_was_measured_stays_zero() -> None:
    message = report_pb2.Report(threads=0)
    message.load.load_ns = 0
    message.telemetry.involuntary_switches = 0
    message.operators.add(index=0, parent=0, share=0.0, instruction_id=0, aligned=False, delegated=False, module="")
    report = projection.report_json(message)
    assert report["threads"] == 0
    assert report["load"]["load_ns"] == 0
    assert report["telemetry"]["involuntary_switches"] == 0
    (row,) = report["operators"]
    assert [row[key] for key in ("parent", "share", "instruction_id", "aligned", "delegated", "module")] == [
        0,
        0,
        0,
        False,
        False,
        "",
    ]


def test_integers_stay_integers_beyond_what_a_double_holds() -> None:
    message = report_pb2.Report()
    message.id = "r"
    message.latency.SetInParent()
    message.memory.peak_rss_bytes = 2**62 + 1
    again = json.loads(projection.dumps(projection.document(None, [message], None, {"r": Series([2**53 + 1, 7])})))["reports"][0]
    assert again["latency"]["samples_ns"] == [2**53 + 1, 7]
    assert again["memory"]["peak_rss_bytes"] == 2**62 + 1
    assert all(type(sample) is int for sample in again["latency"]["samples_ns"])


def test_enums_are_their_words() -> None:
    message = report_pb2.Report()
    for kind in ("OPERATOR", "DELEGATE", "KERNEL", "REST"):
        message.operators.add(kind=report_pb2.OperatorKind.Value(f"OPERATOR_KIND_{kind}"))
    message.verdict.status = report_pb2.VERDICT_STATUS_NOT_BENCHMARKABLE
    message.error.fault = common_pb2.FAULT_DEVICE
    report = projection.report_json(message)
    assert [row["kind"] for row in report["operators"]] == ["OPERATOR", "DELEGATE", "KERNEL", "REST"]
    assert report["verdict"]["status"] == "NOT_BENCHMARKABLE"
    assert report["error"]["fault"] == "DEVICE"


@given(st.sampled_from([math.nan, math.inf, -math.inf]))
@settings(max_examples=3)
def test_what_is_no_number_is_null(number: float) -> None:
    report = filled(report_pb2.Report(), number)
    text = projection.dumps(projection.document(None, [report], None))  # type: ignore[list-item]

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    again = json.loads(text, parse_constant=refuse)["reports"][0]
    assert again["accuracy"][0]["sqnr_db"] is None
    assert again["latency"]["p50_ci95_ns"] == [None]
    assert again["verdict"]["reasons"][0]["measured"] is None


def test_an_error_is_the_same_from_the_wire_and_from_an_exception() -> None:
    expected = {"fault": "USER", "reason": "BAD", "message": "No.", "remedy": None, "stage": None, "metadata": {"a": "1"}}
    assert projection.error_json(error_of(Fault.USER, "BAD", "No.", metadata={"a": "1"})) == expected
    text = common_pb2.Error(fault=common_pb2.FAULT_USER, reason="BAD", message="No.", metadata={"a": "1"})
    assert projection.error_json(text) == expected
    assert projection.error_json(common_pb2.Error(message="No."))["fault"] is None


@pytest.mark.parametrize("state", ["QUEUED", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED"])
def test_a_job_has_its_keys(state: str) -> None:
    job = job_pb2.Job(id="j", labels={"k": "v"}, state=job_pb2.JobState.Value(f"JOB_STATE_{state}"), server_version="1")
    job.create_time.FromJsonString("2025-01-02T03:04:05.6Z")
    assert projection.job_json(job) == {
        "id": "j", "name": None, "labels": {"k": "v"}, "state": state, "submitted_at": "2025-01-02T03:04:05.600Z",
        "finished_at": None, "server_version": "1",
    }  # fmt: skip
    job.name = "n"
    job.end_time.FromJsonString("2025-01-02T03:04:06Z")
    assert projection.job_json(job)["name"] == "n"
    assert projection.job_json(job)["finished_at"] == "2025-01-02T03:04:06Z"


def test_the_document_has_its_four_keys_on_failure_too() -> None:
    failed = projection.document(None, [], error_of(Fault.FARM, "SERVER_UNREACHABLE", "No answer.", "Start it."))
    assert list(failed) == ["schema", "job", "reports", "error"]
    assert failed["schema"] == "etfarm.report/1"
    assert failed["job"] is None
    assert failed["reports"] == []
    assert failed["error"]["reason"] == "SERVER_UNREACHABLE"
    assert projection.document(job_pb2.Job(id="j"), [report_pb2.Report()], None)["error"] is None
    assert projection.dumps(failed).endswith("}\n")
