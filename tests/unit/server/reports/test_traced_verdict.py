"""The verdict on the traced pass: of its own, whatever that of the timed pass."""

from __future__ import annotations

from typing import Any

import pytest

from etfarm.server.reports.latency.thresholds import Thresholds
from etfarm.server.reports.traced_verdict import is_disturbed, judge_trace
from etfarm.v1 import agent_pb2, report_pb2

MILLISECOND = 1_000_000


def judge(
    *, emulated: bool = False, iterations: int = 30, threads: int = 1, counters: dict[str, int] | None = None, **profile: Any
) -> report_pb2.Verdict:
    calm = {"cpu_time_ns": 30 * MILLISECOND, "wall_time_ns": 30 * MILLISECOND, "involuntary_switches": 1}
    result = agent_pb2.CandidateResult(threads=threads, traced_ns=[MILLISECOND] * iterations)
    result.traced_telemetry.CopyFrom(report_pb2.RunTelemetry(**(calm if counters is None else counters)))
    profile = {"traced_ratio": 1.02, "drift": 0.01, "events": 100, "event_cost_ns": 150.0, **profile}
    full = report_pb2.Profile(iterations=iterations, p50_ns=1e6, **profile)
    return judge_trace(full, result, emulated=emulated, thresholds=Thresholds())


def test_a_calm_pass_is_valid() -> None:
    assert judge() == report_pb2.Verdict(status=report_pb2.VERDICT_STATUS_VALID)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"iterations": 9}, "TOO_FEW_SAMPLES"),
        ({"traced_ratio": 2.4}, "TRACING_SLOW"),
        ({"traced_ratio": 0.8}, "TRACING_FAST"),
        ({"drift": -0.2}, "DRIFT"),
        ({"slow_share": 0.4, "slow_ratio": 1.6}, "BIMODAL"),
        ({"counters": {"cpu_time_ns": 20 * MILLISECOND, "wall_time_ns": 30 * MILLISECOND}}, "CPU_STARVED"),
        (
            {"counters": {"wall_time_ns": 30 * MILLISECOND, "cpu_time_ns": 30 * MILLISECOND, "involuntary_switches": 8}},
            "INVOLUNTARY_SWITCHES",
        ),
    ],
)
def test_what_makes_times_of_operators_doubtful_is_named(change: dict[str, Any], code: str) -> None:
    verdict = judge(**change)
    assert verdict.status == report_pb2.VERDICT_STATUS_INVALID
    (reason,) = verdict.reasons
    assert reason.code == code and reason.message.endswith(".") and reason.HasField("measured")


def test_a_quarter_of_slow_iterations_does_not_reach_the_times_of_operators() -> None:
    assert judge(slow_share=0.25, slow_ratio=1.6).status == report_pb2.VERDICT_STATUS_VALID
    (reason,) = judge(slow_share=0.4, slow_ratio=1.6).reasons
    assert reason.message.startswith("40% of the traced iterations took 1.6 times as long as the others")
    interrupted = report_pb2.Profile(iterations=30, slow_share=0.4, slow_ratio=1.6)
    assert is_disturbed(interrupted, agent_pb2.CandidateResult(), Thresholds()), "the difference is not the cost of tracing"


def test_the_cost_of_tracing_is_explained() -> None:
    (reason,) = judge(traced_ratio=2.4).reasons
    assert "2.40 times as long as untraced" in reason.message and "Each of 100 events cost 0.15 µs." in reason.message


@pytest.mark.parametrize(("drift", "disturbed"), [(0.05, False), (0.2, True), (-0.2, True)])
def test_a_pass_that_drifts_is_disturbed_and_a_slow_one_is_not(drift: float, disturbed: bool) -> None:
    profile = report_pb2.Profile(iterations=30, traced_ratio=2.4, drift=drift)
    assert is_disturbed(profile, agent_pb2.CandidateResult(traced_ns=[MILLISECOND] * 30), Thresholds()) is disturbed


def test_a_few_interruptions_are_left_out_with_the_slow_iterations() -> None:
    # 200 a second, but in at most a quarter of the iterations, which the typical ones do not include.
    few = {"cpu_time_ns": 30 * MILLISECOND, "wall_time_ns": 30 * MILLISECOND, "involuntary_switches": 7}
    assert judge(counters=few).status == report_pb2.VERDICT_STATUS_VALID
    # Often for each iteration, but seldom for each second, as in a long one.
    rare = {"cpu_time_ns": 30_000 * MILLISECOND, "wall_time_ns": 30_000 * MILLISECOND, "involuntary_switches": 300}
    assert judge(counters=rare).status == report_pb2.VERDICT_STATUS_VALID


def test_all_reasons_are_listed_and_missing_numbers_are_not_held_against_a_device() -> None:
    assert [reason.code for reason in judge(traced_ratio=3.0, drift=0.5).reasons] == ["TRACING_SLOW", "DRIFT"]
    result = agent_pb2.CandidateResult(traced_ns=[MILLISECOND] * 30)
    bare = judge_trace(report_pb2.Profile(iterations=30), result, emulated=False, thresholds=Thresholds())
    assert bare.status == report_pb2.VERDICT_STATUS_VALID


def test_an_emulated_device_is_not_benchmarkable() -> None:
    verdict = judge(emulated=True, traced_ratio=5.0)
    assert verdict.status == report_pb2.VERDICT_STATUS_NOT_BENCHMARKABLE
    assert [reason.code for reason in verdict.reasons] == ["EMULATED"]
