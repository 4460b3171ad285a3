"""The verdict on whether a measurement can be trusted. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from typing import Final

from etfarm.server.reports.disturbances import build_reason, check_disturbances, describe_warm_start, tell_apart, wall_time_s
from etfarm.server.reports.latency.thresholds import MIN_FOR_INTERVAL, Thresholds
from etfarm.v1 import agent_pb2, common_pb2, report_pb2
from etfarm.wire.comparison.uncertainty import MIN_RUNS
from etfarm.wire.messages import copy_fields

__all__ = ["Thresholds", "judge", "judge_disturbances", "judge_runs", "required_runs"]

_REPEATABLE: Final = {
    report_pb2.REPEATABILITY_OUTCOME_EQUAL,
    report_pb2.REPEATABILITY_OUTCOME_KEEPS_STATE,
    report_pb2.REPEATABILITY_OUTCOME_ROUNDING,
}


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
            *check_disturbances(result, cores, clusters, thresholds),
            # Checked last, since the preceding reasons are often the cause.
            _drift(result, latency, thresholds),
            judge_slow_group(latency, "samples", thresholds.max_slow_share, _seen_meanwhile(result)),
            _slowed_down(result, latency, thresholds),
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
    return _verdict([] if emulated else check_disturbances(result, cores, clusters, thresholds), emulated=emulated)


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
    got, allowed = tell_apart(measured.slow_share, most, ".0%")
    message = (
        f"{got} of the {what} took {measured.slow_ratio:.2g} times as long as the others, so the times "
        f"describe neither; at most {allowed} is allowed.{seen}"
    )
    return build_reason("BIMODAL", message, measured.slow_share, most)


def _seen_meanwhile(result: agent_pb2.CandidateResult) -> str:
    """Return a sentence about what the device counted during a pass, which tells interruptions from a program's own two paces."""
    telemetry, wall = result.telemetry, wall_time_s(result)
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
            copy_fields(first[code], reasons[-1], ("measured", "threshold"))
    status = report_pb2.VERDICT_STATUS_INVALID if reasons else report_pb2.VERDICT_STATUS_VALID
    return report_pb2.Verdict(status=status, reasons=reasons)


def _interval(result: agent_pb2.CandidateResult, latency: report_pb2.Latency, most: float) -> report_pb2.VerdictReason | None:
    worth = ""
    if latency.HasField("effective_samples"):
        worth = f": its {result.iterations} samples are worth {latency.effective_samples:.0f} independent ones"
    if len(latency.p50_ci95_ns) != 2 and result.iterations >= MIN_FOR_INTERVAL and worth:
        return build_reason("TOO_FEW_SAMPLES", f"The median has no interval{worth}.", latency.effective_samples, MIN_FOR_INTERVAL)
    if len(latency.p50_ci95_ns) != 2 or not latency.p50_ns:
        return None
    low, high = latency.p50_ci95_ns
    width = (high - low) / latency.p50_ns
    if width <= most:
        return None
    got, allowed = tell_apart(width, most, ".0%")
    message = f"The median's interval spans {got} of it{worth}; at most {allowed} is allowed."
    return build_reason("TOO_FEW_SAMPLES", message, width, most)


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
    got, allowed = tell_apart(abs(drift), most, ".0%")
    change = f"The last third of the run was {got} {'slower' if drift > 0 else 'faster'} than the first"
    if result.stop_reason == common_pb2.STOP_REASON_DRIFTING:
        change += f", although it was extended to {result.duration_ns / 1e9:.1f} s"
    if unsteady:
        message = (
            f"The warm-up ended before the times were steady, and {change[0].lower()}{change[1:]}; at most {allowed} is allowed."
        )
        return build_reason("NOT_STEADY", message, drift, most)
    return build_reason("DRIFT", f"{change}; at most {allowed} is allowed.{describe_warm_start(result)}", drift, most)


def _slowed_down(
    result: agent_pb2.CandidateResult, latency: report_pb2.Latency, thresholds: Thresholds
) -> report_pb2.VerdictReason | None:
    # Programs that take turns evict each other's caches, and only the timed pass is interleaved.
    traced, least = result.traced_ns, 1 - thresholds.max_drift
    if result.blocks or len(traced) < thresholds.min_traced_iterations or not latency.p50_ns:
        return None
    # The slower quarter is left out, which may be interrupted; a median of few iterations would vary more.
    ratio = statistics.quantiles(traced, n=4, method="inclusive")[2] / latency.p50_ns
    if ratio >= least:
        return None
    got, needed = tell_apart(ratio, least, ".2f")
    message = (
        f"Three of four traced iterations took at most {got} times as long as the timed median, although tracing costs time: "
        f"something slowed the timed pass down. At least {needed} is expected."
    )
    return build_reason("SLOWER_THAN_TRACED", message, ratio, least)


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
    return build_reason("TOO_FEW_SAMPLES", message, count, wanted)


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
    elif repeated.outcome == report_pb2.REPEATABILITY_OUTCOME_HIDDEN_STATE:
        message += (
            ". The program writes to no state, and yet its executions depend on those before: an operator or a backend is at "
            "fault. Accuracy is that of the last timed execution."
        )
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
