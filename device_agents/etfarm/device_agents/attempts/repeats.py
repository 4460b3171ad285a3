"""Repeated runs: fresh processes that measure one program, one after the other, as one result.

The placement of code and data in memory makes a process faster or slower for its whole life, so a single process does not show
how much its median varies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from etfarm.v1 import agent_pb2, common_pb2, job_pb2, report_pb2
from etfarm.wire.messages import copy_fields

MAX_POINTS: Final = 120
"""Maximum number of points in a result's series."""

_COUNTERS: Final = (
    "cpu_time_ns", "wall_time_ns", "voluntary_switches", "involuntary_switches", "minor_faults", "major_faults",
    "psi_cpu_some_us", "sampler_cpu_ns",
)  # fmt: skip


def repeat_of(measurement: job_pb2.Measurement) -> int:
    """Return how many processes measure the program."""
    return max(1, measurement.repeat)


def add_run(result: agent_pb2.CandidateResult, part: agent_pb2.CandidateResult, begins_ms: float) -> None:
    """Add a further process's measurement to a result, which has the first one's in its own fields and in `runs`.

    Call `join_series` after the last one.

    Args:
        part: the measurement of the process, as the result of its own.
        begins_ms: when its timed pass began, from the beginning of the first one.
    """
    result.runs.append(run_of(part))
    result.warmup += part.warmup
    if part.HasField("warmup_ns"):
        result.warmup_ns += part.warmup_ns
    result.iterations += part.iterations
    result.duration_ns += part.duration_ns
    if result.stop_reason == common_pb2.STOP_REASON_ENOUGH:
        result.stop_reason = part.stop_reason
    if part.HasField("steady"):
        result.steady = result.steady and part.steady
    if part.memory.HasField("peak_rss_bytes"):
        result.memory.peak_rss_bytes = max(result.memory.peak_rss_bytes, part.memory.peak_rss_bytes)
    _add_telemetry(result.telemetry, part.telemetry, begins_ms)
    result.traced_ns.extend(part.traced_ns)
    if part.HasField("traced_telemetry"):
        result.traced_telemetry.CopyFrom(part.traced_telemetry)
    if part.HasField("repeatability"):
        result.repeatability.CopyFrom(part.repeatability)
    if part.HasField("outputs_equal"):
        result.outputs_equal = part.outputs_equal


def join_series(result: agent_pb2.CandidateResult, begins_ms: Sequence[float]) -> None:
    """Set a result's series to those of all its runs, thinned to MAX_POINTS by one step, so that all runs keep their share.

    Args:
        begins_ms: when the timed pass of each run began, from the beginning of the first one.
    """
    points: list[report_pb2.TelemetryPoint] = []
    for run, begin_ms in zip(result.runs, begins_ms, strict=True):
        for point in run.telemetry.series:
            points.append(report_pb2.TelemetryPoint())
            points[-1].CopyFrom(point)
            points[-1].elapsed_ms += begin_ms
    del result.telemetry.series[:]
    result.telemetry.series.extend(points[:: max(1, math.ceil(len(points) / MAX_POINTS))])


def run_of(part: agent_pb2.CandidateResult) -> agent_pb2.MeasuredRun:
    """Return the run of one process from its result."""
    run = agent_pb2.MeasuredRun(
        warmup=part.warmup, iterations=part.iterations, duration_ns=part.duration_ns, stop_reason=part.stop_reason,
        load=part.load, telemetry=part.telemetry,
    )  # fmt: skip
    copy_fields(part, run, ("steady", "warmup_ns"))
    return run


def add_counters(whole: report_pb2.RunTelemetry, part: report_pb2.RunTelemetry) -> None:
    """Add the counters of a part; a counter that the part or the whole lacks is unknown for the whole."""
    for name in _COUNTERS:
        if whole.HasField(name) and part.HasField(name):
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
        else:
            whole.ClearField(name)


def _add_telemetry(whole: report_pb2.RunTelemetry, part: report_pb2.RunTelemetry, begins_ms: float) -> None:
    """Add the telemetry of a further run: counters are summed, and `after` is the later one."""
    add_counters(whole, part)
    if part.HasField("after"):
        whole.after.CopyFrom(part.after)
        whole.after.elapsed_ms += begins_ms
    whole.waits.extend(part.waits)
