"""Reports as JSON documents `etfarm.report/1`, a projection of the protobuf messages Report and Job.

Every key is present; values that were not measured or do not exist are null, never 0; integers are numbers; no Infinity, no NaN.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, Final

from google.protobuf import message_factory
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from etfarm.v1 import common_pb2, compile_pb2, job_pb2, report_pb2
from etfarm.wire.errors import EtfarmError, UserError
from etfarm.wire.messages import KEYS, from_scalar
from etfarm.wire.words import word_of

SCHEMA: Final = "etfarm.report/1"

_LEFT_OUT: Final = {"etfarm.v1.Report": {"outputs", "samples", "etdump", "numerics_etdump", "numerics_debug", "created_at"}}
"""Fields that the JSON omits: references to raw data in a server's store."""

_NULL_WHEN_EMPTY: Final = {
    "etfarm.v1.Report": {"accuracy", "operators", "numeric_gap"},
    "etfarm.v1.Memory": {"planned_bytes"},
    "etfarm.v1.Latency": {"p50_ci95_ns"},
    "etfarm.v1.PairedRatio": {"ratio_ci95"},
    "etfarm.v1.OperatorRow": {"times_ns"},
    "etfarm.v1.Profile": {"times_ns"},
    "etfarm.v1.ReportCompile": {"modules"},
    "etfarm.v1.ReportInputs": {"tensors"},
    "etfarm.v1.LatencyChange": {"ratio_ci95"},
    "etfarm.v1.ComparedPair": {"delegation"},
}
"""Lists and maps of measurements, which are null if not measured. Every other empty list is [], every other map {}."""

_BEYOND: Final = 1e300
"""Limit of numbers, far above any measured one; it prevents overflow to infinity, which JSON cannot represent."""

_JOB: Final = ("id", "name", "labels", "state", "submitted_at", "finished_at", "server_version")

_ALWAYS: Final = {
    "etfarm.v1.Report": ("id", "state"),
    "etfarm.v1.ReportModel": ("name",),
    "etfarm.v1.ReportDevice": ("id", "name"),
    "etfarm.v1.ProgramSize": ("digest",),
    "etfarm.v1.Error": ("message",),
    "etfarm.v1.Warning": ("message",),
    "etfarm.v1.SourceLine": ("file",),
    "job": ("id", "state", "submitted_at"),
}
"""Required texts of each object, by which readers identify it."""

_INTERVALS: Final = {"p50_ci95_ns", "ratio_ci95"}
"""Lists that hold a lower and an upper bound, or are empty."""

_REMEDY: Final = "Give a file that --json or `etfarm report export --format json` wrote."

Json = dict[str, Any]


def report_json(report: report_pb2.Report) -> Json:
    """Return a REPORT with every key."""
    return message_json(report)


def error_json(error: EtfarmError | common_pb2.Error) -> Json:
    """Return an ERROR: {fault, reason, message, remedy, stage, metadata}; empty texts are null."""
    if isinstance(error, EtfarmError):
        fields = (error.fault.value, error.reason, error.message, error.remedy, error.stage, error.metadata)
    else:
        fault = word_of(common_pb2.Fault.DESCRIPTOR, error.fault) or ""
        fields = (fault, error.reason, error.message, error.remedy, error.stage, dict(error.metadata))
    keys = ("fault", "reason", "message", "remedy", "stage", "metadata")
    return {key: (None if value == "" else value) for key, value in zip(keys, fields, strict=True)}


def job_json(job: job_pb2.Job) -> Json:
    """Return a JOB: {id, name, labels, state, submitted_at, finished_at, server_version}; instants in ISO 8601, UTC."""
    return {
        "id": job.id,
        "name": job.name or None,
        "labels": dict(job.labels),
        "state": word_of(job_pb2.JobState.DESCRIPTOR, job.state) or "UNSPECIFIED",
        "submitted_at": _instant(job.create_time),
        "finished_at": _instant(job.end_time) if job.HasField("end_time") else None,
        "server_version": job.server_version,
    }


def document(job: job_pb2.Job | None, reports: Iterable[report_pb2.Report], error: EtfarmError | None) -> Json:
    """Return the document of `--json`: {schema, job, reports, error}."""
    return {
        "schema": SCHEMA,
        "job": None if job is None else job_json(job),
        "reports": [report_json(report) for report in reports],
        "error": None if error is None else error_json(error),
    }


def dumps(document: Json) -> str:
    """Return a document as strict JSON, indented, with a final newline."""
    return json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


class BadDocument(UserError):
    """A text that is not a document etfarm.report/1."""

    reason = "BAD_REPORT_DOCUMENT"


def loads(text: str | bytes) -> Json:
    """Return the document in `text`, as written by `dumps`. Keys that an older version lacked are added with empty values.

    Raises:
        BadDocument: the text is not JSON or not an etfarm.report/1, or a value has another type than its field.
    """
    try:
        document = json.loads(text, parse_constant=_refuse)
        json.dumps(document, ensure_ascii=False).encode()  # a lone surrogate cannot be encoded
    except (ValueError, RecursionError) as error:
        raise BadDocument(f"This is not JSON: {error}", _REMEDY) from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        what = f"Its schema is {schema!r}" if isinstance(schema, str) else "It names no schema"
        raise BadDocument(f"{what}, not {SCHEMA}.", _REMEDY, schema=schema or "")
    reports = document.get("reports")
    if not isinstance(reports, list):
        raise BadDocument("It has no list of reports.", _REMEDY)
    kept = [_completed(report, report_pb2.Report, f"reports[{place}]") for place, report in enumerate(reports)]
    job, ended = document.get("job"), document.get("error")
    if not all(part is None or isinstance(part, dict) for part in (job, ended)):
        raise BadDocument("Its job or its error is not an object.", _REMEDY)
    return {
        **document,
        "job": None if job is None else _completed_job(job),
        "reports": kept,
        "error": None if ended is None else _completed(ended, common_pb2.Error, "error"),
    }


def _completed(value: Any, kind: type[Message], where: str) -> Any:
    """Return `value`, the JSON of a message, validated and with every key."""
    _require_type(dict, value, where)
    full = {**message_json(kind()), **{key: item for key, item in value.items() if item is not None}}
    for field in kind.DESCRIPTOR.fields:
        present, inner, at = value.get(field.name), field.message_type, f"{where}.{field.name}"
        if present is None:
            continue
        if inner is not None and inner.GetOptions().map_entry:
            _require_type(dict, present, at)
            values = inner.fields_by_name["value"]
            full[field.name] = {key: _item(values, item, f"{at}.{key}") for key, item in present.items()}
        elif field.is_repeated:
            _require_type(list, present, at)
            full[field.name] = [_item(field, item, f"{at}[{place}]") for place, item in enumerate(present)]
            if field.name in _INTERVALS and len(present) not in (0, 2):
                raise BadDocument(f"{at} is not a lower and an upper bound.", _REMEDY, where=at)
        else:
            full[field.name] = _item(field, present, at)
    _require_texts(full, _ALWAYS.get(kind.DESCRIPTOR.full_name, ()), where)
    _validate_relations(full, kind, where)
    return full


def _validate_relations(full: Json, kind: type[Message], where: str) -> None:
    """Validate values that depend on others or on a range: the parents of operator rows, and ratios."""
    if kind is report_pb2.Report:
        indexes = {row["index"] for row in full["operators"] or ()}
        for place, row in enumerate(full["operators"] or ()):
            if row["parent"] is not None and row["parent"] not in indexes:
                at = f"{where}.operators[{place}].parent"
                raise BadDocument(f"{at} is {row['parent']}, which is not the index of a row.", _REMEDY, where=at)
    if kind is report_pb2.PairedRatio and not full["ratio"] > 0:
        raise BadDocument(
            f"{where}.ratio is {full['ratio']}, which is not a ratio of two times.", _REMEDY, where=f"{where}.ratio"
        )


def _require_type(kind: type, value: Any, at: str) -> None:
    if not isinstance(value, kind):
        raise BadDocument(f"{at} is not {'a list' if kind is list else 'an object'}.", _REMEDY, where=at)


def _item(field: Any, value: Any, at: str) -> Any:
    """Return a validated value of a field, list or map; objects have every key. Null is not allowed."""
    if field.message_type in (None, Timestamp.DESCRIPTOR):
        _validate_value(field, value, at)
        return value
    return _completed(value, message_factory.GetMessageClass(field.message_type), at)


def _completed_job(job: Json) -> Json:
    """Return a JOB with every key, as in `job_json`."""
    full = {**dict.fromkeys(_JOB), **job}
    full["labels"] = {} if full["labels"] is None else full["labels"]
    _require_type(dict, full["labels"], "job.labels")
    texts = {f"job.{key}": full[key] for key in _JOB if key != "labels" and full[key] is not None}
    for at, item in {**texts, **{f"job.labels.{key}": item for key, item in full["labels"].items()}}.items():
        if not isinstance(item, str):
            raise BadDocument(f"{at} is {json.dumps(item)[:40]}, not a text.", _REMEDY, where=at)
    _require_texts(full, _ALWAYS["job"], "job")
    return full


def _require_texts(full: Json, names: Iterable[str], where: str) -> None:
    for name in names:
        if not full[name]:
            raise BadDocument(f"{where} has no {name}.", _REMEDY, where=f"{where}.{name}")


def _validate_value(field: Any, item: Any, at: str) -> None:
    """Validate the type and range of a value."""
    types: dict[int, tuple[type, ...]] = {field.TYPE_BOOL: (bool,), field.TYPE_DOUBLE: (int, float)}
    numbers: tuple[type, ...] = (str,) if field.type in (field.TYPE_STRING, field.TYPE_ENUM, field.TYPE_MESSAGE) else (int,)
    allowed = types.get(field.type, numbers)
    has_type = isinstance(item, allowed) and isinstance(item, bool) == (allowed == (bool,))
    if not has_type or (int in allowed and not abs(item) < _BEYOND):
        wanted = {bool: "true or false", str: "a text"}.get(allowed[0], "a number" if float in allowed else "a whole number")
        raise BadDocument(f"{at} is {json.dumps(item)[:40]}, not {wanted}.", _REMEDY, where=at)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


def _instant(stamp: Timestamp) -> str:
    return stamp.ToJsonString()


def message_json(message: Message) -> Json:
    """Return the object of a message, with every key."""
    name = message.DESCRIPTOR.full_name
    if isinstance(message, common_pb2.Error):
        return error_json(message)
    left_out, keys = _LEFT_OUT.get(name, ()), KEYS.get(name, {})
    fields = [field for field in message.DESCRIPTOR.fields if field.name not in left_out]
    return {keys.get(field.name, field.name): _field(message, field) for field in fields}


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.is_repeated:
        if not value and field.name in _NULL_WHEN_EMPTY.get(message.DESCRIPTOR.full_name, ()):
            return None
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            of_messages = field.message_type.fields_by_name["value"].message_type is not None
            return {key: message_json(value[key]) if of_messages else value[key] for key in sorted(value)}
        return [_single(field, item) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    # A string field that is not `optional` is empty if absent.
    if value == "" and not field.has_presence:
        return None
    return _single(field, value)


def _single(field: Any, value: Any) -> Any:
    if isinstance(value, Timestamp):
        return _instant(value)
    if isinstance(value, compile_pb2.Scalar):
        value = from_scalar(value)
    if isinstance(value, Message):
        return message_json(value)
    if field.enum_type is not None:
        return word_of(field.enum_type, value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
