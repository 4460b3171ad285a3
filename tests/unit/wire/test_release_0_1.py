"""Messages of etfarm 0.1 as databases and agents' data folders hold them: every field arrives in the current messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from etfarm.v1 import agent_pb2, common_pb2, compile_pb2, device_pb2, job_pb2, report_pb2
from etfarm.wire.messages import from_scalar
from etfarm.wire.release_0_1 import tables
from etfarm.wire.release_0_1.convert import converted, counterpart, is_unchanged, label
from etfarm.wire.release_0_1.messages import message_class
from etfarm.wire.release_0_1.reports import converted_report
from etfarm.wire.report import report_json
from etfarm.wire.series import Series, decode_samples, decode_trace_times

STORED: tuple[Any, ...] = (
    report_pb2.Report, compile_pb2.Compilation, job_pb2.JobSpec, job_pb2.Cell, job_pb2.JobEvent, agent_pb2.CandidateResult,
    agent_pb2.RunResult, agent_pb2.RunnerBundle, common_pb2.Error, device_pb2.Device,
)  # fmt: skip
"""The messages that databases and agents' data folders hold."""


def pairs() -> dict[tuple[str, str], tuple[Descriptor, Descriptor]]:
    """Every old message within the stored ones, with the current message of its place."""
    result: dict[tuple[str, str], tuple[Descriptor, Descriptor]] = {}
    waiting = [(message_class(kind.DESCRIPTOR.name).DESCRIPTOR, kind.DESCRIPTOR) for kind in STORED]
    while waiting:
        old, new = waiting.pop()
        if (old.full_name, new.full_name) in result or not old.full_name.startswith("etfarm."):
            continue
        result[old.full_name, new.full_name] = old, new
        for field in copied(old):
            other = counterpart(field, new)
            if field.message_type is not None:
                assert other.message_type is not None, label(field)
                waiting.append((field.message_type, other.message_type))
    return result


def copied(message: Descriptor) -> Iterator[FieldDescriptor]:
    """Yield the fields of an old message that are copied by themselves."""
    moved = {name for (holder, names) in tables.MOVED if holder == message.name for name in names}
    for field in message.fields:
        if field.name not in moved and label(field) not in tables.LEFT_OUT:
            yield field


def test_every_old_field_has_a_place() -> None:
    kept = 0
    for old, new in pairs().values():
        for field in copied(old):
            other = counterpart(field, new)  # raises for a field without a place
            assert other.is_repeated == field.is_repeated, label(field)
            if other.enum_type is None:
                assert other.type == field.type, label(field)
            elif field.enum_type is not None:
                values = {value.number: value.name for value in other.enum_type.values}
                assert all(values[value.number] == value.name for value in field.enum_type.values), label(field)
            else:
                assert field.type == field.TYPE_STRING, label(field)
            kept += 1
    assert kept > 300


def test_every_entry_of_a_table_is_a_field_of_an_old_message() -> None:
    labels = {label(field) for old, _ in pairs().values() for field in old.fields}
    moved = {f"{message}.{name}" for (message, names) in tables.MOVED for name in names}
    for named in (set(tables.RENAMED), set(tables.LEFT_OUT), moved):
        assert named <= labels
    assert not set(tables.LEFT_OUT) & moved


@pytest.mark.parametrize("kind", STORED, ids=lambda kind: str(kind.DESCRIPTOR.name))
def test_a_full_message_converts_and_an_empty_one_stays_empty(kind: Any) -> None:
    old_class = message_class(kind.DESCRIPTOR.name)
    assert converted(kind, b"") == kind()
    new = converted(kind, filled(old_class()).SerializeToString())
    assert new.ListFields()
    if is_unchanged(old_class.DESCRIPTOR, kind.DESCRIPTOR):
        assert new.SerializeToString(deterministic=True) == filled(old_class()).SerializeToString(deterministic=True)


def filled(message: Any) -> Any:
    """Return the message with every field set, maps under METHOD, lists of two."""
    for field in message.DESCRIPTOR.fields:
        target = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is not None:
                filled(target["METHOD"])
            else:
                target["METHOD"] = "text" if field.message_type.fields_by_name["value"].type == field.TYPE_STRING else 3
        elif field.message_type is not None and field.message_type.full_name == "google.protobuf.Timestamp":
            target.FromJsonString("2025-01-02T03:04:05Z")
        elif field.message_type is not None:
            for part in (target.add(), target.add()) if field.is_repeated else (target,):
                filled(part)
        elif field.is_repeated:
            target.extend([value_of(field)] * 2)
        elif field.containing_oneof is None or field.has_presence:
            setattr(message, field.name, value_of(field))
    return message


def value_of(field: FieldDescriptor) -> Any:
    values: dict[int, Any] = {field.TYPE_STRING: "text", field.TYPE_BOOL: True, field.TYPE_DOUBLE: 0.5, field.TYPE_ENUM: 1}
    return values.get(field.type, b"bytes" if field.type == field.TYPE_BYTES else 3)


def test_a_report_becomes_the_same_document() -> None:
    old = message_class("Report")(id="r", cell="c", recipe="xnnpack_fp32", state="SUCCEEDED")
    old.compile.program.digest, old.compile.program.size_bytes = "p", 1000
    old.compile.data["w"].size_bytes = 300
    old.compile.stages.add(stage="TORCH_EXPORT", where="CLIENT")
    old.compile.stages.add(stage="TO_EXECUTORCH", where="SERVER", duration_ms=2)
    old.compile.warnings.add(code="ONE_SAMPLE", message="One.")
    old.compile.stage_files["a.pt2"].digest = "s"
    old.latency.samples_ns.extend([5, 6, 7])
    old.profile.iterations = 2
    old.profile.times_ns.extend([20, 21])
    old.operators.add(index=0, name="add", times_ns=[9, 8])
    old.operators.add(index=1, name="mul")
    old.numerics.program.digest, old.numerics.program.size_bytes = "n", 12
    new, samples, times = converted_report(old.SerializeToString())
    assert samples is not None and times is not None
    document = report_json(new, Series(decode_samples(samples), decode_trace_times(times, 3)))
    assert document["state"] == "SUCCEEDED" and document["recipe"] == "xnnpack_fp32"
    compiled = document["compile"]
    assert (compiled["program"], compiled["data"]["w"]["size_bytes"]) == ({"digest": "p", "size_bytes": 1000}, 300)
    assert [(stage["stage"], stage["where"], stage["duration_ms"]) for stage in compiled["stages"]] == [
        ("TORCH_EXPORT", "CLIENT", None), ("TO_EXECUTORCH", "SERVER", 2.0),
    ]  # fmt: skip
    assert compiled["warnings"] == [{"code": "ONE_SAMPLE", "message": "One."}]
    assert compiled["stage_files"] == {"a.pt2": {"digest": "s", "size_bytes": 0}} and compiled["etrecord"] is None
    assert document["latency"]["samples_ns"] == [5, 6, 7]
    assert document["profile"]["times_ns"] == [20, 21]
    assert [row["times_ns"] for row in document["operators"]] == [[9, 8], None]
    assert document["numerics"]["program"] == {"digest": "n", "size_bytes": 12}


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [("float", "0.5", (common_pb2.VALUE_KIND_DOUBLE, 0.5)), ("int", "3", (common_pb2.VALUE_KIND_INT, 3)),
     ("bool", "true", (common_pb2.VALUE_KIND_BOOL, True)), ("str", '"a"', (common_pb2.VALUE_KIND_STRING, "a")),
     ("none", "null", (common_pb2.VALUE_KIND_NONE, None))],
)  # fmt: skip
def test_a_constant_input_keeps_its_value(kind: str, text: str, expected: tuple[Any, Any]) -> None:
    old = message_class("Compilation")()
    old.facts.methods["forward"].inputs.add(kind=kind, value=text)
    (spec,) = converted(compile_pb2.Compilation, old.SerializeToString()).facts.methods["forward"].inputs
    assert (spec.kind, from_scalar(spec.value)) == expected and spec.HasField("value")
