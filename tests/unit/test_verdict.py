"""Verdicts: each check alone, with its numbers, and none where the device measured nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest

from etfarm.server.reports.verdict import Thresholds, judge
from etfarm.v1 import agent_pb2, report_pb2

THRESHOLDS = Thresholds()
SECOND = 1_000_000_000


def _judge(
    *, samples: int = 200, threads: int = 1, emulated: bool = False, asked: int = 0, outputs_equal: bool | None = True,
    stop_reason: str = "ENOUGH", cores: int = 0, **telemetry: int,
) -> report_pb2.Verdict:  # fmt: skip
    counters: dict[str, Any] = {
        "cpu_time_ns": SECOND, "wall_time_ns": SECOND, "involuntary_switches": 3, "psi_cpu_some_us": 0,
    }  # fmt: skip
    result = agent_pb2.CandidateResult(
        threads=threads, outputs_equal=outputs_equal, duration_ns=SECOND, stop_reason=stop_reason,
        telemetry=report_pb2.RunTelemetry(**counters | telemetry),
    )  # fmt: skip
    latency = report_pb2.Latency(samples_ns=[5_000_000] * samples)
    return judge(result, latency, emulated=emulated, thresholds=THRESHOLDS, asked_samples=asked, cores=cores)


def test_a_quiet_run_is_valid() -> None:
    assert _judge() == report_pb2.Verdict(status=report_pb2.VERDICT_STATUS_VALID)


@pytest.mark.parametrize(
    ("run", "code", "measured", "threshold"),
    [
        ({"samples": 99}, "TOO_FEW_SAMPLES", 99, 100),
        ({"samples": 200, "asked": 1000}, "TOO_FEW_SAMPLES", 200, 1000),
        ({"samples": 50, "asked": 20}, "TOO_FEW_SAMPLES", 50, 100),
        ({"cpu_time_ns": SECOND * 8 // 10}, "CPU_STARVED", 0.8, 0.9),
        ({"cpu_time_ns": SECOND * 8 // 10, "threads": 4}, "CPU_STARVED", 0.8, 0.9),
        ({"involuntary_switches": 201}, "INVOLUNTARY_SWITCHES", 201, 200),
        ({"involuntary_switches": 804, "threads": 4, "psi_cpu_some_us": 100_000}, "INVOLUNTARY_SWITCHES", 201, 200),
        ({"psi_cpu_some_us": 300_000}, "CPU_PRESSURE", 0.3, 0.25),
    ],
)
def test_each_check_alone_makes_a_run_invalid(run: dict[str, Any], code: str, measured: float, threshold: float) -> None:
    verdict = _judge(**run)
    assert verdict.status == report_pb2.VERDICT_STATUS_INVALID
    (reason,) = verdict.reasons
    assert reason.code == code
    assert reason.measured == pytest.approx(measured)
    assert reason.threshold == pytest.approx(threshold)
    assert re.fullmatch(r"[A-Z].*\d.*\.", reason.message)


@pytest.mark.parametrize(
    "run",
    [
        {"samples": 100, "asked": 100},
        {"cpu_time_ns": SECOND * 9 // 10},
        {"cpu_time_ns": SECOND * 13 // 10, "threads": 4},
        {"involuntary_switches": 50},
        {"involuntary_switches": 200, "threads": 4},
        {"psi_cpu_some_us": 250_000},
    ],
)
def test_a_threshold_itself_is_allowed(run: dict[str, Any]) -> None:
    assert _judge(**run).status == report_pb2.VERDICT_STATUS_VALID


def test_other_outputs_in_the_traced_pass_are_invalid() -> None:
    verdict = _judge(outputs_equal=False)
    assert verdict.status == report_pb2.VERDICT_STATUS_INVALID
    assert [reason.code for reason in verdict.reasons] == ["OUTPUTS_DIFFER"]
    assert not verdict.reasons[0].HasField("measured")


def test_all_reasons_are_told() -> None:
    verdict = _judge(samples=3, cpu_time_ns=1, involuntary_switches=10_000, psi_cpu_some_us=999_999, outputs_equal=False)
    assert len(verdict.reasons) == 5


def test_the_sentence_says_why_there_are_too_few_samples() -> None:
    assert "before the time limit" in _judge(samples=3, stop_reason="MAX_TIME").reasons[0].message


def test_an_emulated_device_is_not_benchmarkable_however_it_measured() -> None:
    verdict = _judge(emulated=True, samples=1, cpu_time_ns=1)
    assert verdict.status == report_pb2.VERDICT_STATUS_NOT_BENCHMARKABLE
    assert [reason.code for reason in verdict.reasons] == ["EMULATED"]


def test_wrong_outputs_of_an_emulated_device_are_told_too() -> None:
    verdict = _judge(emulated=True, outputs_equal=False)
    assert verdict.status == report_pb2.VERDICT_STATUS_NOT_BENCHMARKABLE
    assert [reason.code for reason in verdict.reasons] == ["EMULATED", "OUTPUTS_DIFFER"]


def test_what_the_device_does_not_measure_is_not_held_against_it() -> None:
    result = agent_pb2.CandidateResult(threads=1)
    latency = report_pb2.Latency(samples_ns=[1] * 100)
    assert judge(result, latency, emulated=False, thresholds=THRESHOLDS).status == report_pb2.VERDICT_STATUS_VALID


def test_thresholds_are_configuration() -> None:
    result = agent_pb2.CandidateResult(threads=1)
    latency = report_pb2.Latency(samples_ns=[1] * 10)
    assert judge(result, latency, emulated=False, thresholds=Thresholds(min_samples=10)).status == report_pb2.VERDICT_STATUS_VALID


def test_more_threads_than_cpus_measure_the_scheduler() -> None:
    crowded = _judge(threads=3, cores=2, cpu_time_ns=2 * SECOND)
    assert [(reason.code, reason.measured, reason.threshold) for reason in crowded.reasons] == [("MORE_THREADS_THAN_CPUS", 3, 2)]
    assert _judge(threads=2, cores=2).status == report_pb2.VERDICT_STATUS_VALID


def test_threads_that_wake_each_other_while_nobody_waits_for_a_cpu_are_no_interference() -> None:
    busy = {"threads": 2, "involuntary_switches": 1000, "cpu_time_ns": 2 * SECOND}
    assert _judge(**busy, psi_cpu_some_us=60_000).status == report_pb2.VERDICT_STATUS_VALID
    assert _judge(**busy, psi_cpu_some_us=110_000).status == report_pb2.VERDICT_STATUS_INVALID
