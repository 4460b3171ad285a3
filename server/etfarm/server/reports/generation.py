"""The generation of text in a report: its points over all processes, and their verdicts. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from etfarm.server.reports.disturbances import build_reason
from etfarm.server.reports.latency import between_runs
from etfarm.server.reports.latency.between_runs import Median
from etfarm.server.reports.latency.samples import MIN_REPETITIONS
from etfarm.server.reports.latency.thresholds import Thresholds
from etfarm.server.reports.runs import NOT_REPEATED
from etfarm.server.reports.verdict import judge_disturbances, judge_runs
from etfarm.v1 import agent_pb2, generation_pb2, report_pb2
from etfarm.wire import rounding
from etfarm.wire.generation import METRICS
from etfarm.wire.messages import copy_fields
from etfarm.wire.sqnr import QUANTIZED_DB, decibels

Judge = Callable[[agent_pb2.CandidateResult], report_pb2.Verdict]
"""Function that returns whether anything disturbed a run, from its threads, runner and telemetry."""

_VALID: Final = report_pb2.VERDICT_STATUS_VALID
_INVALID: Final = report_pb2.VERDICT_STATUS_INVALID
_NOT_BENCHMARKABLE: Final = report_pb2.VERDICT_STATUS_NOT_BENCHMARKABLE
NOT_SCORED: Final = "GENERATION_NOT_SCORED"
"""Code of the warning that an agent did not measure the accuracy of generation."""
_REFERENCES: Final = {
    report_pb2.REFERENCE_EAGER: "the exported program in PyTorch",
    report_pb2.REFERENCE_QUANTIZED: "the quantized program in PyTorch",
    report_pb2.REFERENCE_HOST: "the same program on the server",
}
_NAMES: Final = {"prefill_tokens_per_s": "prefill", "decode_tokens_per_s": "decode"}
Estimate = tuple[float, Sequence[float]]
"""A number, and the two ends of its 95 % interval, or nothing."""


def fill_generation(
    report: report_pb2.Report,
    plan: generation_pb2.GenerationPlan,
    result: agent_pb2.CandidateResult,
    analysis: report_pb2.Generation,
    *,
    requested: int,
    emulated: bool,
    thresholds: Thresholds,
    dtype: str = "",
    cores: int = 0,
    clusters: Sequence[Sequence[int]] = (),
) -> None:
    """Fill a report's generation and its verdict; neither if the files of the times could not be analyzed.

    Args:
        result: the result, which is plausible.
        analysis: what the analysis of the files computed.
        requested: number of processes that the job requested.
        dtype: that of the logits; empty if it is unknown.
        emulated, thresholds, cores, clusters: as in `verdict.judge`.
    """
    if not analysis.points:
        return
    generated = report.generation
    generated.model.CopyFrom(plan.model)
    generated.generated_tokens = plan.generated_tokens
    for process in result.generations:
        generated.token_times.add().CopyFrom(process.token_ns)
        generated.tokens.add().CopyFrom(process.tokens)
    _fill_traces(report, result.generations[-1], analysis)
    _fill_accuracy(report, plan, result.generations[-1].score, analysis.accuracy, dtype)
    if requested > len(result.generations):
        message = f"{requested} runs were requested, and the device's agent made {len(result.generations)}. Update the agent."
        report.compile.warnings.add(code=NOT_REPEATED, message=message)

    def judge(part: agent_pb2.CandidateResult) -> report_pb2.Verdict:
        return judge_disturbances(part, emulated=emulated, thresholds=thresholds, cores=cores, clusters=clusters)

    of_processes = [judge(_process_of(result, number)) for number in range(len(result.generations))]
    for place, requested_point in enumerate(plan.points):
        point = generated.points.add(prompt_tokens=requested_point.prompt_tokens, depth=requested_point.depth)
        known = analysis.points[place]
        # Copy only the statistics: the child that computed them loaded untrusted files.
        point.token_ns.extend(known.token_ns)
        if known.HasField("tokens_equal"):
            point.tokens_equal = known.tokens_equal
        for number, process in enumerate(result.generations):
            measured = process.points[place]
            if measured.HasField("error") and not point.HasField("error"):
                point.error.CopyFrom(measured.error)
            point.repetitions += measured.repetitions
            run = point.runs.add(repetitions=measured.repetitions, telemetry=measured.telemetry)
            run.telemetry.ClearField("series")
            _copy_numbers(known.runs[number], run)  # `require_generation` rejects another number of runs
            own = agent_pb2.CandidateResult(threads=result.threads, runner=result.runner, telemetry=run.telemetry)
            run.verdict.CopyFrom(_judge_run(run, [of_processes[number], judge(own)], thresholds))
        _fill_numbers(point)
        fill_parts(point, [process.points[place] for process in result.generations], plan.generated_tokens)
        point.verdict.CopyFrom(_judge_point(point, result))
    report.verdict.CopyFrom(_judge_all(generated.points))


def _fill_traces(report: report_pb2.Report, last: agent_pb2.GenerationResult, analysis: report_pb2.Generation) -> None:
    """Fill what the traced passes of both methods have besides Report.profile and Report.operators."""
    generated = report.generation
    if last.HasField("decode"):
        generated.decode_execution.tokens, generated.decode_execution.position = last.decode.tokens, last.decode.position
        if last.decode.HasField("etdump"):
            report.etdump.CopyFrom(last.decode.etdump)
    if last.HasField("prefill"):
        generated.prefill_execution.tokens, generated.prefill_execution.position = last.prefill.tokens, last.prefill.position
        if last.prefill.HasField("etdump"):
            generated.prefill_etdump.CopyFrom(last.prefill.etdump)
    copy_fields(analysis, generated, ("prefill_profile", "prefill_trace_times", "prefill_operators"))
    traces = {encoder.method: encoder.trace for encoder in last.encoders}
    for analyzed in analysis.encoders:
        encoder = generated.encoders.add()
        encoder.CopyFrom(analyzed)
        encoder.ClearField("etdump")
        if traces[analyzed.method].HasField("etdump"):
            encoder.etdump.CopyFrom(traces[analyzed.method].etdump)


def _fill_accuracy(
    report: report_pb2.Report,
    plan: generation_pb2.GenerationPlan,
    score: agent_pb2.ScoreResult,
    analysis: report_pb2.GenerationAccuracy,
    dtype: str,
) -> None:
    """Fill the accuracy of generation: the device's counts, what the analysis computed of them, and a warning if it is low."""
    if not plan.HasField("score"):
        return
    accuracy = report.generation.accuracy
    accuracy.is_text = plan.score.is_text
    if not score.HasField("values"):
        if score.HasField("error"):
            accuracy.error.CopyFrom(score.error)
            return
        report.generation.ClearField("accuracy")
        report.compile.warnings.add(
            code=NOT_SCORED,
            message="The device's agent did not report the accuracy of generation. Update the agent.",
        )
        return
    accuracy.tokens, accuracy.vocabulary = score.tokens, score.vocabulary
    accuracy.values.CopyFrom(score.values)
    if analysis.HasField("perplexity"):
        accuracy.perplexity = analysis.perplexity
    accuracy.perplexity_tokens = analysis.perplexity_tokens
    accuracy.references.extend(analysis.references)
    is_quantized = any(each.reference == report_pb2.REFERENCE_QUANTIZED for each in accuracy.references)
    for each in accuracy.references:
        if each.logits_tokens and not each.HasField("max_abs_error"):
            message = (
                f"The logits of given tokens have NaN or infinity where those of {_REFERENCES[each.reference]} have none, or the "
                "other way round. The recipes xnnpack_fp32 and portable show whether quantization or the backend is the reason."
            )
            report.compile.warnings.add(code="LOW_ACCURACY", message=message)
        # A device may round sums of integers differently, also against the same quantized program.
        is_float = each.reference == report_pb2.REFERENCE_EAGER and not is_quantized
        least_db = rounding.least_sqnr_db(dtype) if is_float else QUANTIZED_DB
        if each.HasField("sqnr_db") and each.sqnr_db < least_db:
            message = (
                f"The logits of given tokens have {decibels(each.sqnr_db)} against {_REFERENCES[each.reference]}; at least "
                f"{least_db:g} dB are expected. They agree on the most likely token after {each.top1_agreement:.0%} of them."
            )
            report.compile.warnings.add(code="LOW_ACCURACY", message=message)


def traced_result(result: agent_pb2.CandidateResult, trace: agent_pb2.GenerationTrace) -> agent_pb2.CandidateResult:
    """Return a traced method as the result of a traced pass, for its verdict."""
    return agent_pb2.CandidateResult(threads=result.threads, traced_ns=trace.traced_ns, traced_telemetry=trace.telemetry)


def _process_of(result: agent_pb2.CandidateResult, number: int) -> agent_pb2.CandidateResult:
    """Return one process as a result of its own. That of the first has the series of the device's clock."""
    telemetry = result.telemetry if number == 0 else result.generations[number].telemetry
    return agent_pb2.CandidateResult(threads=result.threads, runner=result.runner, telemetry=telemetry)


def _copy_numbers(source: report_pb2.GenerationRun, target: report_pb2.GenerationRun) -> None:
    for name, interval in METRICS.items():
        if source.HasField(name):  # type: ignore[arg-type]
            copy_fields(source, target, (name, interval))


def _fill_numbers(point: report_pb2.GenerationPointReport) -> None:
    """Fill a point's numbers: means over its valid processes, or over all if none is valid."""
    measured = [run for run in point.runs if run.repetitions]
    runs = [run for run in measured if run.verdict.status == _VALID] or measured
    for name, interval in METRICS.items():
        values = [_median(getattr(run, name), getattr(run, interval)) for run in runs if run.HasField(name)]  # type: ignore[arg-type]
        if not values:
            continue
        middle, ends = combine(values)
        setattr(point, name, middle)
        getattr(point, interval).extend(ends)


def _median(value: float, ends: Sequence[float]) -> Median:
    return Median(value, (ends[0], ends[1]) if len(ends) == 2 else None)


def _judge_run(
    run: report_pb2.GenerationRun, verdicts: Sequence[report_pb2.Verdict], thresholds: Thresholds
) -> report_pb2.Verdict:
    """Return the verdict on one process at one point, from its disturbances and from how much its repetitions vary."""
    reasons = {reason.code: reason for verdict in verdicts for reason in verdict.reasons}
    if any(verdict.status == _NOT_BENCHMARKABLE for verdict in verdicts):
        return report_pb2.Verdict(status=_NOT_BENCHMARKABLE, reasons=reasons.values())
    if run.repetitions < MIN_REPETITIONS:
        message = f"Only {run.repetitions} repetitions were completed; at least {MIN_REPETITIONS} are needed."
        reasons["TOO_FEW_SAMPLES"] = build_reason("TOO_FEW_SAMPLES", message, run.repetitions, MIN_REPETITIONS)
    for name, what in _NAMES.items():
        ends, value = getattr(run, METRICS[name]), getattr(run, name)
        width = (ends[1] - ends[0]) / value if len(ends) == 2 and value else 0.0
        if width > thresholds.max_interval:
            message = (
                f"The interval of {what}, over {run.repetitions} repetitions, spans {width:.0%} of its tokens per second; "
                f"at most {thresholds.max_interval:.0%} is allowed."
            )
            reasons.setdefault("TOO_FEW_SAMPLES", build_reason("TOO_FEW_SAMPLES", message, width, thresholds.max_interval))
    return report_pb2.Verdict(status=_INVALID if reasons else _VALID, reasons=reasons.values())


def _judge_point(point: report_pb2.GenerationPointReport, result: agent_pb2.CandidateResult) -> report_pb2.Verdict:
    """Return the verdict on a point over its processes."""
    verdicts = [run.verdict for run in point.runs]
    verdict = judge_runs(result, verdicts) if len(verdicts) > 1 else verdicts[0]
    judged = report_pb2.Verdict(status=verdict.status, reasons=verdict.reasons)
    if point.HasField("tokens_equal") and not point.tokens_equal:
        message = (
            "Repetitions of the same text generated different tokens: the program's state does not start anew at position 0, or "
            "it is nondeterministic."
        )
        judged.reasons.add(code="OUTPUTS_DIFFER", message=message)
        if judged.status == _VALID:
            judged.status = _INVALID
    return judged


def _judge_all(points: Iterable[report_pb2.GenerationPointReport]) -> report_pb2.Verdict:
    """Return the verdict on the whole: that of the points if all are VALID, else each reason once, with its points."""
    points = list(points)
    where: dict[str, list[str]] = {}
    first: dict[str, report_pb2.VerdictReason] = {}
    for point in points:
        for reason in point.verdict.reasons:
            where.setdefault(reason.code, []).append(f"prompt {point.prompt_tokens} at depth {point.depth}")
            first.setdefault(reason.code, reason)
    verdict = report_pb2.Verdict()
    for code, reason in first.items():
        own = verdict.reasons.add()
        own.CopyFrom(reason)
        if len(where[code]) < len(points):
            own.message = f"With {' and '.join(where[code])}: {reason.message}"
    statuses = [point.verdict.status for point in points]
    worst = next((each for each in (_NOT_BENCHMARKABLE, _INVALID) if each in statuses), _VALID)
    verdict.status = worst
    return verdict


def fill_parts(
    point: report_pb2.GenerationPointReport, processes: Sequence[agent_pb2.GenerationPointResult], generated_tokens: int
) -> None:
    """Add the parts of a point, whose own numbers and runs are filled: means over its valid processes, or over all.

    Args:
        processes: what each process measured at the point, in the order of its runs.
    """
    measured = [(run, own) for run, own in zip(point.runs, processes, strict=True) if run.repetitions and own.parts]
    chosen = [own for run, own in measured if run.verdict.status == _VALID] or [own for _, own in measured]
    if not chosen:
        return
    token_ns = 1e9 / point.decode_tokens_per_s if point.decode_tokens_per_s else 0.0
    for place, first in enumerate(chosen[0].parts):
        parts = [own.parts[place] for own in chosen]
        part = point.parts.add(
            method=first.method, prefill_executions=first.prefill_executions, decode_executions=first.decode_executions
        )
        if first.prefill_executions:
            part.prefill_ns, ends = combine([mean_of(each.prefill_ns) for each in parts])
            part.prefill_ci95_ns.extend(ends)
            if point.ttft_ns:
                part.prefill_share = min(1.0, part.prefill_ns / point.ttft_ns)
        if first.decode_executions:
            steps = max(1, generated_tokens - 1)
            part.decode_ns, ends = combine([mean_of([value / steps for value in each.decode_ns]) for each in parts])
            part.decode_ci95_ns.extend(ends)
            if token_ns:
                part.decode_share = min(1.0, part.decode_ns / token_ns)


def mean_of(values: Sequence[float]) -> Median:
    """Return the geometric mean of the repetitions of a process, of which there is at least one, with its interval."""
    # Imported only for generated text: the import costs 12 MB and 0.1 s at every start of a server.
    import numpy as np

    from etfarm.server.reports.latency.generation import mean_interval

    # A time of 0 ns has no logarithm; clocks of 1 ns resolution cannot tell it from 1 ns.
    times = np.maximum(np.asarray(values, dtype=np.float64), 1.0)
    return Median(math.exp(float(np.log(times).mean())), mean_interval(times))


def combine(values: Sequence[Median]) -> Estimate:
    """Return the geometric mean of processes with its interval: over three or more processes, else within them."""
    middle = between_runs.middle(values)
    spread = between_runs.spread_of([value.p50_ns for value in values], between_runs.mean_error(values))
    ends = between_runs.interval(middle, spread, len(values)) if spread is not None else between_runs.within(middle, values)
    return middle, ends or ()
