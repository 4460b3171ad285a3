"""The verdict on whether the times of operators, from the traced pass, can be trusted. Pure."""

from __future__ import annotations

from etfarm.server.reports.disturbances import tell_apart
from etfarm.server.reports.latency.thresholds import Thresholds
from etfarm.server.reports.verdict import judge_slow_group
from etfarm.v1 import agent_pb2, report_pb2


def judge_trace(
    profile: report_pb2.Profile, result: agent_pb2.CandidateResult, *, emulated: bool, thresholds: Thresholds
) -> report_pb2.Verdict:
    """Return NOT_BENCHMARKABLE for an emulated device, INVALID if a check fails, else VALID, with all reasons.

    A check passes if the device does not report its numbers. It does not depend on the verdict on the timed pass: the two passes
    run one after the other, and a disturbance may be over by then, or begin then.
    """
    if emulated:
        message = "The device is emulated: its times mean nothing."
        return report_pb2.Verdict(
            status=report_pb2.VERDICT_STATUS_NOT_BENCHMARKABLE,
            reasons=[report_pb2.VerdictReason(code="EMULATED", message=message)],
        )
    checks = (
        _iterations(profile, thresholds.min_traced_iterations),
        _ratio(profile, thresholds),
        *_disturbances(profile, result, thresholds),
    )
    reasons = [reason for reason in checks if reason is not None]
    status = report_pb2.VERDICT_STATUS_INVALID if reasons else report_pb2.VERDICT_STATUS_VALID
    return report_pb2.Verdict(status=status, reasons=reasons)


def is_disturbed(profile: report_pb2.Profile, result: agent_pb2.CandidateResult, thresholds: Thresholds) -> bool:
    """Return whether the traced pass was disturbed: its difference to the timed pass is then not the cost of tracing."""
    return any(reason is not None for reason in _disturbances(profile, result, thresholds))


def _disturbances(
    profile: report_pb2.Profile, result: agent_pb2.CandidateResult, thresholds: Thresholds
) -> tuple[report_pb2.VerdictReason | None, ...]:
    return (
        _cpu_share(result, thresholds.min_cpu_share),
        _switches(result, thresholds),
        _drift(profile, thresholds.max_drift),
        judge_slow_group(profile, "traced iterations", thresholds.max_slow_share),
    )


def _iterations(profile: report_pb2.Profile, least: int) -> report_pb2.VerdictReason | None:
    if profile.iterations >= least:
        return None
    message = f"Only {profile.iterations} iterations were traced; at least {least} are needed."
    return _reason("TOO_FEW_SAMPLES", message, profile.iterations, least)


def _ratio(profile: report_pb2.Profile, thresholds: Thresholds) -> report_pb2.VerdictReason | None:
    if not profile.HasField("traced_ratio"):
        return None
    ratio, most, least = profile.traced_ratio, thresholds.max_traced_ratio, 1 - thresholds.max_drift
    if ratio > most:
        got, allowed = tell_apart(ratio, most, ".2f")
        message = f"Traced iterations took {got} times as long as untraced ones; at most {allowed} is allowed."
        if profile.HasField("event_cost_ns"):
            message += f" Each of {profile.events} events cost {profile.event_cost_ns / 1e3:.2f} µs."
        return _reason("TRACING_SLOW", message, ratio, most)
    if ratio < least:
        message = (
            f"Traced iterations took {ratio:.2f} times as long as untraced ones, although tracing costs time: the passes ran "
            f"under different conditions; at least {least:.2f} is expected."
        )
        return _reason("TRACING_FAST", message, ratio, least)
    return None


def _cpu_share(result: agent_pb2.CandidateResult, least: float) -> report_pb2.VerdictReason | None:
    telemetry = result.traced_telemetry
    if not telemetry.HasField("cpu_time_ns") or telemetry.wall_time_ns <= 0:
        return None
    share = telemetry.cpu_time_ns / telemetry.wall_time_ns
    if share >= least:
        return None
    got, needed = tell_apart(share, least, ".0%")
    message = f"The runner had a cpu for {got} of the traced pass; at least {needed} is needed."
    return _reason("CPU_STARVED", message, share, least)


def _switches(result: agent_pb2.CandidateResult, thresholds: Thresholds) -> report_pb2.VerdictReason | None:
    telemetry, iterations, threads = result.traced_telemetry, len(result.traced_ns), max(1, result.threads)
    if not telemetry.HasField("involuntary_switches") or telemetry.wall_time_ns <= 0 or not iterations:
        return None
    per_iteration = telemetry.involuntary_switches / threads / iterations
    per_s = telemetry.involuntary_switches / threads / (telemetry.wall_time_ns / 1e9)
    most = thresholds.max_traced_interruptions
    if per_iteration <= most or per_s <= thresholds.max_involuntary_per_s:
        return None
    message = (
        f"Each thread was taken off its cpu {per_iteration:.2f} times per traced iteration, {per_s:.0f} times a second; "
        f"at most {most:.2f} and {thresholds.max_involuntary_per_s:.0f} are allowed."
    )
    return _reason("INVOLUNTARY_SWITCHES", message, per_iteration, most)


def _drift(profile: report_pb2.Profile, most: float) -> report_pb2.VerdictReason | None:
    if not profile.HasField("drift") or abs(profile.drift) <= most:
        return None
    got, allowed = tell_apart(abs(profile.drift), most, ".0%")
    change = f"{got} {'slower' if profile.drift > 0 else 'faster'}"
    message = f"The last third of the traced pass was {change} than the first; at most {allowed} is allowed."
    return _reason("DRIFT", message, profile.drift, most)


def _reason(code: str, message: str, measured: float, threshold: float) -> report_pb2.VerdictReason:
    return report_pb2.VerdictReason(code=code, message=message, measured=measured, threshold=threshold)
