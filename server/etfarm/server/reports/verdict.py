"""Step 9, in the daemon: whether a measurement can be trusted."""

from __future__ import annotations

from dataclasses import dataclass

from etfarm.v1 import agent_pb2, report_pb2


@dataclass(frozen=True)
class Thresholds:
    """What makes a measurement INVALID."""

    min_samples: int = 100
    """Fewer tell no p99, and the median's 95 % interval covers a fifth of all samples."""

    min_cpu_share: float = 0.9
    """CPU time of the runner over the wall time of the timed pass, of one thread. A runner does nothing but compute, so one that
    got less was waiting: for a cpu that another process had, for memory that was paged out, or for a throttled guest. The
    threads of a small model mostly wait for each other, which is the model's own doing and no interference; so several
    threads have to reach this share together and not each."""

    max_involuntary_per_s: float = 200.0
    """Involuntary context switches a second and thread. Sharing a cpu with one busy process costs a switch each time slice,
    every 3 to 4 ms, thus 250 and more. The system's own housekeeping reached 160 on an otherwise idle virtual machine whose
    two cpus were both measured on; those are short, and what they take min_cpu_share bounds."""

    min_psi_of_switches: float = 0.1
    """Part of the timed pass in which some task waited for a cpu, below which switches are not held against a run of several
    threads: they wake each other on one cpu hundreds of times a second in small models (500 were seen on an idle machine, at
    6 %), which is the program's own doing. Where the device does not tell, the switches count."""

    max_psi_some: float = 0.25
    """Part of the timed pass in which some task of the device waited for a cpu (/proc/pressure/cpu). It counts other
    processes waiting for ours as well, so a little is normal; above a quarter neighbours run most of the time, and they
    slow caches, memory and clocks even where they leave our cpus alone."""


def judge(
    result: agent_pb2.CandidateResult,
    latency: report_pb2.Latency,
    *,
    emulated: bool,
    thresholds: Thresholds,
    asked_samples: int = 0,
    cores: int = 0,
) -> report_pb2.Verdict:
    """NOT_BENCHMARKABLE on an emulated device, INVALID where a check fails, VALID otherwise. Equal arguments, equal verdicts.

    What the device does not measure is not held against it: a check without its numbers passes. All reasons are told, not
    only the first.

    Args:
        result: of a run that ended without an error.
        latency: with its samples.
        asked_samples: the samples that the job asked for; 0 when it left that to the farm.
        cores: logical cpus that programs may use on the device; 0 when that is not known.
    """
    checks = [_outputs(result)]
    if not emulated:
        checks += [
            _samples(result, latency, max(asked_samples, thresholds.min_samples)),
            _crowd(result, cores),
            _cpu_share(result, thresholds.min_cpu_share),
            _switches(result, thresholds),
            _pressure(result, thresholds.max_psi_some),
        ]
    reasons = [reason for reason in checks if reason is not None]
    if emulated:
        message = "The device is emulated: its outputs count, its times mean nothing."
        reasons.insert(0, report_pb2.VerdictReason(code="EMULATED", message=message))
        return report_pb2.Verdict(status=report_pb2.VERDICT_STATUS_NOT_BENCHMARKABLE, reasons=reasons)
    status = report_pb2.VERDICT_STATUS_INVALID if reasons else report_pb2.VERDICT_STATUS_VALID
    return report_pb2.Verdict(status=status, reasons=reasons)


def _crowd(result: agent_pb2.CandidateResult, cores: int) -> report_pb2.VerdictReason | None:
    if not cores or result.threads <= cores:
        return None
    message = f"{result.threads} threads shared {cores} cpu{'s' if cores > 1 else ''}; at most one a cpu measures the program."
    return _reason("MORE_THREADS_THAN_CPUS", message, result.threads, cores)


def _samples(result: agent_pb2.CandidateResult, latency: report_pb2.Latency, wanted: int) -> report_pb2.VerdictReason | None:
    count = len(latency.samples_ns)
    if count >= wanted:
        return None
    why = {"MAX_TIME": " before the time limit", "MAX_SAMPLES": " before the limit of samples"}.get(result.stop_reason, "")
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


def _outputs(result: agent_pb2.CandidateResult) -> report_pb2.VerdictReason | None:
    if not result.HasField("outputs_equal") or result.outputs_equal:
        return None
    message = "The timed and the traced pass gave different outputs for the same inputs."
    return report_pb2.VerdictReason(code="OUTPUTS_DIFFER", message=message)


def _wall_s(result: agent_pb2.CandidateResult) -> float | None:
    telemetry = result.telemetry
    wall_ns = telemetry.wall_time_ns if telemetry.HasField("wall_time_ns") else result.duration_ns
    return wall_ns / 1e9 if wall_ns > 0 else None


def _reason(code: str, message: str, measured: float, threshold: float) -> report_pb2.VerdictReason:
    return report_pb2.VerdictReason(code=code, message=message, measured=measured, threshold=threshold)
