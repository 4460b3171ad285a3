"""A job as a trace for ui.perfetto.dev: each method's operators over time, and the job's phases.

Each report is a process with one traced execution of its method: method > operator or delegate > the delegate's kernels, from 0
on, so that reports are below each other. The job is a process with the phases of each actor, below them. An execution takes
microseconds and phases take seconds, and a viewer initially shows all of both: a process name contains the duration and, for
an execution, where to zoom in. Slices without a recorded start have `reconstructed: true` among their arguments and the
category `reconstructed`.

Source: the Trace Event Format of Chrome; complete events ("X") nest by containment within a thread; times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etfarm.client.formats import answers, label, phases, units
from etfarm.wire import views
from etfarm.wire.escapes import in_a_line

Json = Mapping[str, Any]

JOB_PROCESS = 1
"""Process id of the job's phases; reports follow."""


def write(document: Json) -> bytes:
    """Return the trace of a document as JSON."""
    return (json.dumps(trace(document), allow_nan=False, ensure_ascii=False) + "\n").encode()


def trace(document: Json) -> dict[str, Any]:
    """Return the trace of a document: {traceEvents, displayTimeUnit, otherData}."""
    job = document["job"] or {}
    events: list[Json] = []
    facts: dict[str, Any] = {"schema": document["schema"], "job": job.get("id"), "submitted_at": job.get("submitted_at")}
    for place, report in enumerate(document["reports"]):
        process = JOB_PROCESS + 1 + place
        if report["operators"] and report["profile"]:
            title = label(report)
            slices = list(_execution(report, process))
            length_ns = slices[0]["dur"] * 1e3
            name = f"{title}: traced pass, from 0 to {units.time(length_ns)} (zoom in at the left end)"
            events += _named(process, name, sort=place)
            events += [{"ph": "M", "pid": process, "tid": 1, "name": "thread_name", "args": {"name": "one traced execution"}}]
            events += slices
            facts[title] = _facts(report)
    events += _timeline(document["reports"], job.get("id"))
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": facts}


def _facts(report: Json) -> dict[str, Any]:
    latency, compiled, verdict = report["latency"] or {}, report["compile"] or {}, report["verdict"] or {}
    return {
        "p50_ns": latency.get("p50_ns"),
        "verdict": verdict.get("status"),
        "traced_p50_ns": report["profile"]["p50_ns"],
        "device": report["device"],
        "runner": report["runner"],
        "toolchain": compiled.get("toolchain"),
        "program": compiled.get("program"),
    }


def _named(process: int, name: str, sort: int) -> list[Json]:
    return [
        {"ph": "M", "pid": process, "name": "process_name", "args": {"name": in_a_line(name or "")}},
        {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": sort}},
    ]


def _execution(report: Json, process: int) -> Iterator[Json]:
    """Yield the method, and below it its rows as executed.

    REST rows are not slices: they are the gaps.
    """
    profile, rows = report["profile"], [row for row in report["operators"] if row["kind"] != "REST"]
    tops = [row for row in rows if row["parent"] is None]
    times, shown = profile["times_ns"] or (), profile["shown"]
    recorded = all(row["start_ns"] is not None for row in tops)
    length_ns = float(times[shown] if recorded and shown is not None and shown < len(times) else profile["p50_ns"])
    ends = [row["start_ns"] + (row["duration_ns"] or 0.0) for row in tops] if recorded else []
    length_ns = max([length_ns, *ends])
    yield _slice(
        process, report["method"] or "method", 0.0, length_ns, {"iterations": profile["iterations"]}, made_up=not recorded
    )
    for row, start_ns, end_ns, made_up in _placed(tops, 0.0, length_ns, profile["p50_ns"]):
        yield _slice(process, row["name"], start_ns, end_ns, _arguments(row), made_up=made_up)
        kernels = [candidate for candidate in rows if candidate["parent"] == row["index"]]
        for kernel, begin_ns, stop_ns, laid in _placed(kernels, start_ns, end_ns, profile["p50_ns"]):
            yield _slice(process, kernel["name"], begin_ns, stop_ns, _arguments(kernel), made_up=laid or made_up)


def _placed(rows: Sequence[Json], start_ns: float, end_ns: float, whole_ns: float) -> Iterator[tuple[Json, float, float, bool]]:
    """Yield each row with its start and end within [start_ns, end_ns], without overlaps, and whether they are reconstructed.

    Known starts of all rows are kept. Otherwise each row follows the previous one; it takes its share of a typical
    execution of `whole_ns`, or its time without a share.
    """
    known = all(row["start_ns"] is not None for row in rows)
    ordered = sorted(rows, key=lambda row: row["start_ns"]) if known else rows
    at = start_ns
    for row in ordered:
        begin = row["start_ns"] if known else at
        # Shares add up to the whole; times of single rows need not.
        share, mean_ns = row["share"], answers.time_ns(row)
        # A kernel below the clock's resolution started, but its duration is unknown.
        length = row["duration_ns"] or 0.0 if known else (share * whole_ns if share is not None else mean_ns or 0.0)
        begin = min(max(begin, at), end_ns)
        end = min(max(begin + length, begin), end_ns)
        yield row, begin, end, bool(row["reconstructed"]) or not known
        at = end


def _arguments(row: Json) -> dict[str, Any]:
    source = row["source"]
    arguments = {
        "source": views.line_of(row),
        "code": source["code"] if source else None,
        "module": row["module"],
        "op_types": ", ".join(row["op_types"]) or None,
        "backend": row["backend"],
        "delegated": row["delegated"],
        "share": row["share"],
        "mean_ns": row["mean_ns"],
        "mean_ci95_ns": row["mean_ci95_ns"],
        "p10_ns": row["p10_ns"],
        "p50_ns": row["p50_ns"],
        "p90_ns": row["p90_ns"],
        "resolution_ns": row["resolution_ns"],
        "index": row["index"],
        "instruction_id": row["instruction_id"],
        "debug_handles": row["debug_handles"] or None,
        "unaligned_reason": row["unaligned_reason"],
        "source_reason": row["source_reason"],
    }
    return {name: value for name, value in arguments.items() if value is not None}


def _slice(process: int, name: str, start_ns: float, end_ns: float, arguments: Json, *, made_up: bool) -> Json:
    return {
        "ph": "X",
        "pid": process,
        "tid": 1,
        "name": in_a_line(name or ""),
        "cat": "reconstructed" if made_up else "recorded",
        # Whole nanoseconds: a rounding error would otherwise nest siblings.
        "ts": round(start_ns) / 1e3,
        "dur": (round(end_ns) - round(start_ns)) / 1e3,
        "args": {**arguments, "reconstructed": True} if made_up else dict(arguments),
    }


def _timeline(reports: Sequence[Json], job: str | None) -> list[Json]:
    """Return the phases of all cells, with a thread per actor, and more if cells overlap; the first phase is at 0."""
    entries = [(phase, label(report)) for report in reports for phase in report["timeline"] or ()]
    if not entries:
        return []
    first_ms = min(phase["start_ms"] for phase, _ in entries)
    length_ns = max(phase["start_ms"] + phase["duration_ms"] - first_ms for phase, _ in entries) * 1e6
    whose = f"job {job}: its phases" if job else "the job's phases"
    events = _named(JOB_PROCESS, f"{whose}, from 0 to {units.time(length_ns)}", sort=len(reports))
    lanes: dict[tuple[str, int], float] = {}
    seen = set()
    for phase, of in sorted(entries, key=lambda item: (item[0]["start_ms"], -item[0]["duration_ms"])):
        key = (phase["actor"], phase["phase"], phase["start_ms"], phase["duration_ms"])
        if key in seen:  # cells that share a compilation each contain its phases
            continue
        seen.add(key)
        start_us, length_us = (phase["start_ms"] - first_ms) * 1e3, max(phase["duration_ms"], 0.0) * 1e3
        lane = next((n for n in range(len(entries)) if lanes.get((phase["actor"], n), 0.0) <= start_us), 0)
        if (phase["actor"], lane) not in lanes:
            thread = 1 + len(lanes)
            name = phase["actor"] if lane == 0 else f"{phase['actor']} ({lane + 1})"
            events += [
                {"ph": "M", "pid": JOB_PROCESS, "tid": thread, "name": "thread_name", "args": {"name": in_a_line(name or "")}},
                {"ph": "M", "pid": JOB_PROCESS, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}},
            ]
        lanes[phase["actor"], lane] = start_us + length_us
        thread = 1 + list(lanes).index((phase["actor"], lane))
        arguments = {"cell": of, "phase": phase["phase"], "start_ms": phase["start_ms"]}
        name = in_a_line(phases.describe(phase["phase"] or ""))
        events.append(
            {"ph": "X", "pid": JOB_PROCESS, "tid": thread, "name": name, "cat": "phase", "ts": start_us,
             "dur": length_us, "args": arguments}
        )  # fmt: skip
    return events
