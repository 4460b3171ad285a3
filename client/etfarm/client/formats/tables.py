"""A document's operators and samples as tables, for spreadsheets and data frames. These are pure functions.

Each row identifies its report, so that the tables of a whole job, or of several jobs, can be concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from etfarm.wire.generation import METRICS

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

_POINT: Final = {
    "prompt_tokens": Kind.INTEGER, "depth": Kind.INTEGER, "generated_tokens": Kind.INTEGER, "repetitions": Kind.INTEGER,
    "ttft_ns": Kind.NUMBER, "ttft_low_ns": Kind.NUMBER, "ttft_high_ns": Kind.NUMBER, "prefill_tokens_per_s": Kind.NUMBER,
    "prefill_low": Kind.NUMBER, "prefill_high": Kind.NUMBER, "decode_tokens_per_s": Kind.NUMBER, "decode_low": Kind.NUMBER,
    "decode_high": Kind.NUMBER, "verdict": Kind.TEXT, "tokens_equal": Kind.TRUTH,
}  # fmt: skip

_PART: Final = {
    "prompt_tokens": Kind.INTEGER, "depth": Kind.INTEGER, "part": Kind.TEXT, "prefill_executions": Kind.INTEGER,
    "prefill_ns": Kind.NUMBER, "prefill_low_ns": Kind.NUMBER, "prefill_high_ns": Kind.NUMBER, "prefill_share": Kind.NUMBER,
    "decode_executions": Kind.INTEGER, "decode_ns": Kind.NUMBER, "decode_low_ns": Kind.NUMBER, "decode_high_ns": Kind.NUMBER,
    "decode_share": Kind.NUMBER,
}  # fmt: skip
_LOGITS: Final = {
    "reference": Kind.TEXT, "tokens": Kind.INTEGER, "top1_agreement": Kind.NUMBER, "logits_tokens": Kind.INTEGER,
    "sqnr_db": Kind.NUMBER, "max_abs_error": Kind.NUMBER, "kl_divergence": Kind.NUMBER, "perplexity": Kind.NUMBER,
    "perplexity_ratio": Kind.NUMBER, "generated_tokens": Kind.INTEGER,
}  # fmt: skip
"""Columns of the table of logits that have the name of their key. `perplexity` is the reference's."""
_FIRST: Final = {
    "first_difference": Kind.INTEGER, "first_token": Kind.INTEGER, "first_reference_token": Kind.INTEGER,
    "first_gap": Kind.NUMBER,
}  # fmt: skip
"""Columns of the first generated token that differs from the reference's."""
_DEVICE: Final = {
    "device_tokens": Kind.INTEGER, "is_text": Kind.TRUTH, "device_perplexity": Kind.NUMBER, "perplexity_tokens": Kind.INTEGER,
}  # fmt: skip

WHAT: Final = ("operators", "samples", "generation", "tokens", "parts", "logits")
"""The names of the tables."""


def present(document: Json) -> tuple[str, ...]:
    """Return the names of the tables that a document can fill: without a language model, those of generated text are left out.

    `parts` requires a model of several methods, `logits` an accuracy that was measured.
    """
    generated = [report["generation"] for report in document["reports"] if report["generation"]]
    has_parts = any(point["parts"] for each in generated for point in each["points"])
    has_logits = any(each["accuracy"] for each in generated)
    absent = {"parts": not has_parts, "logits": not has_logits, "generation": not generated, "tokens": not generated}
    return tuple(what for what in WHAT if not absent.get(what))


def table(document: Json, what: str) -> Table:
    """Return the table with a name in WHAT."""
    columns, rows = _TABLES[what]
    return Table(what, {**IDENTITY, **columns}, rows(document))


def _operators(document: Json) -> Iterator[tuple[Any, ...]]:
    """Yield a row per operator, as in REPORT.operators; `source` is its file, line and code."""
    for report in document["reports"]:
        of = identity_of(document, report)
        for row in report["operators"] or ():
            source = row["source"] or dict.fromkeys(_SOURCE)
            ends = dict(zip(_ENDS, row["mean_ci95_ns"] or (None, None), strict=True))
            last = (ends[key] if key in ends else row[key] for key in _LAST)
            yield (*of, *(row[key] for key in _ROW), *(source[key] for key in _SOURCE), *last)


def _samples(document: Json) -> Iterator[tuple[Any, ...]]:
    """Yield a row per timed iteration, from 0 in the order measured, with its latency in nanoseconds."""
    for report in document["reports"]:
        of = identity_of(document, report)
        for iteration, latency_ns in enumerate(report["latency"]["samples_ns"] if report["latency"] else ()):
            yield (*of, iteration, latency_ns)


def _points(document: Json) -> Iterator[tuple[tuple[Any, ...], Json, Json]]:
    """Yield each point of generated text with its report's identity and generation."""
    for report in document["reports"]:
        generated = report["generation"]
        for point in generated["points"] if generated else ():
            yield identity_of(document, report), generated, point


def _generation(document: Json) -> Iterator[tuple[Any, ...]]:
    """Yield a row for each prompt length at each depth, with the rates of generated text and the ends of their intervals."""
    for of, generated, point in _points(document):
        rates: list[Any] = []
        for name, interval in METRICS.items():
            rates += [point[name], *(point[interval] or (None, None))]
        counts = point["prompt_tokens"], point["depth"], generated["generated_tokens"], point["repetitions"]
        yield (*of, *counts, *rates, (point["verdict"] or {}).get("status"), point["tokens_equal"])


def _tokens(document: Json) -> Iterator[tuple[Any, ...]]:
    """Yield a row for each generated token, with its time: the median over repetitions, at first that to the first token."""
    for of, _, point in _points(document):
        for number, time_ns in enumerate(point["token_ns"] or ()):
            yield (*of, point["prompt_tokens"], point["depth"], number, time_ns)


def _parts(document: Json) -> Iterator[tuple[Any, ...]]:
    """Yield a row for each method of each prompt length at each depth, if several methods generate text together."""
    for of, _, point in _points(document):
        for part in point["parts"]:
            values: list[Any] = [point["prompt_tokens"], point["depth"], part["method"]]
            for kind in ("prefill", "decode"):
                ends = part[f"{kind}_ci95_ns"] or (None, None)
                values += [part[f"{kind}_executions"], part[f"{kind}_ns"], *ends, part[f"{kind}_share"]]
            yield (*of, *values)


def _logits(document: Json) -> Iterator[tuple[Any, ...]]:
    """Yield a row for each reference of a language model's logits; without one, a row with the device's perplexity."""
    for report in document["reports"]:
        measured = (report["generation"] or {}).get("accuracy")
        if not measured or measured["error"]:
            continue
        device = measured["tokens"], measured["is_text"], measured["perplexity"], measured["perplexity_tokens"]
        for each in measured["references"] or (dict.fromkeys((*_LOGITS, "first_difference")),):
            first = each["first_difference"] or {}
            differs = (first.get(key) for key in ("index", "token", "reference_token", "gap"))
            yield (*identity_of(document, report), *(each[key] for key in _LOGITS), *differs, *device)


def identity_of(document: Json, report: Json) -> tuple[Any, ...]:
    """Return the values of the columns `IDENTITY` for the rows of a report."""
    job, model, device = document["job"] or {}, report["model"] or {}, report["device"] or {}
    return (
        job.get("id"), report["id"], report["cell"], model.get("name"), report["recipe"], report["method"],
        device.get("name") or device.get("id"), report["threads"],
    )  # fmt: skip


_TABLES: Final[Mapping[str, tuple[Mapping[str, Kind], Callable[[Json], Iterator[tuple[Any, ...]]]]]] = {
    "operators": ({**_ROW, **_SOURCE, **_LAST}, _operators),
    "samples": ({"iteration": Kind.INTEGER, "latency_ns": Kind.INTEGER}, _samples),
    "generation": (_POINT, _generation),
    "tokens": (
        {"prompt_tokens": Kind.INTEGER, "depth": Kind.INTEGER, "token": Kind.INTEGER, "time_ns": Kind.NUMBER}, _tokens
    ),
    "parts": (_PART, _parts),
    "logits": ({**_LOGITS, **_FIRST, **_DEVICE}, _logits),
}  # fmt: skip
"""The columns of each table behind those of IDENTITY, and its rows."""
