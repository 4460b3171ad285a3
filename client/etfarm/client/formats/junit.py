"""Reports and comparisons as JUnit XML, which CI servers show as tests: a case for each cell, and for each gate.

Pure functions. The output is valid against the strictest schema that is in use (Apache Ant's JUnit.xsd by Windy Road), and thus
against those of Jenkins and GitLab.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from xml.etree import ElementTree

from etfarm.client.formats import label, sentences
from etfarm.wire import comparison
from etfarm.wire.comparison import UNDECIDED
from etfarm.wire.escapes import printable

Json = Mapping[str, Any]

_INVALID: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold, not even escaped. Source: the production Char of the specification."""
_MAX_TEXT: Final = 16_000
_NO_TIME: Final = "1970-01-01T00:00:00"


@dataclass(frozen=True)
class Case:
    """One test case."""

    name: str
    group: str
    """The class name, which CI servers group by."""
    time_s: float = 0.0
    outcome: str = ""
    """`failure` if something is worse than required, `error` if it failed or is undecided, `skipped`; empty if it passed."""
    kind: str = ""
    message: str = ""
    details: str = ""


def write(document: Json) -> bytes:
    """Return the XML of a document etfarm.report/1 or etfarm.comparison/1."""
    if str(document["schema"]).startswith("etfarm.comparison/"):
        return _suite("etfarm compare", _NO_TIME, list(_of_comparison(document)), {})
    job = document["job"]
    name = f"etfarm {job['name'] or job['id']}" if job else "etfarm"
    at = str(job["submitted_at"])[:19] if job else _NO_TIME
    properties = {"job": job["id"], "state": job["state"], "server": job["server_version"]} if job else {}
    return _suite(name, at, list(_of_reports(document)), properties)


def _of_reports(document: Json) -> Iterator[Case]:
    for report in document["reports"]:
        yield _cell(report)
    yield from _requirements(document)
    if document["error"]:
        yield _failed("command", "etfarm", 0.0, document["error"])


def _cell(report: Json) -> Case:
    name, group = label(report), _group(report["model"]["name"] if report["model"] else "?", report["recipe"])
    time_s = sum(phase["duration_ms"] or 0.0 for phase in report["timeline"] or ()) / 1e3
    if report["state"] == "CANCELLED":
        return Case(name, group, time_s, "skipped", message="The cell was cancelled.")
    if report["state"] != "SUCCEEDED" or report["error"]:
        error = report["error"] or {"reason": report["state"], "message": f"The cell is {report['state']}.", "remedy": ""}
        return _failed(name, group, time_s, error)
    return Case(name, group, time_s, details="\n".join(map(str, sentences.verdict(report))))


def _requirements(document: Json) -> Iterator[Case]:
    """Yield a case for each report and each requirement of `etfarm bench`."""
    required = document.get("requirements")
    if not required:
        return
    options = {
        "--require-valid": required["valid"],
        "--max-p50": required["max_p50_ns"] is not None,
        "--min-sqnr": required["min_sqnr_db"] is not None,
    }
    for report in document["reports"]:
        if report["state"] != "SUCCEEDED":
            continue
        for option in (option for option, is_set in options.items() if is_set):
            unmet = [each for each in required["reasons"] if each["report"] == report["id"] and each["requirement"] == option]
            yield _gate(f"{option}: {label(report)}", unmet)


def _of_comparison(document: Json) -> Iterator[Case]:
    for pair in document["pairs"]:
        side = pair["candidate"]
        name, group = comparison.label(side), _group(side["model"] or "?", side["recipe"])
        if side["state"] == "SUCCEEDED":
            yield Case(name, group)
        else:
            reason = side["error"] or side["state"] or "FAILED"
            yield Case(name, group, outcome="error", kind=reason, message=f"The candidate's cell failed: {reason}.")
    gate = document["gate"]
    for limit in gate["limits"] if gate else ():
        unmet = [
            {"outcome": "inconclusive" if reason["code"] in UNDECIDED else "failed", "message": reason["message"]}
            for reason in gate["reasons"]
            if reason["metric"] in (None, limit["metric"])
        ]
        yield _gate(f"--gate {limit['metric']}={limit['limit']:g}{limit['unit']}", unmet)
    for entry in document["unpaired"]:
        yield Case(comparison.label(entry["report"]), "etfarm.unpaired", outcome="skipped",
                   message=f"Only in the {entry['side'].lower()}.")  # fmt: skip
    if document["error"]:
        yield _failed("command", "etfarm", 0.0, document["error"])


def _gate(name: str, unmet: Sequence[Json]) -> Case:
    """Return the case of a gate with what does not meet it: `failure` if something is worse, `error` if that is undecided."""
    if not unmet:
        return Case(name, "etfarm.gates")
    is_worse = any(each["outcome"] in ("worse", "failed") for each in unmet)
    text = "\n".join(each["message"] for each in unmet)
    kind = "worse" if is_worse else "inconclusive"
    return Case(name, "etfarm.gates", outcome="failure" if is_worse else "error", kind=kind, message=text, details=text)


def _failed(name: str, group: str, time_s: float, error: Json) -> Case:
    remedy = f"\n{error['remedy']}" if error["remedy"] else ""
    message = str(error["message"])
    return Case(name, group, time_s, "error", error["reason"] or "ERROR", message, f"{message}{remedy}")


def _group(model: str, recipe: str | None) -> str:
    """Return a class name: dots separate its parts only."""
    return ".".join(part.replace(".", "_") for part in ("etfarm", model, recipe or "program"))


def _suite(name: str, at: str, cases: Sequence[Case], properties: Mapping[str, str | None]) -> bytes:
    root = ElementTree.Element("testsuites")
    counts = {what: str(sum(case.outcome == what for case in cases)) for what in ("failure", "error", "skipped")}
    suite = ElementTree.SubElement(
        root, "testsuite", name=_text(name), package="etfarm", id="0", hostname="etfarm", timestamp=at, tests=str(len(cases)),
        failures=counts["failure"], errors=counts["error"], skipped=counts["skipped"],
        time=f"{sum(case.time_s for case in cases):.3f}",
    )  # fmt: skip
    listed = ElementTree.SubElement(suite, "properties")
    for key, value in properties.items():
        ElementTree.SubElement(listed, "property", name=key, value=_text(value or "unknown"))
    notes = []
    for case in cases:
        element = ElementTree.SubElement(
            suite, "testcase", name=_text(case.name), classname=_text(case.group), time=f"{case.time_s:.3f}"
        )  # fmt: skip
        if case.outcome == "skipped":
            ElementTree.SubElement(element, "skipped")
        elif case.outcome:
            end = ElementTree.SubElement(
                element, case.outcome, type=_text(case.kind or case.outcome), message=_text(case.message)
            )  # fmt: skip
            end.text = _text(case.details)
        elif case.details:
            notes.append(f"{case.name}: {case.details}")
    ElementTree.SubElement(suite, "system-out").text = _text("\n".join(notes))
    ElementTree.SubElement(suite, "system-err").text = ""
    ElementTree.indent(root)
    data: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return data + b"\n"


def _text(text: str) -> str:
    text = _INVALID.sub("\ufffd", printable(text))
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
