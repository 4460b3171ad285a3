"""Reports as JSON documents `etfarm.report/1`, a projection of the protobuf messages Report and Job.

Every key is present; values that were not measured or do not exist are null, never 0; integers are numbers; no Infinity, no NaN.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.timestamp_pb2 import Timestamp

from etfarm.v1 import common_pb2, job_pb2, report_pb2
from etfarm.wire.errors import EtfarmError, UserError
from etfarm.wire.report_keys import Json as Json
from etfarm.wire.report_keys import Key, Shape, Type, is_interval, keys_of, project
from etfarm.wire.series import Series, add_series
from etfarm.wire.words import word_of

SCHEMA: Final = "etfarm.report/1"

_BEYOND: Final = 1e300
"""Limit of numbers, far above any measured one; it prevents overflow to infinity, which JSON cannot represent."""

_BEYONDS: Final[Mapping[int, int]] = {FieldDescriptor.TYPE_INT32: 1 << 31, FieldDescriptor.TYPE_INT64: 1 << 63}
"""Limits of whole numbers, which fit into their field of the message."""

_JOB: Final = ("id", "name", "labels", "state", "submitted_at", "finished_at", "server_version")

ALWAYS: Final = {
    "etfarm.v1.Report": ("id", "state"),
    "etfarm.v1.ReportModel": ("name",),
    "etfarm.v1.ReportDevice": ("id", "name"),
    "etfarm.v1.Artifact": ("digest",),
    "etfarm.v1.Error": ("message",),
    "etfarm.v1.Warning": ("message",),
    "etfarm.v1.SourceLine": ("file",),
    "job": ("id", "state", "submitted_at"),
}
"""Required texts of each object, by which readers identify it."""

_OPERATORS: Final = {
    "etfarm.v1.Report": "operators",
    "etfarm.v1.Generation": "prefill_operators",
    "etfarm.v1.TracedEncoder": "operators",
}
"""The lists of operators by the object that has them."""

_TYPES: Final[dict[Type, tuple[type, ...]]] = {
    Type.TRUTH: (bool,), Type.NUMBER: (int, float), Type.TEXT: (str,), Type.INTEGER: (int,),
}  # fmt: skip

_REMEDY: Final = "Give a file that --json or `etfarm report export --format json` wrote."


def report_json(report: report_pb2.Report, series: Series | None = None) -> Json:
    """Return a REPORT with every key.

    Args:
        series: the values of each iteration; without them `samples_ns` is empty and `times_ns` is null.
    """
    written = project(report)
    if series is not None:
        add_series(written, series)
    return written


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
        "labels": dict(sorted(job.labels.items())),
        "state": word_of(job_pb2.JobState.DESCRIPTOR, job.state) or "UNSPECIFIED",
        "submitted_at": _instant(job.create_time),
        "finished_at": _instant(job.end_time) if job.HasField("end_time") else None,
        "server_version": job.server_version,
    }


def document(
    job: job_pb2.Job | None,
    reports: Iterable[report_pb2.Report],
    error: EtfarmError | None,
    series: Mapping[str, Series] | None = None,
) -> Json:
    """Return the document of `--json`: {schema, job, reports, error}.

    Args:
        series: the values of each iteration, by report id.
    """
    return {
        "schema": SCHEMA,
        "job": None if job is None else job_json(job),
        "reports": [report_json(report, (series or {}).get(report.id)) for report in reports],
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
    kept = [complete(report, f"reports[{place}]") for place, report in enumerate(reports)]
    job, ended = document.get("job"), document.get("error")
    if not all(part is None or isinstance(part, dict) for part in (job, ended)):
        raise BadDocument("Its job or its error is not an object.", _REMEDY)
    return {
        **document,
        "job": None if job is None else _completed_job(job),
        "reports": kept,
        "error": None if ended is None else _completed(ended, common_pb2.Error.DESCRIPTOR, "error"),
    }


def complete(report: Json, where: str = "report") -> Json:
    """Return a REPORT, validated and with every key; missing ones have empty values.

    Raises:
        BadDocument: a required text is missing, or a value has another type than its key.
    """
    full: Json = _completed(report, report_pb2.Report.DESCRIPTOR, where)
    return full


def _completed(value: Any, message: Descriptor, where: str) -> Any:
    """Return `value`, the object of a message, validated and with every key."""
    _require_type(dict, value, where)
    empty = _empty(message)
    full = {**empty, **{key: item for key, item in value.items() if item is not None}}
    for key in keys_of(message):
        present, at = value.get(key.name), f"{where}.{key.name}"
        if present is None:
            continue
        if key.shape is Shape.MAP:
            _require_type(dict, present, at)
            full[key.name] = {name: _item(key, item, f"{at}.{name}") for name, item in present.items()}
        elif key.shape is Shape.LIST:
            _require_type(list, present, at)
            if not present:  # the key's empty value is null where writers give null
                full[key.name] = empty[key.name]
                continue
            full[key.name] = [_item(key, item, f"{at}[{place}]") for place, item in enumerate(present)]
            if is_interval(key.field) and len(present) != 2:
                raise BadDocument(f"{at} is not a lower and an upper bound.", _REMEDY, where=at)
        else:
            full[key.name] = _item(key, present, at)
    _require_texts(full, ALWAYS.get(message.full_name, ()), where)
    _validate_relations(full, message, where)
    return full


def _empty(message: Descriptor) -> Json:
    return project(message_factory.GetMessageClass(message)())


def _validate_relations(full: Json, message: Descriptor, where: str) -> None:
    """Validate values that depend on others or on a range: the parents of operator rows, and ratios."""
    if (table := _OPERATORS.get(message.full_name)) is not None:
        indexes = {row["index"] for row in full[table] or ()}
        for place, row in enumerate(full[table] or ()):
            if row["parent"] is not None and row["parent"] not in indexes:
                at = f"{where}.{table}[{place}].parent"
                raise BadDocument(f"{at} is {row['parent']}, which is not the index of a row.", _REMEDY, where=at)
    if message is report_pb2.PairedRatio.DESCRIPTOR and not full["ratio"] > 0:
        raise BadDocument(
            f"{where}.ratio is {full['ratio']}, which is not a ratio of two times.", _REMEDY, where=f"{where}.ratio"
        )


def _require_type(kind: type, value: Any, at: str) -> None:
    if not isinstance(value, kind):
        raise BadDocument(f"{at} is not {'a list' if kind is list else 'an object'}.", _REMEDY, where=at)


def _item(key: Key, value: Any, at: str) -> Any:
    """Return a validated value of a key, list or map; objects have every key. Null is not allowed."""
    if key.message is None:
        _validate_value(key, value, at)
        return value
    return _completed(value, key.message, at)


def _completed_job(job: Json) -> Json:
    """Return a JOB with every key, as in `job_json`."""
    full = {**dict.fromkeys(_JOB), **job}
    full["labels"] = {} if full["labels"] is None else full["labels"]
    _require_type(dict, full["labels"], "job.labels")
    texts = {f"job.{key}": full[key] for key in _JOB if key != "labels" and full[key] is not None}
    for at, item in {**texts, **{f"job.labels.{key}": item for key, item in full["labels"].items()}}.items():
        if not isinstance(item, str):
            raise BadDocument(f"{at} is {json.dumps(item)[:40]}, not a text.", _REMEDY, where=at)
    _require_texts(full, ALWAYS["job"], "job")
    return full


def _require_texts(full: Json, names: Iterable[str], where: str) -> None:
    for name in names:
        if not full[name]:
            raise BadDocument(f"{where} has no {name}.", _REMEDY, where=f"{where}.{name}")


def _validate_value(key: Key, item: Any, at: str) -> None:
    """Validate the type and range of a value."""
    allowed = _TYPES[key.type]
    has_type = isinstance(item, allowed) and isinstance(item, bool) == (allowed == (bool,))
    if not has_type or (int in allowed and not abs(item) < _BEYONDS.get(key.field.type, _BEYOND)):
        raise BadDocument(f"{at} is {json.dumps(item)[:40]}, not {key.type.value}.", _REMEDY, where=at)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


def _instant(stamp: Timestamp) -> str:
    return stamp.ToJsonString()
