"""What disturbed a run: other processes, missing cpu time, throttling, a clock that moved. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from typing import Final

from etfarm.server.reports.latency.thresholds import Thresholds
from etfarm.v1 import agent_pb2, report_pb2

MIN_POINTS: Final = 4
"""Minimum number of readings in a series to conclude that a clock moved."""
_THERMAL: Final = ("none", "light", "moderate", "severe", "critical", "emergency", "shutdown")
"""Android's names of `thermal_status`."""
MIN_SPAN_MS: Final = 200.0
"""Minimum time between two readings of /proc/stat, whose resolution is 10 ms per cpu."""


def check_disturbances(
    result: agent_pb2.CandidateResult, cores: int, clusters: Sequence[Collection[int]], thresholds: Thresholds
) -> list[report_pb2.VerdictReason | None]:
    """Return the result of each check of the run's surroundings: the reason against the run; None if it passed."""
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


def _crowd(result: agent_pb2.CandidateResult, cores: int) -> report_pb2.VerdictReason | None:
    # The affinity of an unbound runner may include offline cpus, which `cores` does not count.
    allowed = min((count for count in (len(_allowed(result)), cores) if count), default=0)
    if not allowed or result.threads <= allowed:
        return None
    shared = f"{allowed} cpu{'s' if allowed > 1 else ''}"
    message = f"{result.threads} threads shared {shared}; at most one a cpu measures the program."
    return build_reason("MORE_THREADS_THAN_CPUS", message, result.threads, allowed)


def _cpu_share(result: agent_pb2.CandidateResult, least: float) -> report_pb2.VerdictReason | None:
    telemetry, wall = result.telemetry, wall_time_s(result)
    if wall is None or not telemetry.HasField("cpu_time_ns"):
        return None
    share = telemetry.cpu_time_ns / 1e9 / wall
    if share >= least:
        return None
    threads = "its thread" if result.threads <= 1 else f"its {result.threads} threads together"
    got, needed = tell_apart(share, least, ".0%")
    message = f"The runner had a cpu for {got} of the timed pass with {threads}; at least {needed} is needed."
    return build_reason("CPU_STARVED", message, share, least)


def _switches(result: agent_pb2.CandidateResult, thresholds: Thresholds) -> report_pb2.VerdictReason | None:
    telemetry, wall, most = result.telemetry, wall_time_s(result), thresholds.max_involuntary_per_s
    if wall is None or not telemetry.HasField("involuntary_switches"):
        return None
    waited = telemetry.psi_cpu_some_us / 1e6 / wall if telemetry.HasField("psi_cpu_some_us") else 1.0
    if result.threads > 1 and waited < thresholds.min_psi_of_switches:
        return None
    rate = telemetry.involuntary_switches / wall / max(1, result.threads)
    if rate <= most:
        return None
    got, allowed = tell_apart(rate, most, ".0f")
    message = f"Each thread was taken off its cpu {got} times a second; at most {allowed} are allowed."
    return build_reason("INVOLUNTARY_SWITCHES", message, rate, most)


def _pressure(result: agent_pb2.CandidateResult, most: float) -> report_pb2.VerdictReason | None:
    telemetry, wall = result.telemetry, wall_time_s(result)
    if wall is None or not telemetry.HasField("psi_cpu_some_us"):
        return None
    share = telemetry.psi_cpu_some_us / 1e6 / wall
    if share <= most:
        return None
    got, allowed = tell_apart(share, most, ".0%")
    message = f"Some task of the device waited for a cpu in {got} of the timed pass; at most {allowed} is allowed."
    return build_reason("CPU_PRESSURE", message, share, most)


def _background(result: agent_pb2.CandidateResult, cores: int, thresholds: Thresholds) -> report_pb2.VerdictReason | None:
    telemetry, wall, span_ms = result.telemetry, wall_time_s(result), _span_ms(result)
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
        return build_reason("BACKGROUND_LOAD", message, failed.measured, failed.threshold)
    most = max(thresholds.max_background_cpus, thresholds.max_background_share * cores)
    # For interleaved programs, runners_cpu_ns is the CPU time of all of them.
    own = telemetry.runners_cpu_ns / 1e6 / span_ms if telemetry.HasField("runners_cpu_ns") else telemetry.cpu_time_ns / 1e9 / wall
    others = (after.cpu_busy_ns - before.cpu_busy_ns) / 1e6 / span_ms - own
    if others <= most:
        return None
    got, allowed = tell_apart(others, most, ".1f")
    message = f"Other programs kept {got} cpus busy during the timed pass; at most {allowed} is allowed"
    return build_reason("BACKGROUND_LOAD", f"{message}{', and ' if waited else ''}{waited}.", others, most)


def _stolen(result: agent_pb2.CandidateResult, cores: int, most: float) -> report_pb2.VerdictReason | None:
    before, after, span_ms = result.telemetry.before, result.telemetry.after, _span_ms(result)
    if span_ms < MIN_SPAN_MS or not (before.HasField("cpu_stolen_ns") and after.HasField("cpu_stolen_ns")):
        return None
    share = (after.cpu_stolen_ns - before.cpu_stolen_ns) / 1e6 / span_ms / max(1, cores)
    if share <= most:
        return None
    got, allowed = tell_apart(share, most, ".0%")
    message = f"The device's hypervisor gave {got} of its cpu time to other guests; at most {allowed} is allowed."
    return build_reason("CPU_STOLEN", message, share, most)


def _throttled(result: agent_pb2.CandidateResult) -> report_pb2.VerdictReason | None:
    before, after = result.telemetry.before, result.telemetry.after
    if before.HasField("throttle_count") and after.throttle_count > before.throttle_count:
        times = after.throttle_count - before.throttle_count
        message = f"The cpus were throttled {times} times during the timed pass."
        return build_reason("THERMAL_THROTTLED", f"{message}{describe_warm_start(result)}", times, 0)
    for device in (*after.cooling, *before.cooling):
        if device.state > 0:
            message = f"The device was slowed down because of heat: {device.name} is at step {device.state}."
            return build_reason("THERMAL_THROTTLED", f"{message}{describe_warm_start(result)}", device.state, 0)
    status = max(before.thermal_status, after.thermal_status)
    if status > 0:
        message = f"Android slowed the phone down because of heat: its thermal status is {status} ({_THERMAL[min(status, 6)]})."
        return build_reason("THERMAL_THROTTLED", f"{message}{describe_warm_start(result)}", status, 0)
    allowed = {cpu.cpu: cpu.limit_hz for cpu in before.cpus if cpu.HasField("limit_hz")}
    for cpu in after.cpus:
        if cpu.HasField("limit_hz") and cpu.limit_hz < allowed.get(cpu.cpu, 0):
            limits = f"{allowed[cpu.cpu] / 1e9:.2f} to {cpu.limit_hz / 1e9:.2f} GHz"
            message = f"The clock of cpu {cpu.cpu} was limited during the run, from {limits}."
            return build_reason("THERMAL_THROTTLED", f"{message}{describe_warm_start(result)}", cpu.limit_hz, allowed[cpu.cpu])
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
    got, allowed = tell_apart(spread, most, ".0%")
    message = f"The clock moved between {low / 1e9:.2f} and {high / 1e9:.2f} GHz, by {got}; at most {allowed} is allowed."
    held_back = next(
        (setting for setting in result.telemetry.settings if setting.name == "governor" and not setting.applied), None
    )
    if held_back is not None:
        message += f" Its governor is {held_back.found}, and {held_back.why}."
    return build_reason("FREQUENCY_MOVED", f"{message}{describe_warm_start(result)}", spread, most)


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


def wall_time_s(result: agent_pb2.CandidateResult) -> float | None:
    """Return the duration of the timed pass in seconds; None if it is unknown."""
    telemetry = result.telemetry
    wall_ns = telemetry.wall_time_ns if telemetry.HasField("wall_time_ns") else result.duration_ns
    return wall_ns / 1e9 if wall_ns > 0 else None


def build_reason(code: str, message: str, measured: float, threshold: float) -> report_pb2.VerdictReason:
    """Return a reason with the measured value and the threshold that it missed."""
    return report_pb2.VerdictReason(code=code, message=message, measured=measured, threshold=threshold)


def tell_apart(value: float, limit: float, kind: str) -> tuple[str, str]:
    """Return a value and the limit that it missed in a format such as `.0%`, with more digits where the texts would be equal."""
    digits, unit = int(kind[1:-1]), kind[-1]
    texts = [(f"{value:.{count}{unit}}", f"{limit:.{count}{unit}}") for count in range(digits, digits + 4)]
    return next((text for text in texts if text[0] != text[1]), texts[-1])


def describe_warm_start(result: agent_pb2.CandidateResult) -> str:
    """Return a sentence if the run started on a device that did not cool down in time; empty otherwise."""
    failed = next((wait for wait in result.telemetry.waits if wait.gate == report_pb2.GATE_COOL and not wait.passed), None)
    if failed is None:
        return ""
    after = f"after {failed.waited_ms / 1e3:.0f} s of waiting" if failed.waited_ms >= 500 else "without waiting"
    return f" It began at {failed.measured:.0f} °C instead of below {failed.threshold:.0f} °C, {after}."
