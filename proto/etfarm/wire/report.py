"""Reports as the JSON that users keep, `etfarm.report/1`: our own projection of the contract's Report and Job.

Every key is present; what was not measured or does not exist is null, never 0; integers are numbers; no Infinity, no NaN.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, Final

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from etfarm.v1 import common_pb2, job_pb2, report_pb2
from etfarm.wire.errors import EtfarmError

SCHEMA: Final = "etfarm.report/1"

_LEFT_OUT: Final = {"etfarm.v1.Report": {"outputs", "samples", "etdump", "created_at"}}
"""Fields that the JSON does not have: where raw material lies in a server's store."""

_NULL_WHEN_EMPTY: Final = {
    "etfarm.v1.Report": {"accuracy", "operators", "numeric_gap"},
    "etfarm.v1.Memory": {"planned_bytes"},
    "etfarm.v1.Latency": {"p50_ci95_ns"},
}
"""Lists that stand for a measurement: none taken is null. Every other empty list is []."""

_ENUM_PREFIXES: Final = {
    "etfarm.v1.Fault": "FAULT_",
    "etfarm.v1.OperatorKind": "OPERATOR_KIND_",
    "etfarm.v1.VerdictStatus": "VERDICT_STATUS_",
}

Json = dict[str, Any]


def report_json(report: report_pb2.Report) -> Json:
    """One REPORT, with every key."""
    return _message(report)


def error_json(error: EtfarmError | common_pb2.Error) -> Json:
    """One ERROR: {fault, reason, message, remedy, stage, metadata}; null where there is none."""
    if isinstance(error, EtfarmError):
        fields = (error.fault.value, error.reason, error.message, error.remedy, error.stage, error.metadata)
    else:
        fault = common_pb2.Fault.Name(error.fault).removeprefix("FAULT_").removeprefix("UNSPECIFIED")
        fields = (fault, error.reason, error.message, error.remedy, error.stage, dict(error.metadata))
    keys = ("fault", "reason", "message", "remedy", "stage", "metadata")
    return {key: (None if value == "" else value) for key, value in zip(keys, fields, strict=True)}


def job_json(job: job_pb2.Job) -> Json:
    """One JOB: {id, name, labels, state, submitted_at, finished_at, server_version}; instants in ISO 8601, UTC."""
    return {
        "id": job.id,
        "name": job.name or None,
        "labels": dict(job.labels),
        "state": job_pb2.JobState.Name(job.state).removeprefix("JOB_STATE_"),
        "submitted_at": _instant(job.submitted_at),
        "finished_at": _instant(job.finished_at) if job.HasField("finished_at") else None,
        "server_version": job.server_version,
    }


def document(job: job_pb2.Job | None, reports: Iterable[report_pb2.Report], error: EtfarmError | None) -> Json:
    """What `--json` holds: {schema, job, reports, error}."""
    return {
        "schema": SCHEMA,
        "job": None if job is None else job_json(job),
        "reports": [report_json(report) for report in reports],
        "error": None if error is None else error_json(error),
    }


def dumps(document: Json) -> str:
    """Strict JSON text of a document, indented, with a final newline."""
    return json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _instant(stamp: Timestamp) -> str:
    return stamp.ToJsonString()


def _message(message: Message) -> Json:
    name = message.DESCRIPTOR.full_name
    if isinstance(message, common_pb2.Error):
        return error_json(message)
    left_out = _LEFT_OUT.get(name, ())
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields if field.name not in left_out}


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.is_repeated:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            of_messages = field.message_type.fields_by_name["value"].message_type is not None
            return {key: _message(value[key]) if of_messages else value[key] for key in sorted(value)}
        if not value and field.name in _NULL_WHEN_EMPTY.get(message.DESCRIPTOR.full_name, ()):
            return None
        return [_single(field, item) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    # A text of the contract that is not `optional` is empty where there is none.
    if value == "" and not field.has_presence:
        return None
    return _single(field, value)


def _single(field: Any, value: Any) -> Any:
    if isinstance(value, Timestamp):
        return _instant(value)
    if isinstance(value, Message):
        return _message(value)
    if field.enum_type is not None:
        name = field.enum_type.values_by_number[value].name.removeprefix(_ENUM_PREFIXES[field.enum_type.full_name])
        return None if name == "UNSPECIFIED" else name
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
