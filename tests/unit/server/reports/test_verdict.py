"""Verdicts: each check alone, with its numbers, and none where the device measured nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest

from etfarm.server.reports.disturbances import tell_apart
from etfarm.server.reports.verdict import Thresholds, judge
from etfarm.v1 import agent_pb2, common_pb2, report_pb2

THRESHOLDS = Thresholds()
SECOND = 1_000_000_000


def _judge(
    *, samples: int = 200, threads: int = 1, emulated: bool = False, asked: int = 0, outputs_equal: bool | None = True,
    stop_reason: common_pb2.StopReason.ValueType = common_pb2.STOP_REASON_ENOUGH,
    cores: int = 0, affinity: str = "", **telemetry: int,
) -> report_pb2.Verdict:  # fmt: skip
    counters: dict[str, Any] = {
        "cpu_time_ns": SECOND, "wall_time_ns": SECOND, "involuntary_switches": 3, "psi_cpu_some_us": 0,
        "affinity": affinity or None,
    }  # fmt: skip
    result = agent_pb2.CandidateResult(
        threads=threads, outputs_equal=outputs_equal, iterations=samples, duration_ns=SECOND, stop_reason=stop_reason,
        telemetry=report_pb2.RunTelemetry(**counters | telemetry),
    )  # fmt: skip
    return judge(result, report_pb2.Latency(), emulated=emulated, thresholds=THRESHOLDS, asked_samples=asked, cores=cores)


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


@pytest.mark.parametrize(("share", "codes"), [(0.25, []), (0.26, ["BIMODAL"]), (0.8, ["BIMODAL"])])
def test_a_run_with_two_paces_has_no_single_median(share: float, codes: list[str]) -> None:
    result = agent_pb2.CandidateResult(threads=1, iterations=200, duration_ns=SECOND, outputs_equal=True)
    latency = report_pb2.Latency(p50_ns=5e6, slow_share=share, slow_ratio=1.5)
    verdict = judge(result, latency, emulated=False, thresholds=THRESHOLDS)
    assert [reason.code for reason in verdict.reasons] == codes
    for reason in verdict.reasons:
        assert reason.message.startswith(f"{share:.0%} of the samples took 1.5 times as long as the others")
        assert (reason.measured, reason.threshold) == (pytest.approx(share), 0.25)
    lenient = judge(result, latency, emulated=False, thresholds=Thresholds(max_slow_share=0.9))
    assert lenient.status == report_pb2.VERDICT_STATUS_VALID


@pytest.mark.parametrize(
    ("traced", "codes"),
    [
        ([700] * 30, ["SLOWER_THAN_TRACED"]),
        ([700] * 23 + [5_000] * 7, ["SLOWER_THAN_TRACED"]),
        ([700] * 20 + [1_050] * 10, []),  # a third was as slow as the timed pass
        ([910] * 30, []),
        ([3_000] * 30, []),
        ([700] * 9, []),
        ([], []),
    ],
)
def test_a_timed_pass_that_is_slower_than_the_traced_one_was_slowed_down(traced: list[int], codes: list[str]) -> None:
    result = agent_pb2.CandidateResult(iterations=200, threads=1, traced_ns=traced)
    latency = report_pb2.Latency(p50_ns=1_000, p50_ci95_ns=[990, 1_010])
    verdict = judge(result, latency, emulated=False, thresholds=THRESHOLDS)
    assert [reason.code for reason in verdict.reasons] == codes
    result.blocks.add()
    assert not judge(result, latency, emulated=False, thresholds=THRESHOLDS).reasons, "programs in turns share caches"


def test_a_run_with_two_paces_says_what_the_device_counted_meanwhile() -> None:
    telemetry = report_pb2.RunTelemetry(involuntary_switches=150, psi_cpu_some_us=120_000)
    result = agent_pb2.CandidateResult(threads=1, iterations=1200, duration_ns=SECOND, outputs_equal=True, telemetry=telemetry)
    latency = report_pb2.Latency(p50_ns=1e6, slow_share=0.4, slow_ratio=1.5)
    (reason,) = judge(result, latency, emulated=False, thresholds=THRESHOLDS).reasons
    counted = "150 involuntary switches in 1,200 samples and some task waiting for a cpu 12% of the time"
    assert reason.message.endswith(f"25% is allowed. Meanwhile the device counted {counted}.")


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


def test_all_reasons_are_reported() -> None:
    verdict = _judge(samples=3, cpu_time_ns=1, involuntary_switches=10_000, psi_cpu_some_us=999_999, outputs_equal=False)
    assert len(verdict.reasons) == 5


def test_the_sentence_says_why_there_are_too_few_samples() -> None:
    assert "before the time limit" in _judge(samples=3, stop_reason=common_pb2.STOP_REASON_MAX_TIME).reasons[0].message


@pytest.mark.parametrize(
    ("run", "codes"),
    [({"samples": 1, "cpu_time_ns": 1}, ["EMULATED"]), ({"outputs_equal": False}, ["EMULATED", "OUTPUTS_DIFFER"])],
)
def test_an_emulated_device_is_not_benchmarkable_however_it_measured(run: dict[str, Any], codes: list[str]) -> None:
    verdict = _judge(emulated=True, **run)
    assert verdict.status == report_pb2.VERDICT_STATUS_NOT_BENCHMARKABLE
    assert [reason.code for reason in verdict.reasons] == codes


def test_thresholds_are_configuration_and_what_the_device_does_not_measure_is_not_held_against_it() -> None:
    for samples, thresholds in ((100, THRESHOLDS), (10, Thresholds(min_samples=10))):
        result = agent_pb2.CandidateResult(threads=1, iterations=samples)
        verdict = judge(result, report_pb2.Latency(), emulated=False, thresholds=thresholds)
        assert verdict.status == report_pb2.VERDICT_STATUS_VALID


def _measured(**telemetry: Any) -> agent_pb2.CandidateResult:
    counted = report_pb2.RunTelemetry(cpu_time_ns=SECOND, wall_time_ns=SECOND, **telemetry)
    return agent_pb2.CandidateResult(threads=1, iterations=200, duration_ns=SECOND, telemetry=counted)


def _codes(
    result: agent_pb2.CandidateResult, latency: dict[str, Any] | None = None, **more: Any
) -> dict[str, report_pb2.VerdictReason]:
    reported = report_pb2.Latency(p50_ns=5e6, **latency or {})
    verdict = judge(result, reported, emulated=False, thresholds=THRESHOLDS, **more)
    assert (verdict.status == report_pb2.VERDICT_STATUS_INVALID) is bool(verdict.reasons)
    return {reason.code: reason for reason in verdict.reasons}


def _reading(at_ms: float, **fields: Any) -> report_pb2.SystemReading:
    return report_pb2.SystemReading(elapsed_ms=at_ms, **fields)


def _series(*clocks: list[int]) -> list[report_pb2.TelemetryPoint]:
    return [report_pb2.TelemetryPoint(elapsed_ms=index, frequency_hz=each) for index, each in enumerate(clocks)]


@pytest.mark.parametrize(("drift", "steady", "code"), [
    (0.11, None, "DRIFT"), (-0.11, True, "DRIFT"), (0.1, True, None), (0.06, False, "NOT_STEADY"), (0.05, False, None),
    (0.2, False, "NOT_STEADY"),
])  # fmt: skip
def test_a_run_that_gets_slower_or_faster_has_no_one_median(drift: float, steady: bool | None, code: str | None) -> None:
    result = _measured()
    if steady is not None:
        result.steady = steady
    actual = _codes(result, {"drift": drift})
    assert list(actual) == ([code] if code else [])
    if code:
        assert ("slower" if drift > 0 else "faster") in actual[code].message
        assert actual[code].measured == pytest.approx(drift)


def test_a_run_that_was_made_longer_in_vain_says_so() -> None:
    result = _measured()
    result.stop_reason, result.duration_ns = common_pb2.STOP_REASON_DRIFTING, 8 * SECOND
    assert "than the first, although it was extended to 8.0 s;" in _codes(result, {"drift": 0.2})["DRIFT"].message


def test_samples_that_resemble_each_other_may_be_too_few() -> None:
    result = _codes(_measured(), {"p50_ci95_ns": [4.7e6, 5.3e6], "effective_samples": 4.0})
    assert "200 samples are worth 4 independent ones" in result["TOO_FEW_SAMPLES"].message
    assert result["TOO_FEW_SAMPLES"].measured == pytest.approx(0.12)
    assert not _codes(_measured(), {"p50_ci95_ns": [4.8e6, 5.2e6], "effective_samples": 4.0})
    result = _codes(_measured(), {"effective_samples": 4.0})
    assert result["TOO_FEW_SAMPLES"].message == "The median has no interval: its 200 samples are worth 4 independent ones."
    assert (result["TOO_FEW_SAMPLES"].measured, result["TOO_FEW_SAMPLES"].threshold) == (4, 6)


@pytest.mark.parametrize(("busy_ns", "cores", "received"), [
    (SECOND * 12 // 10, 2, False), (SECOND * 14 // 10, 2, True), (SECOND * 2, 64, False), (SECOND * 5, 64, True),
])  # fmt: skip
def test_work_of_others_is_interference_though_the_runner_had_its_cpu(busy_ns: int, cores: int, received: bool) -> None:
    # A process on the second cpu: no process waits for a cpu, and no other check sees it.
    result = _measured(before=_reading(0, cpu_busy_ns=7 * SECOND), after=_reading(1000, cpu_busy_ns=7 * SECOND + busy_ns))
    actual = _codes(result, cores=cores)
    assert list(actual) == (["BACKGROUND_LOAD"] if received else [])
    if received:
        assert actual["BACKGROUND_LOAD"].measured == pytest.approx(busy_ns / SECOND - 1)


def test_programs_that_took_turns_are_no_interference_for_each_other() -> None:
    # This one computed for a tenth of the time, with one cpu; the others had two for the rest.
    readings = {"before": _reading(0, cpu_busy_ns=0), "after": _reading(10_000, cpu_busy_ns=19 * SECOND)}
    assert list(_codes(_measured(**readings), cores=2)) == ["BACKGROUND_LOAD"]
    assert not _codes(_measured(**readings, runners_cpu_ns=19 * SECOND), cores=2)
    assert list(_codes(_measured(**readings, runners_cpu_ns=9 * SECOND), cores=2)) == ["BACKGROUND_LOAD"]


def test_a_device_that_did_not_become_idle_is_reported_only_if_the_load_stayed() -> None:
    wait = report_pb2.GateWait(gate=report_pb2.GATE_IDLE, waited_ms=10_000, passed=False, measured=0.5, threshold=0.15)
    stayed = _measured(waits=[wait], before=_reading(0, cpu_busy_ns=0), after=_reading(1000, cpu_busy_ns=2 * SECOND))
    message = _codes(stayed)["BACKGROUND_LOAD"].message
    assert "1.0 cpus" in message and "after 10 s of waiting" in message
    assert not _codes(_measured(waits=[wait], before=_reading(0, cpu_busy_ns=0), after=_reading(1000, cpu_busy_ns=SECOND)))
    unknown = _codes(_measured(waits=[wait]))["BACKGROUND_LOAD"]
    assert (unknown.measured, unknown.threshold) == pytest.approx((0.5, 0.15))


def test_a_pass_too_short_for_the_kernels_clock_ticks_is_not_judged_by_them() -> None:
    assert not _codes(_measured(before=_reading(0, cpu_busy_ns=0), after=_reading(100, cpu_busy_ns=SECOND)))


def test_time_that_the_hypervisor_took_is_interference() -> None:
    result = _measured(before=_reading(0, cpu_stolen_ns=0), after=_reading(1000, cpu_stolen_ns=SECOND * 12 // 100))
    assert _codes(result, cores=2)["CPU_STOLEN"].measured == pytest.approx(0.06)
    assert not _codes(result, cores=4)


@pytest.mark.parametrize(("before", "after"), [
    ({"throttle_count": 3}, {"throttle_count": 5}),
    ({"thermal_status": 0}, {"thermal_status": 2}),
    ({}, {"cooling": [report_pb2.CoolingDevice(name="cpufreq-cpu4", state=2)]}),
    ({"cooling": [report_pb2.CoolingDevice(name="cpufreq-cpu4", state=1)]}, {}),
    ({"cpus": [report_pb2.CpuReading(cpu=4, limit_hz=2 * SECOND)]}, {"cpus": [report_pb2.CpuReading(cpu=4, limit_hz=SECOND)]}),
])  # fmt: skip
def test_a_device_that_was_slowed_down_against_heat_says_so(before: dict[str, Any], after: dict[str, Any]) -> None:
    result = _codes(_measured(before=_reading(0, **before), after=_reading(1000, **after)))
    assert list(result) == ["THERMAL_THROTTLED"]
    assert re.search(r"\d", result["THERMAL_THROTTLED"].message)


def test_what_throttled_earlier_and_what_only_cools_is_not_held_against_a_run() -> None:
    calm = {"throttle_count": 7, "thermal_status": 0, "cooling": [report_pb2.CoolingDevice(name="cpufreq-cpu0", state=0)]}
    limits = [report_pb2.CpuReading(cpu=0, limit_hz=2_400_000_000)]
    assert not _codes(_measured(before=_reading(0, cpus=limits, **calm), after=_reading(1000, cpus=limits, **calm)))


def test_a_heat_that_was_there_at_the_start_is_part_of_the_sentence() -> None:
    wait = report_pb2.GateWait(gate=report_pb2.GATE_COOL, waited_ms=60_000, passed=False, measured=71, threshold=60)
    result = _measured(waits=[wait], before=_reading(0, throttle_count=0), after=_reading(1000, throttle_count=1))
    assert "It began at 71 °C instead of below 60 °C, after 60 s of waiting." in _codes(result)["THERMAL_THROTTLED"].message
    assert not _codes(_measured(waits=[wait])), "warm alone is no reason: the clock held"


def test_a_varying_clock_is_reported_with_its_governor() -> None:
    series = _series(*([[1_500_000_000]] * 5 + [[2_400_000_000]] * 5))
    setting = report_pb2.DeviceSetting(
        name="governor", cpus="0-3", found="ondemand", wanted="performance", why="the agent may not write it"
    )  # fmt: skip
    reason = _codes(_measured(series=series, settings=[setting]))["FREQUENCY_MOVED"]
    assert reason.measured == pytest.approx(0.375)
    assert "1.50 and 2.40 GHz" in reason.message and "Its governor is ondemand, and the agent may not write it." in reason.message
    assert not _codes(_measured(series=_series(*[[hz] for hz in range(2_300_000_000, 2_400_000_000, 10_000_000)])))
    assert not _codes(_measured(series=series[4:7])), "three points are no movement"


def test_the_clock_that_counts_is_the_one_of_the_cores_that_were_used() -> None:
    big, little = 2_400_000_000, [600_000_000, 1_800_000_000]
    series = _series(*[[big, little[index % 2]] for index in range(10)])
    clusters = [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert not _codes(_measured(series=series, affinity="0-7"), clusters=clusters)
    assert not _codes(_measured(series=series, affinity="4-7"), clusters=clusters)
    assert "FREQUENCY_MOVED" in _codes(_measured(series=series, affinity="0-1,3"), clusters=clusters)


def test_a_nondeterministic_program_is_named_with_its_output_and_a_stateful_one_is_valid() -> None:
    result = _measured()
    result.repeatability.outcome = report_pb2.REPEATABILITY_OUTCOME_NONDETERMINISTIC
    result.repeatability.differences.add(
        output="aux", first=report_pb2.EXECUTION_FIRST, second=report_pb2.EXECUTION_REPEATED, differing=1, elements=1
    )
    result.repeatability.differences.add(
        output="logits", first=report_pb2.EXECUTION_FIRST, second=report_pb2.EXECUTION_REPEATED,
        differing=3, elements=10, max_abs_difference=0.25, at=[0, 7]
    )  # fmt: skip
    result.outputs_equal = False
    reason = _codes(result)["OUTPUTS_DIFFER"]
    assert "output 'logits' in 3 of 10 elements, by up to 0.25 at [0, 7], and 1 more output." in reason.message
    assert "nondeterministic" in reason.message and (reason.measured, reason.threshold) == (0.25, 0)
    result.repeatability.outcome, result.outputs_equal = report_pb2.REPEATABILITY_OUTCOME_KEEPS_STATE, True
    assert not _codes(result)
    result.repeatability.outcome, result.outputs_equal = report_pb2.REPEATABILITY_OUTCOME_HIDDEN_STATE, False
    message = _codes(result)["OUTPUTS_DIFFER"].message
    assert "output 'logits' in 3 of 10 elements" in message and "The program writes to no state" in message
    result.repeatability.outcome = report_pb2.REPEATABILITY_OUTCOME_ROUNDING
    assert not _codes(result), "rounding is not a fault of the measurement"
    result.repeatability.outcome = report_pb2.REPEATABILITY_OUTCOME_DIFFERENT
    result.ClearField("outputs_equal")
    assert "may keep state or be nondeterministic" in _codes(result)["OUTPUTS_DIFFER"].message


def test_more_threads_than_cpus_measure_the_scheduler() -> None:
    crowded = _judge(threads=3, cores=2, cpu_time_ns=2 * SECOND)
    assert [(reason.code, reason.measured, reason.threshold) for reason in crowded.reasons] == [("MORE_THREADS_THAN_CPUS", 3, 2)]
    assert _judge(threads=2, cores=2).status == report_pb2.VERDICT_STATUS_VALID


@pytest.mark.parametrize(("affinity", "cores", "cpus"), [("0", 2, 1), ("0,3", 8, 2), ("0-7", 2, 2), ("1", 0, 1)])
def test_the_cpus_of_threads_are_those_that_the_runner_might_use(affinity: str, cores: int, cpus: int) -> None:
    """That they take them from each other is then no work of others'."""
    crowded = _judge(threads=3, cores=cores, affinity=affinity, involuntary_switches=19_000, psi_cpu_some_us=SECOND // 1000)
    (reason,) = crowded.reasons
    assert (reason.code, reason.measured, reason.threshold) == ("MORE_THREADS_THAN_CPUS", 3, cpus)
    assert reason.message.startswith(f"3 threads shared {cpus} cpu")
    assert _judge(threads=cpus, cores=cores, affinity=affinity).status == report_pb2.VERDICT_STATUS_VALID


def test_threads_that_wake_each_other_without_waiting_for_a_cpu_are_no_interference() -> None:
    busy = {"threads": 2, "involuntary_switches": 1000, "cpu_time_ns": 2 * SECOND}
    assert _judge(**busy, psi_cpu_some_us=60_000).status == report_pb2.VERDICT_STATUS_VALID
    assert _judge(**busy, psi_cpu_some_us=110_000).status == report_pb2.VERDICT_STATUS_INVALID


@pytest.mark.parametrize(
    ("value", "limit", "kind", "texts"),
    [
        (0.34, 0.3, ".1f", ("0.34", "0.30")),
        (1.2, 0.3, ".1f", ("1.2", "0.3")),
        (0.254, 0.25, ".0%", ("25.4%", "25.0%")),
        (0.896, 0.9, ".0%", ("89.6%", "90.0%")),
        (200.2, 200.0, ".0f", ("200.2", "200.0")),
        (0.25000001, 0.25, ".0%", ("25.000%", "25.000%")),
    ],
)
def test_a_value_reads_as_other_than_the_limit_that_it_missed(
    value: float, limit: float, kind: str, texts: tuple[str, str]
) -> None:
    assert tell_apart(value, limit, kind) == texts
