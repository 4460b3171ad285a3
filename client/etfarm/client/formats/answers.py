"""Answers to the first questions about a REPORT, in a few words each, for the HTML file and for Markdown.

They cover latency and its validity, the slowest source line, delegation, accuracy, size, and regressions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etfarm.client.formats import generation, sentences, units
from etfarm.wire import delegation as delegations
from etfarm.wire import views
from etfarm.wire.comparison.uncertainty import MIN_RUNS
from etfarm.wire.sqnr import decibels

Json = Mapping[str, Any]

FINE_DB = 40.0
"""Signal-to-noise ratio in dB from which an output is as good as its reference: noise is below a hundredth of the signal."""

POOR_DB = 15.0
"""Signal-to-noise ratio in dB below which noise is more than a sixth of the signal, which indicates an error rather than
rounding.
"""


REFERENCES = {"EAGER": "program before quantization", "QUANTIZED": "quantized program"}
"""The references of numeric gaps, in words."""


def sample_count(report: Json) -> int:
    """Return the number of timed iterations of a REPORT, which may have been read without its samples."""
    samples = len(report["latency"]["samples_ns"]) if report["latency"] else 0
    return samples or (report["measurement"] or {}).get("iterations") or 0


@dataclass(frozen=True)
class Answer:
    """One answer."""

    text: str
    """A number or a word; empty if unknown."""
    detail: str = ""
    mood: str = ""
    """good, fair, bad, or empty without a judgement."""


def latency(report: Json) -> Answer:
    """Return the median with its interval; of generated text, the rate of decode."""
    measured = report["latency"]
    if not measured:
        rated = generation.headline(report["generation"]) if report["generation"] else None
        return Answer("") if rated is None else Answer(f"decode {rated[0]}", f"{rated[1]} {rated[2]}".strip())
    text, interval = median(measured)
    return Answer(text, f"{interval} {interval_name(report)}".strip() if interval else "")


def interval_name(report: Json) -> str:
    """Return what the interval of the median covers: `within-run`, or `between-run` with at least MIN_RUNS valid runs.

    Empty for interleaved programs, which have no runs of their own: their rounds are neither.
    """
    if not report["runs"]:
        return ""
    valid = sum((run["verdict"] or {}).get("status") == "VALID" for run in report["runs"])
    return "between-run" if valid >= MIN_RUNS else "within-run"


def median(measured: Json) -> tuple[str, str]:
    """Return the median of a latency and its 95 % interval, `1.84 ms` and `[1.82, 1.86]`; empty texts if unknown."""
    if measured["p50_ns"] is None:
        return "", ""
    return units.median(measured["p50_ns"], measured["p50_ci95_ns"] or ())


def verdict(report: Json) -> Answer:
    """Return whether the latency can be trusted."""
    status = (report["verdict"] or {}).get("status")
    words = {
        "VALID": Answer("VALID", "the device was quiet and the samples agree", "good"),
        "INVALID": Answer("INVALID", "do not rely on these times", "bad"),
        "NOT_BENCHMARKABLE": Answer("NOT BENCHMARKABLE", "times of this device mean nothing", "fair"),
    }
    return words.get(str(status or ""), Answer(str(status or "").replace("_", " ")))


def delegated(report: Json) -> Answer:
    """Return the part of the traced time in delegates, and of the graph's nodes."""
    shares = [row["share"] or 0.0 for row in report["operators"] or () if row["parent"] is None and row["delegated"]]
    nodes = delegated_nodes(report)
    if report["operators"]:
        what = "of the traced time in delegates"
        return Answer(units.percent(sum(shares)), f"{what}; {nodes}" if nodes else what)
    return Answer(nodes)


def delegated_nodes(report: Json) -> str:
    """Return `36 of 36 nodes in 1 subgraph` for the report's method; empty if unknown."""
    delegation = ((report["compile"] or {}).get("delegation") or {}).get(report["method"])
    if not delegation:
        return ""
    inside, outside = delegations.nodes(delegation)
    nodes = inside + outside
    if nodes <= 0:
        return ""
    if not delegation["subgraphs"]:
        return f"0 of {units.count(nodes, 'node')}"
    return f"{inside} of {units.count(nodes, 'node')} in {units.count(delegation['subgraphs'], 'subgraph')}"


def accuracy(report: Json) -> Answer:
    """Return the worst output against the first reference, the program before quantization if known, and the other references."""
    by_reference: dict[str, list[Json]] = {}
    for output in report["accuracy"] or ():
        by_reference.setdefault(str(output["reference"] or "its reference"), []).append(output)
    results = [_accuracy(reference, outputs) for reference, outputs in by_reference.items()]
    if not results:
        return _generation_accuracy(report)
    others = [f"{result.text} to the {reference}" for result, reference in zip(results[1:], list(by_reference)[1:], strict=True)]
    return Answer(results[0].text, "; ".join([results[0].detail, *others]), results[0].mood)


def _generation_accuracy(report: Json) -> Answer:
    """Return the accuracy of a language model's logits; empty if it was not measured."""
    measured = (report["generation"] or {}).get("accuracy") or {}
    references = measured.get("references") or ()
    if not references:
        return Answer("")
    first, level_db, agreement = references[0], references[0]["sqnr_db"], references[0]["top1_agreement"]
    mood = "fair" if level_db is None else "good" if level_db >= FINE_DB else "bad" if level_db < POOR_DB else "fair"
    top1 = f", {sentences.top1(agreement)}" if agreement is not None else ""
    others = [f"{generation.logits(each)} to the {each['reference']}" for each in references[1:]]
    perplexity = [f"perplexity {measured['perplexity']:,.4g}"] if measured["perplexity"] is not None else []
    detail = "; ".join([f"logits to the {first['reference']}{top1}", *others, *perplexity])
    return Answer(generation.logits(first), detail, mood)


def _accuracy(reference: str, outputs: Sequence[Json]) -> Answer:
    several = f"the worst of {len(outputs)} outputs " if len(outputs) > 1 else ""
    against = f"{several}to the {reference}"
    if any(output["nan_count"] and not output["reference_nan_count"] for output in outputs):
        return Answer("NaN", f"where the {reference} has none", "bad")
    if all(output["equal"] for output in outputs):
        return Answer("equal", f"to the {reference}", "good")
    known = [output for output in outputs if output["sqnr_db"] is not None]
    shares = [share for output in outputs if (share := output.get("equal_share")) is not None]
    if shares and not known:
        return Answer(f"{units.percent(min(shares))} equal", against, "fair")
    if not known:
        return Answer("not comparable", against, "fair")
    worst = min(known, key=lambda output: output["sqnr_db"])
    samples = sentences.samples(worst)
    agreements = [output["top1_agreement"] for output in outputs if output["top1_agreement"] is not None]
    top1 = f", {sentences.top1(min(agreements))}" if agreements else ""
    level_db = worst["sqnr_db"]
    mood = "good" if level_db >= FINE_DB else "bad" if level_db < POOR_DB else "fair"
    return Answer(decibels(level_db), f"{against}{samples and f', {samples}'}{top1}", mood)


def size(report: Json) -> Answer:
    """Return the program's size with its data files."""
    compiled = report["compile"] or {}
    if not compiled.get("program"):
        return Answer("")
    data = sum(file["size_bytes"] for file in (compiled.get("data") or {}).values())
    files = f"with {units.size(data)} of data files" if data else ".pte"
    return Answer(units.size(compiled["program"]["size_bytes"] + data), files)


def memory(report: Json) -> Answer:
    """Return the peak memory of the runner, and ExecuTorch's planned memory."""
    used = report["memory"] or {}
    planned = f"planned {units.size(sum(used['planned_bytes']))}" if used.get("planned_bytes") else ""
    if used.get("peak_rss_bytes"):
        return Answer(units.size(used["peak_rss_bytes"]), f"peak of the runner; {planned}" if planned else "peak of the runner")
    return Answer(planned.removeprefix("planned "), "planned") if planned else Answer("")


def slowest(report: Json) -> Answer:
    """Return the line of the user's code that takes longest, else the operator."""
    if not report["operators"]:
        return Answer("")
    groups = views.group(report["operators"], "line")
    unknown = (views.NOT_EXPLAINED, views.INSERTED, views.UNKNOWN)
    lines = [group for group in groups if group.own_share and group.key not in unknown]
    if lines and lines[0].own_share:
        return Answer(units.percent(lines[0].own_share), f"{lines[0].key}\n{lines[0].detail}".strip())
    # Kernels below the clock's resolution leave only their delegate to report.
    tops = [row for row in report["operators"] if row["parent"] is None and row["kind"] != "REST" and row["share"]]
    if not tops:
        return Answer("")
    row = max(tops, key=lambda top: top["share"])
    code = str((row["source"] or {}).get("code") or "").strip()
    return Answer(units.percent(row["share"]), "\n".join(filter(None, (place(row), code))) or row["name"])


def slowest_rows(report: Json, count: int) -> list[Json]:
    """Return the leaves that took longest, the longest first."""
    rows = [row for row in views.leaves(report["operators"] or ()) if row["kind"] != "REST"]
    return sorted(rows, key=lambda row: -(row["share"] or 0.0))[:count]


def backend(row: Json) -> str:
    """Return the common name of a row's backend: XNNPACK, portable."""
    return "" if row["kind"] == "REST" else backend_name(str(row["backend"] or "portable"))


def backend_name(name: str) -> str:
    """Return the common name of a backend, where it differs from its class's: XNNPACK."""
    known = {"XnnpackBackend": "XNNPACK", "CoreMLBackend": "Core ML", "QnnBackend": "QNN", "EthosUBackend": "Ethos-U"}
    return known.get(name, name.removesuffix("Backend"))


def short_type(name: str) -> str:
    """Return `convolution` for `aten.convolution.default`; other overloads are kept."""
    parts = name.split(".")
    return ".".join(parts[1:-1] if parts[-1] == "default" else parts[1:]) if len(parts) == 3 else name


def place(row: Json) -> str:
    """Return the source of a row: `models/net.py:31`, else its module."""
    return views.line_of(row) or (f"module {row['module']}" if row["module"] else "")


def time_ns(row: Json) -> float | None:
    """Return a row's time, which is its share of the whole: the mean over typical executions, or an old median."""
    mean_ns: float | None = row["mean_ns"]
    return row["p50_ns"] if mean_ns is None else mean_ns


def share(row: Json) -> float | None:
    """Return a row's share of the whole; None for a kernel that no iteration saw, of which it is as unknown as the time."""
    return None if not row["share"] and row["resolution_ns"] and time_ns(row) is None else row["share"]


def precision(row: Json) -> str:
    """Return half of the interval of a row's time as a part of it, `±1.2 %`; empty without an interval."""
    mean_ns, ends = row["mean_ns"], row["mean_ci95_ns"]
    if not mean_ns or not ends:
        return ""
    part = max(mean_ns - ends[0], ends[1] - mean_ns) / mean_ns * 100
    return "±<0.1 %" if part < 0.05 else f"±{part:.1f} %" if part < 9.95 else f"±{part:.0f} %"


def time_of(row: Json) -> str:
    """Return a row's time with its precision, `760 µs ±1.2 %`; `< 1.00 µs` below the clock's resolution."""
    if (value_ns := time_ns(row)) is not None:
        return f"{units.time(value_ns)} {precision(row)}".rstrip()
    return f"< {units.time(row['resolution_ns'])}" if row["resolution_ns"] else ""


def undelegated(report: Json) -> list[tuple[str, str, int, Sequence[Json]]]:
    """Return the operators outside of delegates, the most frequent first: method, operator, number of nodes, sources."""
    rows = []
    for method, delegation in ((report["compile"] or {}).get("delegation") or {}).items():
        for operator in delegation["operators"] or ():
            if operator["non_delegated"] and operator["op"] not in delegations.GLUE:
                rows.append((method, operator["op"], operator["non_delegated"], operator["places"] or ()))
    return sorted(rows, key=lambda row: -row[2])


def undelegated_reason(report: Json, row: Json) -> str:
    """Return why an operator of a report was not delegated, in the partitioner's words; empty if that is unknown."""
    delegation = ((report["compile"] or {}).get("delegation") or {}).get(report["method"])
    return delegations.undelegated_reason(delegation, row)


def undelegated_reasons(places: Sequence[Json]) -> str:
    """Return why the nodes of an operator were not delegated, the most frequent reason first; empty if that is unknown."""
    return "; ".join(dict.fromkeys(reason for place in places if (reason := place.get("undelegated_reason"))))


def against(report: Json, reports: Sequence[Json]) -> str:
    """Return the label of the program that the interleaved ratio is relative to, by what distinguishes it from this one."""
    paired = report["interleaved"]
    base = next((candidate for candidate in reports if paired and candidate["cell"] == paired["base_cell"]), None)
    if base is None:
        return "the first program"
    model, recipe = (base["model"] or {}).get("name"), base["recipe"]
    if model != (report["model"] or {}).get("name"):
        return str(model)
    return str(recipe) if recipe != report["recipe"] else "the first program"
