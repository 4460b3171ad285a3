"""The verdict on whether a measurement can be trusted. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from typing import Final

from etfarm.server.reports.latency.thresholds import MIN_FOR_INTERVAL, Thresholds
from etfarm.v1 import agent_pb2, common_pb2, report_pb2
from etfarm.wire.comparison.uncertainty import MIN_RUNS

__all__ = ["Thresholds", "judge", "judge_disturbances", "judge_runs", "required_runs"]

MIN_POINTS: Final = 4
"""Minimum number of readings in a series to conclude that a clock moved."""
_THERMAL: Final = ("none", "light", "moderate", "severe", "critical", "emergency", "shutdown")
"""Android's names of `thermal_status`."""
_REPEATABLE: Final = {
    report_pb2.REPEATABILITY_OUTCOME_EQUAL,
    report_pb2.REPEATABILITY_OUTCOME_KEEPS_STATE,
    report_pb2.REPEATABILITY_OUTCOME_ROUNDING,
}
MIN_SPAN_MS: Final = 200.0
"""Minimum time between two readings of /proc/stat, whose resolution is 10 ms per cpu."""


def judge(
    result: agent_pb2.CandidateResult,
    latency: report_pb2.Latency,
    *,
    emulated: bool,
    thresholds: Thresholds,
    asked_samples: int = 0,
    cores: int = 0,
    clusters: Sequence[Collection[int]] = (),
) -> report_pb2.Verdict:
    """Return NOT_BENCHMARKABLE for an emulated device, INVALID if a check fails, else VALID. The result is deterministic.

    A check passes if the device does not report its numbers. The verdict has all reasons, not only the first.

    Args:
        result: the result of a run that ended without an error.
        latency: the latency, with its samples.
        asked_samples: the number of samples that the job requested; 0 if it left that to the farm.
        cores: number of logical cpus that programs may use on the device; 0 if unknown. The result has the run's own cpus,
            which may be fewer.
        clusters: logical cpus of each kind, fastest first, as the series has their clocks.
    """
    checks = [_outputs(result)]
    if not emulated:
        checks += [
            _samples(result, max(asked_samples, thresholds.min_samples)),
            *_disturbances(result, cores, clusters, thresholds),
            # Checked last, since the preceding reasons are often the cause.
            _drift(result, latency, thresholds),
            judge_slow_group(latency, "samples", thresholds.max_slow_share, _seen_meanwhile(result)),
            _interval(result, latency, thresholds.max_interval),
        ]
    return _verdict(checks, emulated=emulated)


def judge_disturbances(
    result: agent_pb2.CandidateResult,
    *,
    emulated: bool,
    thresholds: Thresholds,
    cores: int = 0,
    clusters: Sequence[Collection[int]] = (),
) -> report_pb2.Verdict:
    """Return whether anything disturbed a run, as `judge` does, without a look at what it measured."""
    return _verdict([] if emulated else _disturbances(result, cores, clusters, thresholds), emulated=emulated)


def _disturbances(
    result: agent_pb2.CandidateResult, cores: int, clusters: Sequence[Collection[int]], thresholds: Thresholds
) -> list[report_pb2.VerdictReason | None]:
    crowd = _crowd(result, cores)
    return [
        crowd,
        _cpu_share(result, thresholds.min_cpu_share),
        # Threads that share a cpu wait for each other, so these numbers would not indicate other processes.
        _switches(result, thresholds) if crowd is None else None,
        _pressure(result, thresholds.max_psi_some) if crowd is None else None,
        _background(result, cores, thresholds),
        _stolen(result, cores, thresholds.max_stolen_share),
        _throttled(result),
        _frequency(result, clusters, thresholds.max_frequency_spread),
    ]


def _verdict(checks: Sequence[report_pb2.VerdictReason | None], *, emulated: bool) -> report_pb2.Verdict:
    reasons = [reason for reason in checks if reason is not None]
    if emulated:
        message = "The device is emulated: its outputs count, its times mean nothing."
        reasons.insert(0, report_pb2.VerdictReason(code="EMULATED", message=message))
        return report_pb2.Verdict(status=report_pb2.VERDICT_STATUS_NOT_BENCHMARKABLE, reasons=reasons)
    status = report_pb2.VERDICT_STATUS_INVALID if reasons else report_pb2.VERDICT_STATUS_VALID
    return report_pb2.Verdict(status=status, reasons=reasons)


def judge_slow_group(
    measured: report_pb2.Latency | report_pb2.Profile, what: str, most: float, seen: str = ""
) -> report_pb2.VerdictReason | None:
    """Return the reason BIMODAL if a slower group has more than a fraction of a pass's samples; None otherwise.

    Args:
        measured: the pass, with the group if there is one.
        what: the plural noun for its samples.
        most: the maximum fraction.
        seen: a sentence about what may have slowed them down.
    """
    if not (measured.HasField("slow_share") and measured.slow_share > most):
        return None
    message = (
        f"{measured.slow_share:.0%} of the {what} took {measured.slow_ratio:.2g} times as long as the others, so the times "
        f"describe neither; at most {most:.0%} is allowed.{seen}"
    )
    return _reason("BIMODAL", message, measured.slow_share, most)


def _seen_meanwhile(result: agent_pb2.CandidateResult) -> str:
    """Return a sentence about what the device counted during a pass, which tells interruptions from a program's own two paces."""
    telemetry, wall = result.telemetry, _wall_s(result)
    counts = []
    if telemetry.HasField("involuntary_switches"):
        switches = telemetry.involuntary_switches
        counts.append(f"{switches:,} involuntary switch{'' if switches == 1 else 'es'} in {result.iterations:,} samples")
    if wall is not None and telemetry.HasField("psi_cpu_some_us"):
        counts.append(f"some task waiting for a cpu {telemetry.psi_cpu_some_us / 1e6 / wall:.0%} of the time")
    return f" Meanwhile the device counted {' and '.join(counts)}." if counts else ""


def required_runs(runs: int) -> int:
    """Return how many of a number of runs must be valid: three or all, and more than half."""
    return max(min(runs, MIN_RUNS), runs // 2 + 1)


def judge_runs(result: agent_pb2.CandidateResult, verdicts: Sequence[report_pb2.Verdict]) -> report_pb2.Verdict:
    """Return the verdict on several runs of a program: VALID if `required_runs` of them are, and all outputs are equal.

    Otherwise it has each reason of the invalid runs once, with their numbers.

    Args:
        result: the result with all runs.
        verdicts: the verdict on each run, all NOT_BENCHMARKABLE on an emulated device.
    """
    outputs = _outputs(result)
    reasons = [] if outputs is None else [outputs]
    if any(verdict.status == report_pb2.VERDICT_STATUS_NOT_BENCHMARKABLE for verdict in verdicts):
        reasons = [*verdicts[0].reasons, *reasons]
        return report_pb2.Verdict(status=report_pb2.VERDICT_STATUS_NOT_BENCHMARKABLE, reasons=reasons)
    valid = sum(verdict.status == report_pb2.VERDICT_STATUS_VALID for verdict in verdicts)
    if valid < required_runs(len(verdicts)):
        runs_of: dict[str, list[int]] = {}
        first: dict[str, report_pb2.VerdictReason] = {}
        for number, verdict in enumerate(verdicts, 1):
            for reason in verdict.reasons:
                runs_of.setdefault(reason.code, []).append(number)
                first.setdefault(reason.code, reason)
        for code, numbers in runs_of.items():
            *before, last = map(str, numbers)
            which = f"Runs {', '.join(before)} and {last}" if before else f"Run {last}"
            message = f"{which} of {len(verdicts)}: {first[code].message}"
            reasons.append(report_pb2.VerdictReason(code=code, message=message))
            for name in ("measured", "threshold"):
                if first[code].HasField(name):
                    setattr(reasons[-1], name, getattr(first[code], name))
    status = report_pb2.VERDICT_STATUS_INVALID if reasons else report_pb2.VERDICT_STATUS_VALID
    return report_pb2.Verdict(status=status, reasons=reasons)


def _interval(result: agent_pb2.CandidateResult, latency: report_pb2.Latency, most: float) -> report_pb2.VerdictReason | None:
    worth = ""
    if latency.HasField("effective_samples"):
        worth = f": its {result.iterations} samples are worth {latency.effective_samples:.0f} independent ones"
    if len(latency.p50_ci95_ns) != 2 and result.iterations >= MIN_FOR_INTERVAL and worth:
        return _reason("TOO_FEW_SAMPLES", f"The median has no interval{worth}.", latency.effective_samples, MIN_FOR_INTERVAL)
    if len(latency.p50_ci95_ns) != 2 or not latency.p50_ns:
        return None
    low, high = latency.p50_ci95_ns
    width = (high - low) / latency.p50_ns
    if width <= most:
        return None
    message = f"The median's interval spans {width:.0%} of it{worth}; at most {most:.0%} is allowed."
    return _reason("TOO_FEW_SAMPLES", message, width, most)


def _drift(
    result: agent_pb2.CandidateResult, latency: report_pb2.Latency, thresholds: Thresholds
) -> report_pb2.VerdictReason | None:
    if not latency.HasField("drift"):
        return None
    drift = latency.drift
    unsteady = result.HasField("steady") and not result.steady
    most = min(thresholds.max_drift, thresholds.max_drift_unsteady) if unsteady else thresholds.max_drift
    if abs(drift) <= most:
        return None
    change = f"The last third of the run was {abs(drift):.0%} {'slower' if drift > 0 else 'faster'} than the first"
    if result.stop_reason == common_pb2.STOP_REASON_DRIFTING:
        change += f", although it was extended to {result.duration_ns / 1e9:.1f} s"
    if unsteady:
        message = (
            f"The warm-up ended before the times were steady, and {change[0].lower()}{change[1:]}; at most {most:.0%} is allowed."
        )
        return _reason("NOT_STEADY", message, drift, most)
    return _reason("DRIFT", f"{change}; at most {most:.0%} is allowed.{_warm_start(result)}", drift, most)


def _crowd(result: agent_pb2.CandidateResult, cores: int) -> report_pb2.VerdictReason | None:
    # The affinity of an unbound runner may include offline cpus, which `cores` does not count.
    allowed = min((count for count in (len(_allowed(result)), cores) if count), default=0)
    if not allowed or result.threads <= allowed:
        return None
    shared = f"{allowed} cpu{'s' if allowed > 1 else ''}"
    message = f"{result.threads} threads shared {shared}; at most one a cpu measures the program."
    return _reason("MORE_THREADS_THAN_CPUS", message, result.threads, allowed)


def _samples(result: agent_pb2.CandidateResult, wanted: int) -> report_pb2.VerdictReason | None:
    count = result.iterations
    if count >= wanted:
        return None
    reasons = {
        common_pb2.STOP_REASON_MAX_TIME: " before the time limit",
        common_pb2.STOP_REASON_MAX_SAMPLES: " before the limit of samples",
    }
    why = reasons.get(result.stop_reason, "")
    message = f"Only {count} samples were taken{why}; at least {wanted} are needed."
    return _reason("TOO_FEW_SAMPLES", message, count, wanted)


def _cpu_share(result: agent_pb2.CandidateResult, least: float) -> report_pb2.VerdictReason | None:
    telemetry, wall = result.telemetry, _wall_s(result)
    if wall is None or not telemetry.HasField("cpu_time_ns"):
        return None
    share = telemetry.cpu_time_ns / 1e9 / wall
    if share >= least:
        return None
    threads = "its thread" if result.threads <= 1 else f"its {result.threads} threads together"
    message = f"The runner had a cpu for {share:.0%} of the timed pass with {threads}; at least {least:.0%} is needed."
    return _reason("CPU_STARVED", message, share, least)


def _switches(result: agent_pb2.CandidateResult, thresholds: Thresholds) -> report_pb2.VerdictReason | None:
    telemetry, wall, most = result.telemetry, _wall_s(result), thresholds.max_involuntary_per_s
    if wall is None or not telemetry.HasField("involuntary_switches"):
        return None
    waited = telemetry.psi_cpu_some_us / 1e6 / wall if telemetry.HasField("psi_cpu_some_us") else 1.0
    if result.threads > 1 and waited < thresholds.min_psi_of_switches:
        return None
    rate = telemetry.involuntary_switches / wall / max(1, result.threads)
    if rate <= most:
        return None
    message = f"Each thread was taken off its cpu {rate:.0f} times a second; at most {most:.0f} are allowed."
    return _reason("INVOLUNTARY_SWITCHES", message, rate, most)


def _pressure(result: agent_pb2.CandidateResult, most: float) -> report_pb2.VerdictReason | None:
    telemetry, wall = result.telemetry, _wall_s(result)
    if wall is None or not telemetry.HasField("psi_cpu_some_us"):
        return None
    share = telemetry.psi_cpu_some_us / 1e6 / wall
    if share <= most:
        return None
    message = f"Some task of the device waited for a cpu in {share:.0%} of the timed pass; at most {most:.0%} is allowed."
    return _reason("CPU_PRESSURE", message, share, most)


def _background(result: agent_pb2.CandidateResult, cores: int, thresholds: Thresholds) -> report_pb2.VerdictReason | None:
    telemetry, wall, span_ms = result.telemetry, _wall_s(result), _span_ms(result)
    failed = next((wait for wait in telemetry.waits if wait.gate == report_pb2.GATE_IDLE and not wait.passed), None)
    waited = ""
    if failed is not None:
        waited = (
            f"it was not idle after {failed.waited_ms / 1e3:.0f} s of waiting either, with {failed.measured:.1f} tasks per cpu"
        )
    before, after = telemetry.before, telemetry.after
    countable = before.HasField("cpu_busy_ns") and after.HasField("cpu_busy_ns") and telemetry.HasField("cpu_time_ns")
    if wall is None or span_ms < MIN_SPAN_MS or not countable:
        if failed is None:
            return None
        message = f"The device was busy with something else: {waited}."
        return _reason("BACKGROUND_LOAD", message, failed.measured, failed.threshold)
    most = max(thresholds.max_background_cpus, thresholds.max_background_share * cores)
    # For interleaved programs, runners_cpu_ns is the CPU time of all of them.
    own = telemetry.runners_cpu_ns / 1e6 / span_ms if telemetry.HasField("runners_cpu_ns") else telemetry.cpu_time_ns / 1e9 / wall
    others = (after.cpu_busy_ns - before.cpu_busy_ns) / 1e6 / span_ms - own
    if others <= most:
        return None
    message = f"Other programs kept {others:.1f} cpus busy during the timed pass; at most {most:.1f} is allowed"
    return _reason("BACKGROUND_LOAD", f"{message}{', and ' if waited else ''}{waited}.", others, most)


def _stolen(result: agent_pb2.CandidateResult, cores: int, most: float) -> report_pb2.VerdictReason | None:
    before, after, span_ms = result.telemetry.before, result.telemetry.after, _span_ms(result)
    if span_ms < MIN_SPAN_MS or not (before.HasField("cpu_stolen_ns") and after.HasField("cpu_stolen_ns")):
        return None
    share = (after.cpu_stolen_ns - before.cpu_stolen_ns) / 1e6 / span_ms / max(1, cores)
    if share <= most:
        return None
    message = f"The device's hypervisor gave {share:.0%} of its cpu time to other guests; at most {most:.0%} is allowed."
    return _reason("CPU_STOLEN", message, share, most)


def _throttled(result: agent_pb2.CandidateResult) -> report_pb2.VerdictReason | None:
    before, after = result.telemetry.before, result.telemetry.after
    if before.HasField("throttle_count") and after.throttle_count > before.throttle_count:
        times = after.throttle_count - before.throttle_count
        message = f"The cpus were throttled {times} times during the timed pass."
        return _reason("THERMAL_THROTTLED", f"{message}{_warm_start(result)}", times, 0)
    for device in (*after.cooling, *before.cooling):
        if device.state > 0:
            message = f"The device was slowed down because of heat: {device.name} is at step {device.state}."
            return _reason("THERMAL_THROTTLED", f"{message}{_warm_start(result)}", device.state, 0)
    status = max(before.thermal_status, after.thermal_status)
    if status > 0:
        message = f"Android slowed the phone down because of heat: its thermal status is {status} ({_THERMAL[min(status, 6)]})."
        return _reason("THERMAL_THROTTLED", f"{message}{_warm_start(result)}", status, 0)
    allowed = {cpu.cpu: cpu.limit_hz for cpu in before.cpus if cpu.HasField("limit_hz")}
    for cpu in after.cpus:
        if cpu.HasField("limit_hz") and cpu.limit_hz < allowed.get(cpu.cpu, 0):
            limits = f"{allowed[cpu.cpu] / 1e9:.2f} to {cpu.limit_hz / 1e9:.2f} GHz"
            message = f"The clock of cpu {cpu.cpu} was limited during the run, from {limits}."
            return _reason("THERMAL_THROTTLED", f"{message}{_warm_start(result)}", cpu.limit_hz, allowed[cpu.cpu])
    return None


def _frequency(
    result: agent_pb2.CandidateResult, clusters: Sequence[Collection[int]], most: float
) -> report_pb2.VerdictReason | None:
    """Check the clock of the fastest cluster that the runner might use; clocks of other clusters follow other loads."""
    cpus = _allowed(result)
    used = next((index for index, members in enumerate(clusters) if not cpus or not cpus.isdisjoint(members)), 0)
    clocks = [point.frequency_hz[used] for point in result.telemetry.series if len(point.frequency_hz) > used]
    if len(clocks) < MIN_POINTS:
        return None
    low, *_, high = statistics.quantiles(clocks, n=10, method="inclusive")
    spread = 1 - low / high if high > 0 else 0.0
    if spread <= most:
        return None
    message = f"The clock moved between {low / 1e9:.2f} and {high / 1e9:.2f} GHz, by {spread:.0%}; at most {most:.0%} is allowed."
    held_back = next(
        (setting for setting in result.telemetry.settings if setting.name == "governor" and not setting.applied), None
    )
    if held_back is not None:
        message += f" Its governor is {held_back.found}, and {held_back.why}."
    return _reason("FREQUENCY_MOVED", f"{message}{_warm_start(result)}", spread, most)


def _outputs(result: agent_pb2.CandidateResult) -> report_pb2.VerdictReason | None:
    repeated = result.repeatability
    if repeated.outcome in _REPEATABLE or (
        not repeated.outcome and (not result.HasField("outputs_equal") or result.outputs_equal)
    ):
        return None
    message = "Passes over the same inputs gave different outputs"
    if not repeated.differences:
        return report_pb2.VerdictReason(code="OUTPUTS_DIFFER", message=f"{message}.")
    worst = max(repeated.differences, key=lambda each: each.max_abs_difference)
    message += f": {_where(worst)}"
    if others := len(repeated.differences) - 1:
        message += f", and {others} more output{'s' if others > 1 else ''}"
    if repeated.outcome == report_pb2.REPEATABILITY_OUTCOME_NONDETERMINISTIC:
        message += ". The program is nondeterministic: the same executions after loading it again gave something else."
    else:
        message += ". It may keep state or be nondeterministic; repeating its executions took too long to tell."
    reason = report_pb2.VerdictReason(code="OUTPUTS_DIFFER", message=message)
    if worst.HasField("max_abs_difference"):
        reason.measured, reason.threshold = worst.max_abs_difference, 0.0
    return reason


def _where(difference: report_pb2.OutputDifference) -> str:
    description = f"output {difference.output!r}"
    if difference.HasField("elements"):
        description += f" in {difference.differing} of {difference.elements} element{'s' if difference.elements > 1 else ''}"
    if difference.HasField("max_abs_difference"):
        description += f", by up to {difference.max_abs_difference:.3g}"
        if difference.at:
            description += f" at {list(difference.at)}"
    return description


def _warm_start(result: agent_pb2.CandidateResult) -> str:
    """Return a sentence if the run started on a device that did not cool down in time; empty otherwise."""
    failed = next((wait for wait in result.telemetry.waits if wait.gate == report_pb2.GATE_COOL and not wait.passed), None)
    if failed is None:
        return ""
    after = f"after {failed.waited_ms / 1e3:.0f} s of waiting" if failed.waited_ms >= 500 else "without waiting"
    return f" It began at {failed.measured:.0f} °C instead of below {failed.threshold:.0f} °C, {after}."


def _span_ms(result: agent_pb2.CandidateResult) -> float:
    return result.telemetry.after.elapsed_ms - result.telemetry.before.elapsed_ms


def _allowed(result: agent_pb2.CandidateResult) -> frozenset[int]:
    """Return the cpus that the runner might use; empty if they are unknown."""
    return _cpus_of(result.runner.cores or result.telemetry.affinity)


def _cpus_of(affinity: str) -> frozenset[int]:
    """Return the cpus of a list such as 0-3,6; empty if it is not a list."""
    cpus: set[int] = set()
    for part in affinity.split(",") if affinity else ():
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            return frozenset()
        cpus.update(range(int(first), min(int(last or first), int(first) + 4096) + 1))
    return frozenset(cpus)


def _wall_s(result: agent_pb2.CandidateResult) -> float | None:
    telemetry = result.telemetry
    wall_ns = telemetry.wall_time_ns if telemetry.HasField("wall_time_ns") else result.duration_ns
    return wall_ns / 1e9 if wall_ns > 0 else None


def _reason(code: str, message: str, measured: float, threshold: float) -> report_pb2.VerdictReason:
    return report_pb2.VerdictReason(code=code, message=message, measured=measured, threshold=threshold)
