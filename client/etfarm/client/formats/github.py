"""Annotations and the step summary of GitHub Actions, from reports and comparisons. Pure functions.

An annotation is a line that the runner reads from a step's output: `::error file=F,line=N,title=T::MESSAGE`. It shows it in the
run's summary and, where it names a file of the repository, beside that line of a pull request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any, Final

from etfarm.client.formats import answers, compared, compared_markdown, label, markdown, sentences
from etfarm.wire import comparison
from etfarm.wire.escapes import printable
from etfarm.wire.sqnr import decibels

Json = Mapping[str, Any]
Place = tuple[str, int] | None

MOST: Final = 10
"""Number of annotations of a kind that GitHub shows for a step."""
MAX_SUMMARY: Final = 1 << 20
"""Maximum size of a step's summary in bytes; GitHub shows none of a larger one."""

_PLACE: Final = re.compile(r"(?P<file>[^:\n]+):(?P<line>[0-9]{1,9})\b", re.ASCII)
_TOO_LONG: Final = "\n\nThe rest of the report is too long for GitHub.\n"


def workflow_commands(document: Json, workspace: str = "") -> list[str]:
    """Return the annotations of a document etfarm.report/1 or etfarm.comparison/1: at most MOST errors and MOST warnings.

    Args:
        workspace: the folder of the repository's checkout; files are named relative to it.
    """
    is_comparison = str(document["schema"]).startswith("etfarm.comparison/")
    lines: dict[str, list[str]] = {"error": [], "warning": []}
    for kind, title, message, place in (_of_comparison if is_comparison else _of_reports)(document):
        lines[kind].append(_command(kind, title, message, place, workspace))
    return [*_limited("error", lines["error"]), *_limited("warning", lines["warning"])]


def summary(document: Json) -> bytes:
    """Return the step's summary: the Markdown of a report or a comparison, cut to what GitHub accepts."""
    is_comparison = str(document["schema"]).startswith("etfarm.comparison/")
    if is_comparison:
        text = compared_markdown.write(document).encode() if document["pairs"] or document["unpaired"] else b""
    else:
        text = markdown.write(document)
    if len(text) <= MAX_SUMMARY:
        return text
    whole = text[: MAX_SUMMARY - len(_TOO_LONG)].decode("utf-8", "ignore")
    return (whole.rpartition("\n")[0] + _TOO_LONG).encode()


def _of_reports(document: Json) -> Iterator[tuple[str, str, str, Place]]:
    for report in document["reports"]:
        if report["error"]:
            error = report["error"]
            yield "error", f"{label(report)}: {error['reason']}", _sentence(error), _place_of_error(error)
    required = document.get("requirements") or {"reasons": ()}
    by_id = {report["id"]: report for report in document["reports"]}
    for reason in required["reasons"]:
        kind = "error" if reason["outcome"] == "worse" else "warning"
        yield kind, f"etfarm {reason['requirement']}", reason["message"], _place_of(by_id.get(reason["report"]), reason)
    if document["error"]:
        error = document["error"]
        yield "error", f"etfarm: {error['reason']}", _sentence(error), _place_of_error(error)
    for report in document["reports"]:
        if (report["verdict"] or {}).get("status") == "INVALID":
            why = "; ".join(str(reason) for reason in sentences.verdict(report))
            yield "warning", f"{label(report)}: INVALID", why or "The measurement is not valid.", None
        if (report["numerics"] or {}).get("wrong_only_when_fused"):
            yield "warning", f"{label(report)}: numerics", "The timed program is wrong only when fused.", None
        for row in report["numeric_gap"] or ():
            if row["first_bad"]:
                level = decibels(row["snr_db"]) if row["snr_db"] is not None else "no SNR"
                message = f"The first bad operator is {', '.join(row['ops'])} with {level}."
                yield "warning", f"{label(report)}: numerics", message, _place_of_row(row)


def _of_comparison(document: Json) -> Iterator[tuple[str, str, str, Place]]:
    for pair in document["pairs"]:
        side = pair["candidate"]
        if side["error"]:
            yield "error", comparison.label(side), f"The candidate's cell failed: {side['error']}.", None
    if gate := document["gate"]:
        kind = "error" if gate["outcome"] == "failed" else "warning"
        title = f"etfarm: gate {compared.GATE_WORDS[gate['outcome']]}"
        for reason in gate["reasons"]:
            yield kind, title, reason["message"], None
    if document["error"]:
        yield "error", f"etfarm: {document['error']['reason']}", _sentence(document["error"]), None


def _place_of(report: Json | None, reason: Json) -> Place:
    """Return the line that explains an unmet requirement: the slowest one, or that of the first bad operator."""
    if report is None:
        return None
    if reason["requirement"] == "--min-sqnr":
        rows = [row for row in report["numeric_gap"] or () if row["first_bad"]]
    else:
        rows = list(answers.slowest_rows(report, len(report["operators"] or ())))
    return next((place for row in rows if (place := _place_of_row(row)) is not None), None)


def _place_of_row(row: Json) -> Place:
    source = row["source"]
    return (source["file"], source["line"]) if source and source["file"] and source["line"] else None


def _place_of_error(error: Json) -> Place:
    """Return the line of the model that an error names in its metadata."""
    for name in ("source", "place", "where"):
        if match := _PLACE.search((error["metadata"] or {}).get(name) or ""):
            return match["file"].strip(), int(match["line"])
    return None


def _sentence(error: Json) -> str:
    return f"{error['message']} {error['remedy'] or ''}".strip()


def _command(kind: str, title: str, message: str, place: Place, workspace: str) -> str:
    properties = {"file": _relative(place[0], workspace), "line": str(place[1])} if place is not None else {}
    properties["title"] = title
    listed = ",".join(f"{name}={_escaped_property(printable(value))}" for name, value in properties.items())
    return f"::{kind} {listed}::{_escaped(printable(message))}"


def _relative(file: str, workspace: str) -> str:
    path = PurePath(file)
    return str(path.relative_to(workspace)) if workspace and path.is_relative_to(workspace) else file


def _escaped(text: str) -> str:
    # Source: github.com/actions/toolkit, packages/core/src/command.ts.
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escaped_property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")


def _limited(kind: str, lines: list[str]) -> list[str]:
    if len(lines) <= MOST:
        return lines
    return [*lines[: MOST - 1], f"::{kind} title=etfarm::{len(lines) - MOST + 1} more are in the report."]
