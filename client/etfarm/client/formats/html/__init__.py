"""All reports of a job as one HTML file that needs no network, no server and no other file.

The answers and facts are in the page itself, so that it can be read and printed without scripts; tables and charts are drawn
from data that is embedded as JSON. A policy in the page's head lets no request out and runs the page's own scripts alone,
whatever a model's names contain. Needs Jinja2, which etfarm[cli] has; charts are uPlot's (vendor/, MIT).
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from etfarm.client.formats import answers, compared, gaps, label, sentences, units
from etfarm.client.formats.html import cells, charts, delegates, facts, generated
from etfarm.wire import views
from etfarm.wire.comparison.numbers import ratio_text
from etfarm.wire.escapes import printable
from etfarm.wire.sqnr import decibels

Json = Mapping[str, Any]

SCRIPTS: Final = ("charts.js", "flame.js", "tables.js", "cells.js", "page.js")
"""Scripts in templates/, in the order in which they need each other; charts need uPlot as well."""
STYLES: Final = ("templates/theme.css", "templates/report.css")
"""Styles of the reports; templates/page.css is the frame of the file around them."""

_HERE = Path(__file__).parent
_LEFT_OUT = {"times_ns", "debug_handles", "instruction_id", "aligned", "start_ns", "duration_ns", "reconstructed", "input_rows"}
"""Keys of an operator's row that are left out: the page shows percentiles, and other formats have the rest."""


def write(document: Json, comparison: Json | None = None) -> bytes:
    """Return the page of a document.

    Args:
        comparison: etfarm.comparison/1 with these reports as its candidates, so that the page shows regressions.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup, escape

    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(units=units, decibels=decibels, ratio_text=ratio_text, style_attribute="style")
    # Sentences contain commands in backticks.
    environment.filters["coded"] = lambda text: Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
    # Paths and module names may break after a slash or a dot, but not within a word.
    environment.filters["breakable"] = lambda text: Markup("<wbr>").join(re.split(r"(?<=[^\s/.][/.])(?=[^\s/.\d])", str(text)))
    own = "\n".join((_HERE / "templates" / name).read_text() for name in SCRIPTS)
    script = f'{_uplot()}\n(() => {{\n"use strict";\n{own}}})();\n'
    style = "".join((_HERE / name).read_text() for name in ("vendor/uPlot.min.css", *STYLES, "templates/page.css"))
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = environment.get_template("page.html").render(
        **page_values(document, comparison), style=Markup(style), script=Markup(script), script_hash=hashed
    )
    return printable(text).encode()


def page_values(document: Json, comparison: Json | None = None) -> dict[str, Any]:
    """Return the values of the template reports.html, which this file and the farm's web page share.

    Its environment has the filters `coded` and `breakable`, and the globals `units`, `decibels`, `ratio_text` and
    `style_attribute`: the name of the attribute that positions bars, which is not `style` where a policy forbids it.

    Args:
        comparison: as in `write`.
    """
    reports = document["reports"]
    pairs = _pairs(comparison, reports)
    return {
        "document": document,
        "job": document["job"] or {},
        "title": _title(document),
        "reports": [
            _shown(report, reports, pairs.get(report["id"]), bar)
            for report, bar in zip(reports, cells.bars(reports), strict=True)
        ],
        "comparison": comparison,
        "pairs": list(pairs.values()),
        "side_by_side": sum(bool(report["operators"]) for report in reports) > 1,
        "compared": any(report["interleaved"] for report in reports),
        "data": [{"label": name, **_data(report)} for name, report in zip(cells.short_labels(reports), reports, strict=True)],
    }


def _uplot() -> str:
    """Return uPlot with its licence, without the address in its first line, so that the page contains none."""
    code = (_HERE / "vendor" / "uPlot.iife.min.js").read_text().partition("\n")[2]
    licence = (_HERE / "vendor" / "LICENSE").read_text().replace("*/", "* /")
    return f"/* uPlot\n{licence}*/\n{code}"


def _title(document: Json) -> str:
    """Return models and recipes, each once."""
    models = dict.fromkeys(report["model"]["name"] for report in document["reports"] if report["model"])
    recipes = dict.fromkeys(report["recipe"] for report in document["reports"] if report["recipe"])
    return " · ".join(filter(None, (", ".join(models), ", ".join(recipes)))) or "No report"


def _shown(report: Json, reports: list[Json], against: Json | None, bar: cells.Bar | None) -> dict[str, Any]:
    """Return the values of a report for the template.

    Args:
        bar: its latency on the scale of all reports.
    """
    paired = report["interleaved"] if report["interleaved"] and report["interleaved"]["ratio"] is not None else None
    return {
        "json": report,
        "against": against,
        "label": label(report),
        "bar": bar,
        "latency": answers.latency(report),
        "verdict": answers.verdict(report),
        "reasons": sentences.verdict(report),
        "traced_reasons": sentences.traced_verdict(report["profile"]) if report["profile"] else [],
        "delegated": answers.delegated(report),
        "accuracy": answers.accuracy(report),
        "in_samples": [sentences.samples(output) for output in report["accuracy"] or ()],
        "size": answers.size(report),
        "memory": answers.memory(report),
        "slowest": answers.slowest(report),
        "paired": paired,
        "paired_said": sentences.ratio(paired["ratio"], paired["ratio_ci95"]) if paired else "",
        "paired_with": answers.against(report, reports),
        "facts": [
            (title, [fact for fact in facts_of_group if fact[1]])
            for title, facts_of_group in (
                ("Measurement", facts.measurement(report)),
                ("The device around the run", facts.surroundings(report)),
                ("Compilation", facts.compilation(report)),
                ("Device and tools", facts.machine(report)),
            )
        ],
        "warnings": facts.warnings(report),
        "unquantized": sentences.unquantized(report),
        "timeline": facts.timeline(report),
        "waited": facts.waited(report),
        "steps": delegates.steps(report),
        "methods": delegates.methods(report),
        "runs": cells.runs(report),
        "spread": cells.spread(report),
        "modules": _modules(report),
        "samples": answers.sample_count(report) if report["latency"] else 0,
        "generation": generated.shown(report["generation"]) if report["generation"] else None,
    }


def _pairs(comparison: Json | None, reports: list[Json]) -> dict[str, dict[str, Any]]:
    """Return the template's values of the pairs with these reports as candidates, by report id."""
    shown = {report["id"] for report in reports}
    moods = {"faster": "good", "slower": "bad"}
    return {
        pair["candidate"]["id"]: {
            "heading": compared.heading(pair),
            "answer": compared.answer(pair),
            "status": (compared.status(pair) or "").replace("_", " "),
            "ratio": compared.main_change(pair)[0],
            "mood": moods.get(compared.main_change(pair)[1], "") if compared.status(pair) == "VALID" else "",
            "facts": [fact for fact in compared.facts(pair) if fact.change],
            "moved": compared.moved(pair),
            "matching": compared.matching(pair),
            "changed": [*compared.changed(pair), *compared.joined(pair)],
        }
        for pair in (comparison["pairs"] if comparison else ())
        if pair["candidate"]["id"] in shown
    }


def _modules(report: Json) -> list[Json]:
    """Return the modules of the report's method that hold most bytes."""
    modules = [module for module in (report["compile"] or {}).get("modules") or () if module["method"] == report["method"]]
    return sorted(modules, key=lambda module: -((module["constant_bytes"] or 0) + (module["planned_bytes"] or 0)))


def _data(report: Json) -> dict[str, Any]:
    """Return the values of a report for the scripts."""
    operators = report["operators"] or []
    samples = report["latency"]["samples_ns"] if report["latency"] else []
    latency = {key: value for key, value in (report["latency"] or {}).items() if key != "samples_ns"}
    return {
        "operators": [_operator(row, answers.undelegated_reason(report, row)) for row in operators],
        "views": {by: [_group(group) for group in views.group(operators, by)] for by in views.BY} if operators else {},
        "flame": charts.flame(operators, report["method"] or "method") if operators else [],
        "latency": latency,
        "samples": {**charts.thinned(samples), "total": len(samples)} if samples else None,
        "histogram": charts.histogram(samples) if samples else None,
        "gap": report["numeric_gap"] or [],
        "values": [_value(value) for value in gaps.operators(report["numeric_gap"] or ())],
        "judged": gaps.judged(list(gaps.operators(report["numeric_gap"] or ())), report["numerics"] or {}),
        "fused": gaps.describe_fused(report["numerics"] or {}),
        "series": _series(report),
        "run_ends": list(itertools.accumulate(run["iterations"] or 0 for run in report["runs"] or ()))[:-1],
    }


def _series(report: Json) -> Sequence[Json]:
    readings = (report["telemetry"] or {}).get("series") or []
    return charts.joined(readings) if len(report["runs"] or ()) > 1 else readings


def _operator(row: Json, undelegated_reason: str) -> Json:
    return {**{key: value for key, value in row.items() if key not in _LEFT_OUT}, "undelegated_reason": undelegated_reason}


def _value(value: gaps.Operator) -> dict[str, int | None]:
    """Return the indices of a value's rows in "gap": the first, which it is judged by, and that of each reference."""
    places = {reference: value.place + number for number, reference in enumerate(value.rows)}
    return {"place": value.place, "QUANTIZED": places.get("QUANTIZED"), "EAGER": places.get("EAGER")}


def _group(group: views.Group) -> dict[str, Any]:
    return {
        "key": group.key, "detail": group.detail, "rows": group.rows, "own_ns": group.own_ns, "own_share": group.own_share,
        "total_ns": group.total_ns, "total_share": group.total_share, "depth": group.depth, "own_ci95_ns": group.own_ci95_ns,
    }  # fmt: skip
