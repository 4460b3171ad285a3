"""A document's operators and samples as tables, for spreadsheets and data frames. These are pure functions.

Each row identifies its report, so that the tables of a whole job, or of several jobs, can be concatenated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

Json = Mapping[str, Any]


class Kind(Enum):
    """The type of a column's non-null values."""

    TEXT = "text"
    INTEGER = "integer"
    NUMBER = "number"
    TRUTH = "truth"
    TEXTS = "texts"
    INTEGERS = "integers"


@dataclass(frozen=True)
class Table:
    """Columns in order, and one tuple per row."""

    name: str
    columns: Mapping[str, Kind]
    rows: Iterator[tuple[Any, ...]]


IDENTITY: Final = {
    "job": Kind.TEXT, "report": Kind.TEXT, "cell": Kind.TEXT, "model": Kind.TEXT, "recipe": Kind.TEXT, "method": Kind.TEXT,
    "device": Kind.TEXT, "threads": Kind.INTEGER,
}  # fmt: skip
"""Columns that identify a row's report."""

_ROW: Final = {
    "index": Kind.INTEGER, "kind": Kind.TEXT, "parent": Kind.INTEGER, "name": Kind.TEXT, "op_types": Kind.TEXTS,
    "backend": Kind.TEXT, "delegated": Kind.TRUTH, "p50_ns": Kind.NUMBER, "mean_ns": Kind.NUMBER, "p10_ns": Kind.NUMBER,
    "p90_ns": Kind.NUMBER, "resolution_ns": Kind.NUMBER, "share": Kind.NUMBER, "start_ns": Kind.NUMBER,
    "duration_ns": Kind.NUMBER, "reconstructed": Kind.TRUTH, "module": Kind.TEXT,
}  # fmt: skip
_SOURCE: Final = {"file": Kind.TEXT, "line": Kind.INTEGER, "code": Kind.TEXT}
_LAST: Final = {
    "aligned": Kind.TRUTH, "unaligned_reason": Kind.TEXT, "instruction_id": Kind.INTEGER, "debug_handles": Kind.INTEGERS,
    "input_rows": Kind.INTEGERS, "times_ns": Kind.INTEGERS, "mean_low_ns": Kind.NUMBER, "mean_high_ns": Kind.NUMBER,
    "source_reason": Kind.TEXT,
}  # fmt: skip
_ENDS: Final = ("mean_low_ns", "mean_high_ns")
"""Columns of the ends of the row's `mean_ci95_ns`."""

WHAT: Final = ("operators", "samples")
"""The names of the tables."""


def operators(document: Json) -> Table:
    """Return a row per operator, as in REPORT.operators; `source` is its file, line and code."""
    return Table("operators", {**IDENTITY, **_ROW, **_SOURCE, **_LAST}, _operators(document))


def samples(document: Json) -> Table:
    """Return a row per timed iteration, from 0 in the order measured, with its latency in nanoseconds."""
    return Table("samples", {**IDENTITY, "iteration": Kind.INTEGER, "latency_ns": Kind.INTEGER}, _samples(document))


def table(document: Json, what: str) -> Table:
    """Return the table with a name in WHAT."""
    return {"operators": operators, "samples": samples}[what](document)


def _operators(document: Json) -> Iterator[tuple[Any, ...]]:
    for report in document["reports"]:
        of = identity_of(document, report)
        for row in report["operators"] or ():
            source = row["source"] or dict.fromkeys(_SOURCE)
            ends = dict(zip(_ENDS, row["mean_ci95_ns"] or (None, None), strict=True))
            last = (ends[key] if key in ends else row[key] for key in _LAST)
            yield (*of, *(row[key] for key in _ROW), *(source[key] for key in _SOURCE), *last)


def _samples(document: Json) -> Iterator[tuple[Any, ...]]:
    for report in document["reports"]:
        of = identity_of(document, report)
        for iteration, latency_ns in enumerate(report["latency"]["samples_ns"] if report["latency"] else ()):
            yield (*of, iteration, latency_ns)


def identity_of(document: Json, report: Json) -> tuple[Any, ...]:
    """Return the values of the columns `IDENTITY` for the rows of a report."""
    job, model, device = document["job"] or {}, report["model"] or {}, report["device"] or {}
    return (
        job.get("id"), report["id"], report["cell"], model.get("name"), report["recipe"], report["method"],
        device.get("name") or device.get("id"), report["threads"],
    )  # fmt: skip
