"""Reports in the formats of other programs and of people.

These are pure functions of the document etfarm.report/1.

A document is {schema, job, reports, error}, from `JobResult.json()`, a `--json` file (`etfarm.wire.report.loads`)
or a farm.
Each module is one format, with `write(document) -> bytes`. ExecuTorch's own files are in a farm's store and
therefore need a farm (`AsyncJob.save_raw_files`); `executorch` here describes their folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from etfarm.wire.errors import error_for

Json = dict[str, Any]

NAMES: Final = ("json", "csv", "parquet", "html", "markdown", "junit", "perfetto", "model-explorer", "executorch")
"""The names of all formats."""


def label(report: Mapping[str, Any]) -> str:
    """Return a label of the measurement: `resnet8 · xnnpack_fp32 · pi5-a, 4 threads`."""
    model = report["model"]["name"] if report["model"] else "?"
    device = report["device"]
    method = report["method"] if report["method"] not in (None, "forward") else None
    threads = report["threads"]
    place = (device["name"] or device["id"][:12]) if device else None
    if place and threads:
        place = f"{place}, {threads} thread{'s' * (threads != 1)}"
    return " · ".join(part for part in (model, report["recipe"], method, place) if part)


def only(document: Json, wanted: Sequence[str]) -> Json:
    """Return the document with the selected reports only.

    `wanted` has their numbers from 0, or prefixes of their cells' or their own ids.

    Raises:
        REPORT_NOT_FOUND: no report, or more than one, matches a name.
    """
    if not wanted:
        return document
    reports = document["reports"]
    there = ", ".join(f"{place} (cell {report['cell'][:8]}, {label(report)})" for place, report in enumerate(reports)) or "none"
    places = []
    for name in wanted:
        matches = [place for place, report in enumerate(reports) if _is_called(report, place, name)]
        if len(matches) != 1:
            what = f"Several reports begin with {name!r}" if matches else f"There is no report {name!r}"
            raise error_for("REPORT_NOT_FOUND", f"{what}.", f"There are {there}.", report=name)
        places += matches
    return {**document, "reports": [reports[place] for place in sorted(set(places))]}


def _is_called(report: Json, place: int, name: str) -> bool:
    if name.isascii() and name.isdigit() and len(name) < 4:
        return place == int(name)
    return bool(name) and (report["cell"].startswith(name) or report["id"].startswith(name))
