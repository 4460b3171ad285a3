"""View of a measurement: whether it can be trusted, and if not, the remedy; then the spread of the times.

It takes a REPORT of etfarm.report/1, so that it looks the same now and when it is shown again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from etfarm.client.formats import answers, sentences, units

FAR_FEWER = 0.5
"""Ratio of independent samples to samples below which it is shown: clocks and caches make neighbours similar."""

Json = Mapping[str, Any]
Fact = tuple[str, RenderableType]


def verdict(document: Json) -> Iterator[Fact]:
    """Yield why the numbers cannot be trusted, with remedies."""
    for reason in sentences.verdict(document):
        yield "verdict", Text(str(reason))
    if document["profile"]:
        for reason in sentences.traced_verdict(document["profile"]):
            yield "operators", Text(str(reason))


def circumstances(document: Json) -> Iterator[Fact]:
    """Yield notable facts of the program and of the device during the run, apart from the verdict."""
    measurement, telemetry = document["measurement"] or {}, document["telemetry"] or {}
    reasons = {reason["code"] for reason in (document["verdict"] or {}).get("reasons", ())}
    repeatability = measurement.get("repeatability")
    if repeatability and repeatability["outcome"] not in (None, "", "EQUAL") and "OUTPUTS_DIFFER" not in reasons:
        yield "repeated", Text(sentences.repeatability(repeatability))
    waits = [
        wait
        for wait in telemetry.get("waits") or ()
        if wait["passed"] or wait["gate"] != "IDLE" or "BACKGROUND_LOAD" not in reasons
    ]
    if text := sentences.waits(waits):
        yield "waited", Text(text)
    if "FREQUENCY_MOVED" not in reasons and (text := sentences.settings(telemetry.get("settings") or ())):
        yield "settings", Text(text)


def times(document: Json) -> Iterator[Fact]:
    """Yield the spread of the samples, and the runs before them."""
    latency = document["latency"]
    if latency:
        shown = [(name, latency[f"{name}_ns"]) for name in ("p10", "p90", "p99")]
        interval = answers.latency(document).detail if answers.interval_name(document) else ""
        parts = [interval] if interval else []
        parts += [f"{name} {units.time(value)}" for name, value in shown if value is not None]
        if latency["drift"] is not None and len(document["runs"]) < 2:  # between runs it is a step of the processes
            parts.append(f"drift {sentences.change(latency['drift'])}")
        samples, worth = answers.sample_count(document), latency["effective_samples"]
        if worth is not None and worth < FAR_FEWER * samples:
            parts.append(f"worth {worth:,.0f} independent samples")
        if len(document["runs"]) < 2 and (text := sentences.runs(document)):
            parts.append(text)
        if parts:
            yield "spread", Text(" · ".join(parts))
    if document["profile"] and document["operators"]:
        yield "traced", Text(sentences.tracing(document["profile"]))
    measurement = document["measurement"]
    if measurement and measurement["stop_reason"] == "SETTLED":
        took = units.time(measurement["duration_ns"])
        yield "timed", Text(f"for {took}, longer than asked for, until the times settled")
    if measurement and (text := sentences.cut_short(measurement)):
        yield "timed", Text(text)
    if measurement and measurement["warmup"] is not None:
        yield "warm-up", Text(sentences.warmup(measurement))


def memory(document: Json) -> Iterator[Fact]:
    """Yield the run's memory, and the time of loading."""
    used, load = document["memory"], document["load"]
    if used:
        parts = [f"peak {units.size(used['peak_rss_bytes'])}"] if used["peak_rss_bytes"] else []
        parts += [f"planned {units.size(sum(used['planned_bytes']))}"] if used["planned_bytes"] else []
        if parts:
            yield "memory", Text(", ".join(parts))
    if load:
        names = [("program", "load_ns"), ("method", "load_method_ns"), ("first run", "first_run_ns")]
        parts = [f"{name} {units.time(load[key])}" for name, key in names if load[key] is not None]
        if parts:
            yield "load", Text(" · ".join(parts))
