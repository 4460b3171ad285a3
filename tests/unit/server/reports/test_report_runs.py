"""The runs in a report: a verdict on each and on all; who is invalid is named and does not count."""

from __future__ import annotations

import math

import pytest

from etfarm.server.reports.latency.between_runs import Earlier
from etfarm.server.reports.runs import fill_runs
from etfarm.server.reports.verdict import required_runs
from etfarm.v1 import agent_pb2, common_pb2, report_pb2

VALID, INVALID = report_pb2.VERDICT_STATUS_VALID, report_pb2.VERDICT_STATUS_INVALID
REPEATS, HISTORY, PRIOR = (
    report_pb2.RUN_SPREAD_SOURCE_REPEATS,
    report_pb2.RUN_SPREAD_SOURCE_HISTORY,
    report_pb2.RUN_SPREAD_SOURCE_PRIOR,
)


def judge(result: agent_pb2.CandidateResult, latency: report_pb2.Latency) -> report_pb2.Verdict:
    """Run with a warm-up of 7 are invalid."""
    if result.warmup != 7:
        return report_pb2.Verdict(status=VALID)
    reason = report_pb2.VerdictReason(code="DRIFT", message=f"It drifted by {latency.drift:g}.", measured=latency.drift)
    return report_pb2.Verdict(status=INVALID, reasons=[reason])


def filled(
    medians: list[float], invalid: tuple[int, ...] = (), *, requested: int | None = None, earlier: Earlier | None = None
) -> report_pb2.Report:
    result = agent_pb2.CandidateResult(threads=2, outputs_equal=True)
    statistics = []
    for number, median in enumerate(medians, 1):
        result.runs.add(
            warmup=7 if number in invalid else 3, iterations=100, duration_ns=5, stop_reason=common_pb2.STOP_REASON_ENOUGH,
            steady=True, warmup_ns=4, load={"load_ns": number}, telemetry={"cpu_time_ns": 1, "series": [{"elapsed_ms": 1.0}]},
        )  # fmt: skip
        statistics.append(report_pb2.Run(p50_ns=median, p50_ci95_ns=[median * 0.999, median * 1.001], drift=0.2))
    if len(medians) == 1:
        result.warmup = result.runs[0].warmup
        del result.runs[:]
    report = report_pb2.Report(latency=report_pb2.Latency(p50_ns=1.0, p50_ci95_ns=[0.9, 1.1], p90_ns=9.0))
    fill_runs(
        report,
        result,
        statistics,
        judge,
        requested=len(medians) if requested is None else requested,
        earlier=earlier or Earlier(),
    )
    return report


def test_the_traced_pass_belongs_to_the_last_run() -> None:
    result = agent_pb2.CandidateResult(threads=1, traced_ns=[7, 8], runs=[{"iterations": 100}] * 3)
    seen = []

    def judge(part: agent_pb2.CandidateResult, _: report_pb2.Latency) -> report_pb2.Verdict:
        seen.append(list(part.traced_ns))
        return report_pb2.Verdict(status=VALID)

    runs = [report_pb2.Run(p50_ns=100.0)] * 3
    fill_runs(report_pb2.Report(), result, runs, judge, requested=3, earlier=Earlier())
    assert seen == [[], [], [7, 8]]


def test_several_valid_runs_give_the_median_over_them_and_its_interval() -> None:
    report = filled([100.0, 102.0, 98.0, 101.0, 99.0])
    assert report.verdict == report_pb2.Verdict(status=VALID)
    assert report.latency.p50_ns == pytest.approx(100.0, rel=1e-3) and report.latency.p90_ns == 9.0
    spread = report.run_spread
    assert (spread.source, spread.runs) == (REPEATS, 5) and spread.relative_stddev == pytest.approx(0.0158, rel=0.01)
    assert list(report.latency.p50_ci95_ns) == list(spread.p50_ci95_ns)
    assert math.log(spread.p50_ci95_ns[1] / report.latency.p50_ns) == pytest.approx(2.776 * 0.0158 / math.sqrt(5), rel=0.02)
    assert [run.p50_ns for run in report.runs] == [100.0, 102.0, 98.0, 101.0, 99.0]
    run = report.runs[1]
    assert (run.load.load_ns, run.steady, run.warmup_ns, run.iterations) == (2, True, 4, 100)
    assert run.telemetry.cpu_time_ns == 1 and not run.telemetry.series and not report.compile.warnings


def test_only_the_statistics_of_a_run_come_from_the_child() -> None:
    result = agent_pb2.CandidateResult(iterations=100, warmup=3, duration_ns=5)
    forged = report_pb2.Run(
        p50_ns=100.0, p50_ci95_ns=[99.0, 101.0], drift=0.2, iterations=7, duration_ns=7, warmup_ns=7, steady=True,
        verdict={"status": INVALID, "reasons": [{"code": "FORGED"}]}, load={"load_ns": 7}, telemetry={"cpu_time_ns": 7},
    )  # fmt: skip
    report = report_pb2.Report(latency=report_pb2.Latency(p50_ns=1.0))
    fill_runs(report, result, [forged], judge, requested=1, earlier=Earlier())
    (run,) = report.runs
    assert (run.p50_ns, list(run.p50_ci95_ns), run.drift) == (100.0, [99.0, 101.0], 0.2)
    assert (run.warmup, run.iterations, run.duration_ns) == (3, 100, 5)
    assert not run.HasField("steady") and not run.HasField("warmup_ns")
    assert run.verdict == report_pb2.Verdict(status=VALID) and not run.load.ListFields() and not run.telemetry.ListFields()


def test_a_slower_group_of_a_run_is_judged_with_that_run() -> None:
    judged = []

    def judge_slow(result: agent_pb2.CandidateResult, latency: report_pb2.Latency) -> report_pb2.Verdict:
        judged.append((latency.slow_share, latency.slow_ratio) if latency.HasField("slow_share") else None)
        return report_pb2.Verdict(status=VALID)

    result = agent_pb2.CandidateResult(runs=[{"iterations": 100}, {"iterations": 100}])
    statistics = [report_pb2.Run(p50_ns=100.0, slow_share=0.4, slow_ratio=1.5), report_pb2.Run(p50_ns=100.0)]
    report = report_pb2.Report(latency=report_pb2.Latency(p50_ns=1.0))
    fill_runs(report, result, statistics, judge_slow, requested=2, earlier=Earlier())
    assert judged == [(0.4, 1.5), None]
    assert report.runs[0].slow_share == 0.4 and not report.runs[1].HasField("slow_share")


def test_an_invalid_run_does_not_count_and_is_named() -> None:
    report = filled([100.0, 400.0, 100.0, 100.0], (2,))
    assert report.verdict == report_pb2.Verdict(status=VALID) and report.runs[1].verdict.status == INVALID
    assert report.latency.p50_ns == pytest.approx(100.0) and report.run_spread.runs == 3
    (warning,) = report.compile.warnings
    assert warning.code == "RUNS_LEFT_OUT"
    assert warning.message == "Run 2 of 4 is INVALID and does not count for the median. It drifted by 0.2."


@pytest.mark.parametrize(("runs", "required"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 3), (6, 4), (10, 6), (50, 26)])
def test_three_or_all_and_more_than_half_must_be_valid(runs: int, required: int) -> None:
    assert required_runs(runs) == required
    for valid in (required, required - 1):
        report = filled([100.0] * runs, tuple(range(valid + 1, runs + 1)))
        assert report.verdict.status == (VALID if valid == required else INVALID)


def test_a_verdict_on_several_runs_has_each_reason_once_with_its_runs() -> None:
    report = filled([100.0] * 5, (1, 3, 4))
    (reason,) = report.verdict.reasons
    assert (reason.code, reason.measured) == ("DRIFT", 0.2)
    assert reason.message == "Runs 1, 3 and 4 of 5: It drifted by 0.2." and not report.compile.warnings
    assert report.run_spread.source == PRIOR, "two valid runs show no spread"


def test_two_runs_take_their_spread_from_the_history() -> None:
    report = filled([100.0, 101.0], earlier=Earlier(history=(90.0, 100.0, 110.0)))
    assert (report.run_spread.source, report.run_spread.runs) == (HISTORY, 3)
    assert report.run_spread.relative_stddev == pytest.approx(0.1, rel=0.01)
    assert report.run_spread.p50_ci95_ns[1] / report.latency.p50_ns > 1.25
    within = report.latency.p50_ci95_ns
    assert within[1] - within[0] == pytest.approx(0.2 * 0.7, rel=0.02), "the samples' interval alone"


def test_reports_that_differ_more_than_their_runs_explain_have_the_spread_of_the_history() -> None:
    medians = [100.0, 101.0, 99.0, 100.5, 99.5]
    report = filled(medians, earlier=Earlier(history=(90.0, 100.0, 110.0)))
    assert (report.run_spread.source, report.run_spread.runs) == (HISTORY, 3)
    assert report.run_spread.relative_stddev == pytest.approx(0.1, rel=0.01)
    upper = report.run_spread.p50_ci95_ns[1] / report.latency.p50_ns
    assert math.log(upper) == pytest.approx(4.303 * 0.1, rel=0.05), "not divided by the number of runs"
    assert list(report.latency.p50_ci95_ns) == list(report.run_spread.p50_ci95_ns)


@pytest.mark.parametrize("history", [(99.9, 100.0, 100.1), (90.0, 110.0), ()])
def test_reports_that_differ_less_than_their_runs_explain_or_too_few_leave_the_spread_of_the_runs(
    history: tuple[float, ...],
) -> None:
    medians = [100.0, 102.0, 98.0, 101.0, 99.0]
    report = filled(medians, earlier=Earlier(history=history))
    assert report == filled(medians) and report.run_spread.source == REPEATS


def test_a_history_that_agrees_by_chance_claims_no_less_than_the_samples() -> None:
    report = filled([100.0, 100.0], earlier=Earlier(history=(100.0, 100.0, 100.0)))
    assert report.run_spread.source == HISTORY
    assert report.run_spread.relative_stddev == pytest.approx(0.001 / 1.96 / math.sqrt(2), rel=0.01)


def test_a_single_run_keeps_its_interval_and_is_the_only_run() -> None:
    report = filled([100.0], requested=0, earlier=Earlier(similar=((10.0, 11.0, 12.0), (20.0, 22.0, 24.0))))
    assert len(report.runs) == 1 and report.latency.p50_ns == 1.0 and list(report.latency.p50_ci95_ns) == [0.9, 1.1]
    assert (report.run_spread.source, report.run_spread.runs) == (PRIOR, 6)
    assert report.run_spread.relative_stddev == pytest.approx(0.09, rel=0.05)


@pytest.mark.parametrize(("low_ns", "high_ns"), [(99.0, 140.0), (60.0, 101.0)])
def test_the_interval_of_a_single_run_that_covers_other_runs_contains_its_own(low_ns: float, high_ns: float) -> None:
    report = report_pb2.Report(latency=report_pb2.Latency(p50_ns=100.0, p50_ci95_ns=[low_ns, high_ns]))
    run = report_pb2.Run(p50_ns=100.0, p50_ci95_ns=[low_ns, high_ns])
    fill_runs(report, agent_pb2.CandidateResult(iterations=9), [run], judge, requested=1, earlier=Earlier())
    low, high = report.run_spread.p50_ci95_ns
    assert low <= low_ns < high_ns <= high, "an interval within a run need not have its median in the middle"
    assert low < 91 and high > 110, "nor is the variation between runs lost at the end where it is wider"


def test_an_agent_that_measured_once_is_named() -> None:
    report = filled([100.0], requested=5)
    (warning,) = report.compile.warnings
    assert warning.code == "RUNS_NOT_REPEATED"
    assert warning.message == "5 runs were requested, and the device's agent made 1. Update the agent."


def test_an_interleaved_attempt_has_no_runs() -> None:
    report = report_pb2.Report(latency=report_pb2.Latency(p50_ns=1.0))
    fill_runs(report, agent_pb2.CandidateResult(), (), judge, requested=0, earlier=Earlier())
    assert report.verdict.status == VALID and not report.runs and not report.HasField("run_spread")


def test_runs_that_are_all_invalid_show_no_spread_and_no_interval_between_runs() -> None:
    report = filled([100.0, 150.0, 200.0], (1, 2, 3))
    assert report.verdict.status == INVALID
    assert (report.run_spread.source, report.run_spread.runs) == (PRIOR, 0), "three valid runs would show it"
    assert report.run_spread.relative_stddev == pytest.approx(0.35, abs=0.01), "what is assumed is not below what they show"
    low, high = report.latency.p50_ci95_ns
    assert high / low - 1 == pytest.approx(0.0012, rel=0.1), "the samples' interval alone"


def test_runs_that_are_all_invalid_and_agree_leave_the_assumption() -> None:
    report = filled([100.0, 100.0, 100.0], (1, 2, 3))
    assert (report.run_spread.source, report.run_spread.relative_stddev) == (PRIOR, 0.05)


def test_an_emulated_device_shows_no_spread() -> None:
    result = agent_pb2.CandidateResult(runs=[{"iterations": 100}] * 3)
    statistics = [report_pb2.Run(p50_ns=median, p50_ci95_ns=[median - 1, median + 1]) for median in (100.0, 101.0, 99.0)]
    unusable = report_pb2.Verdict(status=report_pb2.VERDICT_STATUS_NOT_BENCHMARKABLE)
    report = report_pb2.Report(latency=report_pb2.Latency(p50_ns=1.0))
    fill_runs(report, result, statistics, lambda *_: unusable, requested=3, earlier=Earlier())
    assert report.run_spread.source == PRIOR
