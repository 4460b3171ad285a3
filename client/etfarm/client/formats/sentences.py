"""A REPORT's verdict and findings in words, with remedies.

These are pure functions.

The command line, the HTML file and Markdown share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etfarm.client.formats import units
from etfarm.wire.sqnr import decibels

Json = Mapping[str, Any]

QUANTIZED_NOTHING = "QUANTIZED_NOTHING"
"""Code of the warning that a recipe which quantizes left a method in fp32."""
_SHOWN_INPUTS = 4
_STOP = "Stop other programs on the device."
_MORE_REPETITIONS = "Give more --repetitions."
_LONGER = "Warm up for longer: give --warmup more than the {warmup:,} of this run."
_ADVICE = {
    "EMULATED": "Numbers of an emulated device say nothing about a real one: use --device emulated=false.",
    "MORE_THREADS_THAN_CPUS": "Give fewer --threads.",
    "CPU_STARVED": "Stop other programs on the device, or give fewer --threads.",
    "INVOLUNTARY_SWITCHES": "Stop other programs on the device, or use free cores with --cores.",
    "CPU_PRESSURE": _STOP,
    "BACKGROUND_LOAD": _STOP,
    "CPU_STOLEN": "Use a device on another host, or a machine of its own.",
    "THERMAL_THROTTLED": "Cool the device better, or let runs begin cooler: etfarm agent --cool-below.",
    "FREQUENCY_MOVED": "Run the agent as root, which lets it set the governor, or set the governor to performance yourself.",
    "DRIFT": _LONGER,
    "NOT_STEADY": _LONGER,
    "BIMODAL": "Stop other programs on the device, and measure again. A program that alternates by itself has no single latency.",
    "SLOWER_THAN_TRACED": "Measure again; --repeat 5 measures in fresh processes and shows how much they vary.",
    "TOO_FEW_SAMPLES": "Give a larger --iterations or --min-time.",
    "OUTPUTS_DIFFER": "Look for races, random numbers or uninitialised memory in the program's kernels.",
}
"""Remedy for a verdict's reason, by code."""

_TRACED_ADVICE = {
    "TOO_FEW_SAMPLES": "Give --trace-iterations.",
    "TRACING_SLOW": "Compare the operators' times with each other, and not with the latency.",
    "TRACING_FAST": "Measure again: the timed pass or the traced one was disturbed.",
    "DRIFT": "Give a larger --trace-iterations, or stop other programs on the device.",
}
"""Remedy for a reason of the traced pass's verdict, by code."""

_DISTURBED = {
    "CPU_STARVED", "INVOLUNTARY_SWITCHES", "CPU_PRESSURE", "BACKGROUND_LOAD", "CPU_STOLEN", "THERMAL_THROTTLED",
    "FREQUENCY_MOVED", "MORE_THREADS_THAN_CPUS",
}  # fmt: skip
_CONSEQUENCES = {"DRIFT", "NOT_STEADY", "BIMODAL", "SLOWER_THAN_TRACED", "TOO_FEW_SAMPLES"}
"""Consequences of a disturbance: next to one, the remedy belongs to the disturbance."""

_EXECUTIONS = {
    "FIRST": "the first execution", "TIMED_LAST": "the last timed one", "TRACED_LAST": "the last traced one",
    "REPEATED": "the same one after loading again",
}  # fmt: skip


@dataclass(frozen=True)
class Reason:
    """A reason why numbers cannot be trusted."""

    message: str
    remedy: str
    """The remedy; empty if a later reason has the same one, or if an earlier reason caused this one."""

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


def verdict(report: Json) -> list[Reason]:
    """Return why the numbers of a REPORT cannot be trusted, with remedies."""
    warmup = (report["measurement"] or {}).get("warmup") or 0
    reasons = (report["verdict"] or {}).get("reasons", ())
    codes = [reason["code"] for reason in reasons]
    full = (report["measurement"] or {}).get("stop_reason") == "MAX_SAMPLES"
    advice = [
        "" if code in _CONSEQUENCES and _DISTURBED.intersection(codes[:place]) else _advice(code, warmup, full=full)
        for place, code in enumerate(codes)
    ]
    if report["generation"]:
        advice = [
            _MORE_REPETITIONS if code == "TOO_FEW_SAMPLES" and text else text for code, text in zip(codes, advice, strict=True)
        ]
    # Show a remedy that several reasons share once, at the last of them.
    return [
        Reason(reason["message"], advice[place] if advice[place] not in advice[place + 1 :] else "")
        for place, reason in enumerate(reasons)
    ]


def traced(profile: Json) -> str:
    """Return `traced 1.88 ms`: the whole of the operators' times."""
    return f"traced {units.time(profile['p50_ns'] if profile['mean_ns'] is None else profile['mean_ns'])}"


def tracing(profile: Json) -> str:
    """Return `30 iterations, median 1.88 ms, 1.02 times the untraced one of the same process, or 0.15 µs for each of 120 events`.

    The ratio is one of medians, and of a single process: neither the mean of the operators' times nor the median over several
    runs gives it.
    """
    parts = [units.count(profile["iterations"], "iteration")]
    if profile["traced_ratio"] is not None:
        parts += [
            f"median {units.time(profile['p50_ns'])}",
            f"{profile['traced_ratio']:.2f} times the untraced one of the same process",
        ]
    if profile["event_cost_ns"] is not None and profile["events"] is not None:
        parts.append(f"or {profile['event_cost_ns'] / 1e3:.2f} µs for each of {profile['events']:,} events")
    if profile["drift"] is not None:
        parts.append(f"drift {change(profile['drift'])}")
    return ", ".join(parts)


def traced_verdict(profile: Json) -> list[Reason]:
    """Return why the times of operators cannot be trusted, with remedies; empty if they can."""
    return [
        Reason(reason["message"], _TRACED_ADVICE.get(reason["code"], _STOP))
        for reason in (profile["verdict"] or {}).get("reasons", ())
        if reason["code"] != "EMULATED"
    ]


def _advice(code: str, warmup: int, *, full: bool) -> str:
    if code == "TOO_FEW_SAMPLES" and full:
        return f"It has as many samples as a pass keeps. {_STOP}"
    return _ADVICE.get(code, "").format(warmup=warmup)


def cut_short(measurement: Json) -> str:
    """Return `450 ms, up to the limit of samples: 1,000,000`; empty if a pass reached all its minimums."""
    limit = {"MAX_SAMPLES": "samples", "MAX_TIME": "time"}.get(measurement["stop_reason"])
    if limit is None or not measurement["duration_ns"]:
        return ""
    samples = units.count(measurement["iterations"], "sample")
    return f"{units.time(measurement['duration_ns'])}, up to the limit of {limit}: {samples}"


def inputs(recorded: Json | None) -> str:
    """Return `image float32[1, 3, 32, 32], mask bool[1, 77], and 3 more`; empty if no inputs were recorded."""
    if recorded is None:
        return ""
    if recorded["digest"] is None:
        return "generated by the runner, seed 0; --inputs FILE.npz replaces them"
    shown = [
        f"{tensor['name'] or place} {tensor['dtype'] or '?'}{tensor['shape'] if 'scalar' not in (tensor['dtype'] or '') else ''}"
        for place, tensor in enumerate(recorded["tensors"] or ())
    ]
    return ", ".join(
        [*shown[:_SHOWN_INPUTS], *([f"and {len(shown) - _SHOWN_INPUTS} more"] if len(shown) > _SHOWN_INPUTS else [])]
    )


def warmup(measurement: Json) -> str:
    """Return `3,895 iterations in 251 ms, until steady`."""
    count, warmup_ns = measurement["warmup"], measurement.get("warmup_ns")
    if not count:
        return "none"
    took = f" in {units.time(warmup_ns)}" if warmup_ns else ""
    steady = measurement.get("steady")
    how = "" if steady is None else ", until steady" if steady else ", and not steady by then"
    return f"{units.count(count, 'iteration')}{took}{how}"


def runs(report: Json) -> str:
    """Return how much medians of separate runs vary: `5 runs, 1.2 % between runs`; empty if unknown."""
    spread, count = report["run_spread"], len(report["runs"])
    several = units.count(count, "run") if count > 1 else ""
    if not spread:
        return several
    # Each earlier report has as many runs as this one.
    what = "reports" if spread["source"] == "HISTORY" and count > 1 else "runs"
    share = f"{units.percent(spread['relative_stddev'])} between {what}"
    if spread["source"] == "HISTORY":
        share += f" (of {units.count(spread['runs'], 'earlier report')})"
    elif spread["source"] != "REPEATS":
        share += " (assumed)"
    return ", ".join(filter(None, (several, share)))


def repeatability(record: Json) -> str:
    """Return `Keeps state: output 'y' ...`: the output that differs most, and between which executions."""
    words = {
        "KEEPS_STATE": "The program keeps state: the same executions after loading it again give the same outputs.",
        "HIDDEN_STATE": "The program writes to no state, and yet its executions depend on those before.",
        "NONDETERMINISTIC": "The program is nondeterministic: the same execution gives other outputs each time.",
        "ROUNDING": "The outputs differ by rounding only, as when threads add in another order.",
    }
    text = words.get(record["outcome"], "Executions on the same inputs gave different outputs.")
    differences = record["differences"] or ()
    if not differences:
        return text
    worst = max(differences, key=lambda entry: entry["max_abs_difference"] or 0.0)
    first, second = (_EXECUTIONS.get(worst[key], str(worst[key])) for key in ("one", "other"))
    by = f" by up to {worst['max_abs_difference']:.3g}" if worst["max_abs_difference"] is not None else ""
    others = f", and {units.count(len(differences) - 1, 'more output')}" if len(differences) > 1 else ""
    return f"{text} Output {worst['output']!r} differs{by} between {first} and {second}{others}."


def waits(records: Iterable[Json]) -> str:
    """Return `12.0 s until the device was below 60 °C`; empty without such a wait.

    Each run waits for itself: `5 times 2.00 s to 12.0 s until the device was idle`. The pause between any two measurements is
    routine and left out.
    """
    groups: dict[tuple[str, bool], list[Json]] = {}
    for wait in records:
        limit = wait["threshold"]
        wanted = {
            "COOL": f"below {limit:g} °C" if limit is not None else "cool",
            "IDLE": "idle",
        }.get(wait["gate"])
        if wanted is not None:
            groups.setdefault((wanted, wait["passed"]), []).append(wait)
    return "; ".join(_wait(wanted, similar, passed=passed) for (wanted, passed), similar in groups.items())


def _wait(wanted: str, similar: Sequence[Json], *, passed: bool) -> str:
    took = _range([wait["waited_ms"] for wait in similar], units.milliseconds)
    times = f"{len(similar)} times " if len(similar) > 1 else ""
    if passed:
        return f"{times}{took} until the device was {wanted}"
    readings = [wait["measured"] for wait in similar if wait["measured"] is not None]
    is_heat = similar[0]["gate"] == "COOL"
    seen = f"{_range(readings, '{:.1f}'.format if is_heat else '{:.2f}'.format)} {'°C' if is_heat else 'tasks per cpu'}"
    return f"{times}{took} for the device to be {wanted}, in vain{f': {seen}' if readings else ''}"


def _range(values: Sequence[float], shown: Callable[[float], str]) -> str:
    """Return the least and the largest value, `2.00 s to 12.0 s`; one value if they look alike."""
    return " to ".join(dict.fromkeys(map(shown, (min(values), max(values))))) if values else ""


def settings(records: Iterable[Json]) -> str:
    """Return settings that were not applied: `the governor of cpus 0-3 stayed powersave: the agent may not write it`."""
    texts = [
        f"the {setting['name']} of cpus {setting['cpus']} stayed {setting['found']} instead of {setting['wanted']}"
        f"{f': {why}' if (why := setting['why']) else ''}"
        for setting in records
        if not setting["applied"]
    ]
    return "; ".join(texts)


def change(share: float) -> str:
    """Return a change, `+2.1 %` for 0.021; a change that rounds to zero has no sign."""
    text = f"{share * 100:+.1f} %"
    return "0.0 %" if text[1:] == "0.0 %" else text


def samples(output: Json) -> str:
    """Return the range of an output's SQNR over single samples, `15.4 dB to 20.1 dB in 8 samples`; empty for one sample."""
    count = output.get("samples") or 1
    if count < 2:
        return ""
    if output["equal"] or output["sqnr_db_min"] is None:
        return f"in {count} samples"
    return f"{decibels(output['sqnr_db_min'])} to {decibels(output['sqnr_db_max'])} in {count} samples"


def worst_status(statuses: Iterable[str]) -> str | None:
    """Return VALID if all statuses of verdicts are, else the first other one; None without any."""
    known = list(statuses)
    return next((status for status in known if status != "VALID"), known[0] if known else None)


def top1(share: float) -> str:
    """Return how often the largest value is the reference's: `top-1 agrees 98.5 %`."""
    return f"top-1 agrees {units.percent(share).replace('.0 %', ' %')}"


def ratio(value: float, interval: Sequence[float] | None) -> str:
    """Return the meaning of a ratio of latencies: `9 % faster`, `no difference found`, `too few rounds to tell`."""
    if not interval:
        return "too few rounds to tell"
    if interval[0] <= 1 <= interval[1]:
        return "no difference found"
    if value <= 0.5 or value >= 2:
        times = max(value, 1 / value) if value > 0 else float("inf")
        return f"{units.significant(times)} times as {'fast' if value < 1 else 'slow'}"
    return f"{units.significant(abs(1 - value) * 100, 2)} % {'faster' if value < 1 else 'slower'}"


def unquantized(report: Json) -> str:
    """Return that a REPORT's program is fp32 although its recipe quantizes; empty if it is not.

    Warnings about other methods of the program do not count.
    """
    method = report["method"]
    for warning in (report["compile"] or {}).get("warnings") or ():
        if warning["code"] == QUANTIZED_NOTHING and (not method or f" in {method}: " in warning["message"]):
            return str(warning["message"])
    return ""


def selected(entry: Json) -> str:
    """Return what a name in a recipe file selected: `skip_modules head: 2 x linear, 0 of 2 quantized`."""
    operators = ", ".join(f"{each['count']} x {each['op']}" for each in (entry["operators"] or ())[:8])
    return f"{entry['argument']} {entry['name']}: {operators}, {entry['quantized']} of {entry['count']} quantized"
