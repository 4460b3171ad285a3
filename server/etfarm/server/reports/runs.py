"""The runs of a measurement in its report: the verdict on each and on all, the median over them, and their spread. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from etfarm.server.reports.latency import between_runs
from etfarm.server.reports.latency.between_runs import Earlier, Median, Spread
from etfarm.server.reports.verdict import judge_runs
from etfarm.v1 import agent_pb2, report_pb2
from etfarm.wire.comparison.uncertainty import MIN_RUNS
from etfarm.wire.messages import copy_fields

Judge = Callable[[agent_pb2.CandidateResult, report_pb2.Latency], report_pb2.Verdict]
"""Function that returns the verdict on one run from its result and its latency."""

LEFT_OUT: Final = "RUNS_LEFT_OUT"
NOT_REPEATED: Final = "RUNS_NOT_REPEATED"

_VALID: Final = report_pb2.VERDICT_STATUS_VALID


def fill_runs(
    report: report_pb2.Report,
    result: agent_pb2.CandidateResult,
    statistics: Sequence[report_pb2.Run],
    judge: Judge,
    *,
    requested: int,
    earlier: Earlier,
) -> None:
    """Fill a report's runs, its verdict and its spread; with several runs its median and interval, too.

    Args:
        report: has the latency of all samples.
        result: the result of the attempt.
        statistics: each run's median, interval and drift; empty for an interleaved attempt.
        requested: number of runs that the job requested.
        earlier: medians of earlier reports.
    """
    if not statistics:
        report.verdict.CopyFrom(judge(result, report.latency))
        return
    # `require_runs` rejects another number of statistics.
    for part, known in zip(_parts(result), statistics, strict=True):
        run = report.runs.add(
            warmup=part.warmup, iterations=part.iterations, duration_ns=part.duration_ns, stop_reason=part.stop_reason,
            load=part.load, telemetry=part.telemetry,
        )  # fmt: skip
        run.telemetry.ClearField("series")
        # Copy only the statistics: the child that computed them loaded untrusted files.
        copy_fields(known, run, ("p50_ns", "drift", "slow_share", "slow_ratio", "p50_ci95_ns"))
        copy_fields(part, run, ("steady", "warmup_ns"))
        latency = report_pb2.Latency(p50_ns=run.p50_ns, p50_ci95_ns=run.p50_ci95_ns)
        copy_fields(run, latency, ("drift", "slow_share", "slow_ratio"))
        run.verdict.CopyFrom(judge(part, latency))
    if len(report.runs) == 1:
        report.verdict.CopyFrom(judge(result, report.latency))
    else:
        report.verdict.CopyFrom(judge_runs(result, [run.verdict for run in report.runs]))
    if requested > len(report.runs):
        message = f"{requested} runs were requested, and the device's agent made {len(report.runs)}. Update the agent."
        report.compile.warnings.add(code=NOT_REPEATED, message=message)
    _fill_medians(report, earlier)


def valid_runs(report: report_pb2.Report) -> list[report_pb2.Run]:
    """Return the runs of a report whose own verdict is VALID."""
    return [run for run in report.runs if run.verdict.status == _VALID]


def _parts(result: agent_pb2.CandidateResult) -> Iterator[agent_pb2.CandidateResult]:
    """Yield each run as a result of its own, without outputs."""
    runs: Sequence[agent_pb2.CandidateResult | agent_pb2.MeasuredRun] = result.runs or [result]
    for number, run in enumerate(runs, 1):
        part = agent_pb2.CandidateResult(
            threads=result.threads, runner=result.runner, warmup=run.warmup, iterations=run.iterations,
            duration_ns=run.duration_ns, stop_reason=run.stop_reason, load=run.load, telemetry=run.telemetry,
        )  # fmt: skip
        copy_fields(run, part, ("steady", "warmup_ns"))
        if number == len(runs):  # only its process traced
            part.traced_ns.extend(result.traced_ns)
        yield part


def _fill_medians(report: report_pb2.Report, earlier: Earlier) -> None:
    """Fill the spread; with several runs the median over the valid ones, and its interval. Without a valid run all count."""
    valid = valid_runs(report)
    _warn_left_out(report, len(valid))
    medians = [_median(run) for run in valid or report.runs]
    p50_ns = between_runs.middle(medians)
    if p50_ns <= 0:
        return
    spread, averaged, source = _spread(medians, p50_ns, earlier, is_valid=bool(valid))
    within = between_runs.within(p50_ns, medians)
    covered = between_runs.interval(p50_ns, spread, averaged)
    if within is not None:  # that of a single run can reach further at one end
        covered = min(covered[0], within[0]), max(covered[1], within[1])
    report.run_spread.source, report.run_spread.runs = source, spread.runs
    report.run_spread.relative_stddev = spread.stddev
    report.run_spread.p50_ci95_ns.extend(covered)
    if len(report.runs) > 1:
        report.latency.p50_ns = p50_ns
        is_known = len(valid) >= MIN_RUNS
        report.latency.p50_ci95_ns[:] = (covered if is_known else within) or ()


def _spread(
    medians: Sequence[Median], p50_ns: float, earlier: Earlier, *, is_valid: bool
) -> tuple[Spread, int, report_pb2.RunSpreadSource.ValueType]:
    """Return the spread, the number of runs over which it averages, and its source.

    Runs of one attempt share the device's temperature, neighbours and boot, so that their median may vary more from attempt to
    attempt than they show.

    Args:
        is_valid: whether the medians are of valid runs. Those of invalid ones are no observation of the program, but the spread
            that is assumed instead is at least theirs.
    """
    error, count = between_runs.mean_error(medians), len(medians)
    repeats = between_runs.spread_of([median.p50_ns for median in medians], error)
    if not is_valid:
        error, repeats = repeats.stddev if repeats is not None else error, None
    # Earlier medians are over equally many runs: their spread is that of the report's own median.
    history = between_runs.spread_of(earlier.history, error / math.sqrt(count))
    if history is not None and (repeats is None or history.stddev > repeats.stddev / math.sqrt(count)):
        return history, 1, report_pb2.RUN_SPREAD_SOURCE_HISTORY
    if repeats is not None:
        return repeats, count, report_pb2.RUN_SPREAD_SOURCE_REPEATS
    return between_runs.pooled(earlier.similar, p50_ns, error), count, report_pb2.RUN_SPREAD_SOURCE_PRIOR


def _median(run: report_pb2.Run) -> Median:
    low_high = run.p50_ci95_ns
    return Median(run.p50_ns, (low_high[0], low_high[1]) if len(low_high) == 2 else None)


def _warn_left_out(report: report_pb2.Report, valid: int) -> None:
    """Warn of invalid runs that the median of a valid report leaves out; otherwise the verdict names them."""
    if report.verdict.status != _VALID or valid == len(report.runs):
        return
    for number, run in enumerate(report.runs, 1):
        if run.verdict.status != _VALID:
            why = " ".join(reason.message for reason in run.verdict.reasons)
            message = f"Run {number} of {len(report.runs)} is INVALID and does not count for the median. {why}"
            report.compile.warnings.add(code=LEFT_OUT, message=message)
