"""A REPORT's facts as the page lists them: names and values with units.

These are pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etfarm.client.formats import answers, phases, sentences, units
from etfarm.wire import views
from etfarm.wire.sqnr import decibels

Json = Mapping[str, Any]
Fact = tuple[str, str]


def measurement(report: Json) -> Iterator[Fact]:
    """Yield how the measurement was taken and how the samples spread."""
    measured, latency, load = report["measurement"], report["latency"], report["load"]
    if inputs := sentences.inputs(report["inputs"]):
        yield "inputs", inputs
    if measured:
        if measured["iterations"] is not None:
            took = f" in {units.time(measured['duration_ns'])}" if measured["duration_ns"] else ""
            yield "timed", f"{units.count(measured['iterations'], 'iteration')}{took}"
        yield "warm-up", sentences.warmup(measured)
        if (repeated := measured["repeatability"]) and repeated["outcome"]:
            equal = repeated["outcome"] == "EQUAL"
            yield "repeated", "all passes gave the same outputs" if equal else sentences.repeatability(repeated)
    if latency:
        names = ("min", "p10", "p50", "p90", "p99", "mean", "stddev")
        parts = [f"{name} {units.time(latency[f'{name}_ns'])}" for name in names if latency[f"{name}_ns"] is not None]
        yield "spread", " · ".join(parts)
        if text := sentences.runs(report):
            yield "runs", text
        if latency["drift"] is not None:
            yield "drift", f"{sentences.change(latency['drift'])} from the first third to the last"
        if latency["effective_samples"] is not None:
            yield "worth", f"{latency['effective_samples']:,.0f} independent samples"
    if load:
        load_times = (("program", "load_ns"), ("method", "load_method_ns"), ("first run", "first_run_ns"))
        yield "load", " · ".join(f"{name} {units.time(load[key])}" for name, key in load_times if load[key] is not None)
    if report["profile"]:
        yield "traced", f"in a pass of its own, {sentences.tracing(report['profile'])}"
        for reason in sentences.traced_verdict(report["profile"]):
            yield "operators", str(reason)


def surroundings(report: Json) -> Iterator[Fact]:
    """Yield facts about the device around the run."""
    telemetry = report["telemetry"]
    if not telemetry:
        return
    if telemetry["cpu_time_ns"] is not None and telemetry["wall_time_ns"]:
        threads = telemetry["cpu_time_ns"] / telemetry["wall_time_ns"]
        yield "cpu time", f"{units.time(telemetry['cpu_time_ns'])} in {units.time(telemetry['wall_time_ns'])}: {threads:.2f} cpus"
    switches = [(word, telemetry[f"{word}_switches"]) for word in ("involuntary", "voluntary")]
    if any(value is not None for _, value in switches):
        yield "switches", " · ".join(f"{value:,} {word}" for word, value in switches if value is not None)
    if telemetry["major_faults"] is not None:
        yield "page faults", f"{telemetry['major_faults']:,} major · {telemetry['minor_faults'] or 0:,} minor"
    if telemetry["psi_cpu_some_us"] is not None:
        yield "waited for a cpu", f"{units.time(telemetry['psi_cpu_some_us'] * 1e3)}, some task of the device"
    if telemetry["affinity"]:
        yield "allowed cpus", str(telemetry["affinity"])
    before, after = telemetry["before"], telemetry["after"]
    yield from _readings(before, after)
    if text := sentences.waits(telemetry["waits"] or ()):
        yield "waited", text
    if text := sentences.settings(telemetry["settings"] or ()):
        yield "settings", text


def _readings(before: Json | None, after: Json | None) -> Iterator[Fact]:
    """Yield the device's readings right before and after the timed pass, as far as it has them."""

    def pair(name: str, form: str) -> str:
        values = [format(reading[name], form) for reading in (before, after) if reading and reading[name] is not None]
        return " → ".join(dict.fromkeys(values) if len(set(values)) == 1 else values)

    if before or after:
        if text := pair("load_1m", ".2f"):
            yield "load average", text
        if text := pair("runnable", "d"):
            yield "runnable tasks", text
        for number, cpu in enumerate((before or after or {})["cpus"] or ()):
            later = after["cpus"][number] if after and number < len(after["cpus"]) else None
            clocks = [reading["frequency_hz"] for reading in (cpu, later) if reading and reading["frequency_hz"]]
            if clocks:
                governor = f", {cpu['governor']}" if cpu["governor"] else ""
                yield f"cpu {cpu['cpu']}", f"{' → '.join(f'{clock / 1e9:.2f}' for clock in clocks)} GHz{governor}"
        for zone in (before or after or {})["zones"] or ():
            later_c = next(
                (reading["temperature_c"] for reading in (after or {}).get("zones") or () if reading["name"] == zone["name"]),
                None,
            )
            end = f" → {later_c:.1f}" if later_c is not None else ""
            yield f"zone {zone['name']}", f"{zone['temperature_c']:.1f}{end} °C"
        if text := pair("battery_share", ".0%"):
            yield "battery", text
    if before and after and before["cpu_stolen_ns"] is not None and after["cpu_stolen_ns"] is not None:
        yield "stolen by the host", units.time(after["cpu_stolen_ns"] - before["cpu_stolen_ns"])


def machine(report: Json) -> Iterator[Fact]:
    """Yield the device, the runner and the toolchain."""
    device, runner, compiled = report["device"], report["runner"], report["compile"] or {}
    if device:
        cores = units.count(device["cores"], "core") if device["cores"] else ""
        kind = [device["soc"], device["arch"], cores, units.size(device["memory_bytes"]) if device["memory_bytes"] else ""]
        yield "device", " · ".join(str(part) for part in (device["name"], *kind) if part)
        yield "system", str(device["os"] or "-")
        yield "device id", str(device["id"])
        if device["emulated"]:
            yield "emulated", "yes"
    if report["threads"]:
        yield "threads", str(report["threads"])
    if runner:
        bundle = f", bundle {runner['bundle_digest'][:12]}" if runner["bundle_digest"] else ""
        cores = f", on cpus {runner['cores']}" if runner["cores"] else ""
        yield "runner", f"{runner['kind']}, ExecuTorch {runner['executorch']}{bundle}{cores}"
    if tools := compiled.get("toolchain"):
        yield "toolchain", " · ".join(f"{name} {version}" for name, version in tools.items() if version)
    if report["model"] and report["model"]["digest"]:
        yield "model", f"{report['model']['name']}, {report['model']['digest'][:16]}"
        files = [f"{file['path']} {file['sha256'][:8]}" for file in report["model"].get("sources") or () if file["sha256"]]
        if files:
            yield "source files", f"{', '.join(files[:12])}{f' and {len(files) - 12} more' if len(files) > 12 else ''}"
    if report["recipe"]:
        yield "recipe", f"{report['recipe']}{f', {digest[:16]}' if (digest := report['recipe_digest']) else ''}"
    if compiled.get("program"):
        yield "program", compiled["program"]["digest"][:16]
    if compiled.get("etrecord"):
        yield "ETRecord", f"{compiled['etrecord']['digest'][:16]}, {units.size(compiled['etrecord']['size_bytes'])}"
    yield "cell", f"{report['cell']}, report {report['id']}"
    if analysis := report["analysis"]:
        yield "analysis", f"by etfarm {analysis['version']}{', from the cache' if analysis['cached'] else ''}"


def compilation(report: Json) -> Iterator[Fact]:
    """Yield facts about the compiled program."""
    compiled = report["compile"]
    if not compiled:
        return
    if compiled["stages"]:
        stages = [f"{stage['stage']} {units.milliseconds(stage['duration_ms'])}" for stage in compiled["stages"]]
        yield "stages", f"{'cached; took ' if compiled['cached'] else ''}{' · '.join(stages)}"
    if sizes := compiled["sizes"]:
        names = (("program", "program_bytes"), ("constants", "constant_bytes"), ("delegates", "delegate_bytes"))
        yield "size", " · ".join(f"{name} {units.size(sizes[key])}" for name, key in names if sizes[key])
        for method, entry in (sizes["methods"] or {}).items():
            planned = f"planned {units.size(sum(entry['planned_bytes']))}" if entry["planned_bytes"] else ""
            inside = f"delegates {units.size(entry['delegate_bytes'])}" if entry["delegate_bytes"] else ""
            if planned or inside:
                yield f"method {method}", " · ".join(filter(None, (planned, inside)))
    for name, file in (compiled["data"] or {}).items():
        yield f"data {name}", units.size(file["size_bytes"])
    if text := answers.delegated_nodes(report):
        yield "delegated", text
    for method, op, count, places in answers.undelegated(report)[:12]:
        of = f"{method}: " if len(compiled["delegation"] or {}) > 1 else ""
        why = answers.undelegated_reasons(places)
        yield "not delegated", f"{of}{count} x {op}{_places(places)}{f': {why}' if why else ''}"
    for method, stayed in (compiled["stayed_fp32"] or {}).items():
        of = f"{method}: " if len(compiled["stayed_fp32"]) > 1 else ""
        for entry in (stayed["operators"] or ())[:12]:
            yield "stayed fp32", f"{of}{entry['count']} x {entry['op']}{_places(entry['places'] or ())}"
    for method, selected in (compiled.get("selected") or {}).items():
        of = f"{method}: " if len(compiled["selected"]) > 1 else ""
        for entry in (selected["names"] or ())[:12]:
            yield "selected", f"{of}{sentences.selected(entry)}"
    for check in compiled["checks"] or ():
        yield "host check", _check(check)


def _places(places: Sequence[Json]) -> str:
    if not places:
        return ""
    first = places[0]
    where = views.line_of(first) or str(first["module"] or "")
    code = f"  {first['source']['code'].strip()}" if first["source"] and first["source"]["code"] else ""
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return f" · {where}{code}{more}" if where else ""


def _check(check: Json) -> str:
    which = f"{check['method']}, {str(check['inputs']).lower()} inputs: "
    if not check["ran"]:
        return f"{which}did not run: {check['why']}"
    if all(output["equal"] for output in check["outputs"] or ()):
        return f"{which}{'equal to eager PyTorch' if check['outputs'] else 'ran'}"
    levels = [output["sqnr_db"] for output in check["outputs"] if output["sqnr_db"] is not None]
    shares = [share for output in check["outputs"] if (share := output.get("equal_share")) is not None]
    if shares and not levels:
        return f"{which}{units.percent(min(shares))} of the integers equal to eager PyTorch's"
    return f"{which}SQNR {decibels(min(levels))} against eager PyTorch" if levels else f"{which}not comparable"


def warnings(report: Json) -> list[str]:
    """Return the compiler's warnings."""
    return [str(warning["message"]) for warning in (report["compile"] or {}).get("warnings") or ()]


def timeline(report: Json) -> list[dict[str, Any]]:
    """Return bars of the cell's phases: {actor, phase, waits, left, width, start, took}.

    `phase` describes it in words, and `waits` is whether it waits for a device, a gate or another run instead of working. `left`
    and `width` are percentages of the whole.
    """
    entries = report["timeline"] or ()
    if not entries:
        return []
    first = min(entry["start_ms"] for entry in entries)
    whole = max(max(entry["start_ms"] + entry["duration_ms"] for entry in entries) - first, 1e-9)
    return [
        {
            "actor": entry["actor"],
            "phase": phases.describe(str(entry["phase"] or "")),
            "waits": _waits(entry),
            "left": round(100 * (entry["start_ms"] - first) / whole, 3),
            "width": round(100 * entry["duration_ms"] / whole, 3),
            "took": units.milliseconds(entry["duration_ms"]),
            "start": f"{entry['start_ms'] / 1e3:+.2f} s",
        }
        for entry in sorted(entries, key=lambda item: item["start_ms"])
    ]


def _waits(entry: Json) -> bool:
    return phases.is_wait(str(entry["phase"]))


def waited(report: Json) -> str:
    """Return how long the cell's phases waited, and how long they worked; empty without a timeline."""
    entries = report["timeline"] or ()
    waits_ms, works_ms = (sum(entry["duration_ms"] for entry in entries if _waits(entry) is waits) for waits in (True, False))
    return f"{units.milliseconds(works_ms)} of work and {units.milliseconds(waits_ms)} of waiting" if entries else ""
