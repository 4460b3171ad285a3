"""The assembly of a cell's report from the job, the compilation, the attempt's result and the analysis. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Final

from etfarm.server.reports.generation import fill_generation, traced_result
from etfarm.server.reports.latency.between_runs import Earlier
from etfarm.server.reports.runs import fill_runs
from etfarm.server.reports.traced_verdict import is_disturbed, judge_trace
from etfarm.server.reports.verdict import Thresholds, judge
from etfarm.v1 import agent_pb2, common_pb2, compile_pb2, generation_pb2, job_pb2, report_pb2
from etfarm.v1.device_pb2 import Device
from etfarm.wire import differences
from etfarm.wire import digest as digests
from etfarm.wire.messages import copy_fields
from etfarm.wire.sqnr import FAR_FROM_QUANTIZED_GRAPH

PYTHON_RUNNER: Final = "PYTHON_RUNNER"
"""Code of the warning about a program that ExecuTorch's Python binding ran. It is no reason of a verdict: the binding runs the
same kernels, and adds a nearly constant time to each call."""
_PYTHON_MESSAGE: Final = (
    "ExecuTorch's Python binding ran the program, because the farm has no runner bundle for {arch}: each call takes about 2 µs "
    "more than with a native runner, and the program's peak memory is unknown. Install g++ or the wheel etfarm-runner where the "
    "server runs, and start it again, or offer a bundle: `etfarm bundle build --arch {arch} -o FILE`, `etfarm bundle add FILE`."
)


def assemble(
    report_id: str,
    job: job_pb2.Job,
    cell: job_pb2.Cell,
    *,
    at: datetime,
    compilation: compile_pb2.Compilation | None = None,
    device: Device | None = None,
    result: agent_pb2.CandidateResult | None = None,
    analysis: report_pb2.Report | None = None,
    thresholds: Thresholds | None = None,
    numerics: compile_pb2.Compilation | None = None,
    inputs: common_pb2.Artifact | None = None,
    samples: Sequence[common_pb2.Artifact] = (),
    calls: Sequence[agent_pb2.RunCall] = (),
    warnings: Sequence[compile_pb2.Warning] = (),
    earlier: Earlier = Earlier(),  # noqa: B008 - frozen
    generation: generation_pb2.GenerationPlan | None = None,
) -> report_pb2.Report:
    """Return the report of a cell in a terminal state. Parts that the cell did not reach are absent.

    Args:
        analysis: the result of `Analyst.analyze`.
        numerics: the compilation that the numerics pass ran, which may be `compilation`; None without a numerics pass.
        inputs: the program's inputs; None if the runner generated them.
        samples: the further inputs that were sent with the attempt.
        calls: the calls that were sent with the attempt.
        warnings: in addition to those of the compilation and the analysis.
        earlier: medians of earlier reports.
        generation: what the agent measured of a language model.
    """
    candidate = job.spec.candidates[cell.candidate_index]
    report = report_pb2.Report(id=report_id, cell=cell.id, method=cell.method, state=cell.state)
    report.create_time.FromDatetime(at)
    if cell.HasField("error"):
        report.error.CopyFrom(cell.error)
    if cell.attempts:
        report.attempt = cell.attempts[-1].id
    if candidate.recipe:
        report.recipe = cell.recipe_name
        report.recipe_digest = digests.of_bytes(candidate.recipe.encode())
    if cell.HasField("threads"):
        report.threads = cell.threads
    model = report_pb2.ReportModel(name=candidate.name, digest=model_digest(candidate), sources=candidate.model.sources)
    report.model.CopyFrom(model)
    if compilation is not None:
        report.compile.cached = cell.compile_cached
        report.compile.stages.extend(candidate.stages_done)
        report.compile.compilation.CopyFrom(compilation)
        report.compile.compilation.ClearField("located_operators")  # thousands of lines, which failures alone need
        report.compile.compilation.ClearField("shared_buffers")  # a warning names them
        report.compile.compilation.ClearField("stateful_methods")
    if device is not None:
        report.device.CopyFrom(_device(device))
    if result is not None:
        result = _with_names(result, compilation, cell.method)
        _fill_measured(report, job, result)
        if result.HasField("runner") and not result.generations:
            report.inputs.SetInParent()
            if inputs is not None:
                report.inputs.digest = inputs.digest
            report.inputs.from_job = cell.method in job.spec.inputs
        if not report.memory.planned_bytes and compilation is not None and cell.method in compilation.facts.methods:
            report.memory.planned_bytes.extend(compilation.facts.methods[cell.method].planned_bytes)
    if analysis is not None:
        # Copy only the parts that an analysis computes: the child that computed them loaded untrusted files.
        copy_fields(analysis, report, ("latency", "profile", "trace_times", "interleaved", "analysis"))
        if report.HasField("inputs"):
            report.inputs.tensors.extend(analysis.inputs.tensors)
        report.accuracy.extend(analysis.accuracy)
        for row in report.accuracy:
            if row.samples > 1 and inputs is not None:
                used = [inputs.digest, *(sample.digest for sample in samples[: row.samples - 1])]
                row.samples_digest = digests.of_value(used)
        report.numeric_gap.extend(analysis.numeric_gap)
        report.operators.extend(analysis.operators)
        report.compile.warnings.extend(analysis.compile.warnings)
        _drop_comparison_of_host(report)
    if warnings:
        report.compile.warnings.extend(warnings)
    methods = candidate.model.methods
    if compilation is not None and cell.method in methods and (forgotten := methods[cell.method].forgotten_buffers):
        message = (
            f"The program of {cell.method} forgets what the model assigns to {', '.join(forgotten)}, so that later calls may "
            "have other outputs than the model's. Keep it in buffers, written with copy_() in their own shape and dtype."
        )
        report.compile.warnings.add(code="STATE_FORGOTTEN", message=message)
    if compilation is not None and cell.method in methods and (sizes := methods[cell.method].small_sizes):
        message = differences.describe_sizes(cell.method, sizes)
        report.compile.warnings.add(code=differences.SIZE_ONE_DIFFERS, message=message)
    if compilation is not None and cell.method in methods and (differs := methods[cell.method].differs):
        message = differences.describe_examples(cell.method, differs)
        report.compile.warnings.add(code=differences.PROGRAM_DIFFERS, message=message)
    if result is not None and result.further.HasField("error"):
        count = "one sample" if result.further.samples < 1 else f"{1 + result.further.samples} samples"
        error = result.further.error
        message = f"Accuracy is over {count}: {error.message} {error.remedy}".rstrip()
        report.compile.warnings.add(code="SAMPLES_LEFT_OUT", message=message)
    if result is not None and calls and not result.HasField("error"):
        _warn_of_calls(report, calls, result)
    if report.runner.kind == common_pb2.RUNNER_KIND_PYTHON:
        report.compile.warnings.add(code=PYTHON_RUNNER, message=_PYTHON_MESSAGE.format(arch=report.device.arch))
    if job.spec.measurement.numerics:
        _fill_numerics(report, compilation, numerics, result, analysis or report_pb2.Report())
    if result is not None and device is not None and result.HasField("samples") and report.HasField("latency"):
        measurement = job.spec.measurement
        judge_run = partial(
            judge, emulated=device.emulated, thresholds=thresholds or Thresholds(), asked_samples=measurement.iterations,
            cores=device.cores, clusters=[list(cluster.cpus) for cluster in device.clusters],
        )  # fmt: skip
        statistics = analysis.runs if analysis is not None else ()
        fill_runs(report, result, statistics, judge_run, requested=measurement.repeat, earlier=earlier)
    if generation is not None and result is not None and result.generations and device is not None and analysis is not None:
        fill_generation(
            report, generation, result, analysis.generation, requested=job.spec.measurement.repeat, emulated=device.emulated,
            thresholds=thresholds or Thresholds(), dtype=_logits_dtype(compilation, generation), cores=device.cores,
            clusters=[list(cluster.cpus) for cluster in device.clusters],
        )  # fmt: skip
    if result is not None and device is not None:
        timed = report.runs[-1].verdict if report.runs else report.verdict
        if report.HasField("profile") and timed.status == report_pb2.VERDICT_STATUS_INVALID:
            report.profile.ClearField("event_cost_ns")  # the difference to the traced pass is not only what tracing costs
        for profile, traced in _traced(report, result):
            _fill_trace(profile, traced, emulated=device.emulated, thresholds=thresholds or Thresholds())
    report.timeline.extend(cell.timeline)
    return report


def _drop_comparison_of_host(report: report_pb2.Report) -> None:
    """Drop the warning that the method is far from its quantized graph on the server, where the device was compared with it.

    Not if executions differ without state: the server has compared the worse one.
    """
    if report.measurement.repeatability.outcome == report_pb2.REPEATABILITY_OUTCOME_HIDDEN_STATE:
        return
    is_compared = any(row.reference == report_pb2.REFERENCE_QUANTIZED for row in report.accuracy)
    if not is_compared and not any(warning.code == FAR_FROM_QUANTIZED_GRAPH for warning in report.compile.warnings):
        return
    warnings = report.compile.compilation.warnings
    kept = [
        warning
        for warning in warnings
        if warning.code != FAR_FROM_QUANTIZED_GRAPH or not warning.message.startswith(f"{report.method} on the server: ")
    ]
    del warnings[:]
    warnings.extend(kept)


def _warn_of_calls(report: report_pb2.Report, calls: Sequence[agent_pb2.RunCall], result: agent_pb2.CandidateResult) -> None:
    """Warn of calls that the device did not execute, so that state between them was not compared there."""
    executed = result.calls.samples
    if executed < len(calls):
        sequence = ", ".join(call.method for call in calls)
        error = result.calls.error if result.calls.HasField("error") else None
        why = f"{error.message} {error.remedy}".strip() if error else "The device's agent did not report it: update the agent."
        message = f"The device executed {executed} of the calls {sequence}, which compare its state with the model's. {why}"
        report.compile.warnings.add(code="CALLS_NOT_RUN", message=message)


def _logits_dtype(compilation: compile_pb2.Compilation | None, plan: generation_pb2.GenerationPlan) -> str:
    """Return the dtype of a language model's logits; empty if it is unknown."""
    facts = compilation.facts.methods if compilation is not None else {}
    decode = plan.model.decode_method
    return facts[decode].outputs[0].dtype if decode in facts and facts[decode].outputs else ""


def _traced(
    report: report_pb2.Report, result: agent_pb2.CandidateResult
) -> Iterator[tuple[report_pb2.Profile, agent_pb2.CandidateResult]]:
    """Yield the profiles of a report, each with the result of its traced pass."""
    generated = result.generations[-1] if result.generations else None
    if report.HasField("profile"):
        yield report.profile, result if generated is None else traced_result(result, generated.decode)
    if generated is not None and report.generation.HasField("prefill_profile"):
        yield report.generation.prefill_profile, traced_result(result, generated.prefill)
    if generated is not None:
        traces = {encoder.method: encoder.trace for encoder in generated.encoders}
        for encoder in report.generation.encoders:
            yield encoder.profile, traced_result(result, traces[encoder.method])


def _fill_trace(
    profile: report_pb2.Profile, result: agent_pb2.CandidateResult, *, emulated: bool, thresholds: Thresholds
) -> None:
    """Set the counters of the traced pass and its verdict, which the child that analyzed untrusted files must not do."""
    profile.ClearField("telemetry")
    if result.HasField("traced_telemetry"):
        profile.telemetry.CopyFrom(result.traced_telemetry)
    if is_disturbed(profile, result, thresholds):
        profile.ClearField("event_cost_ns")
    profile.verdict.CopyFrom(judge_trace(profile, result, emulated=emulated, thresholds=thresholds))


def _fill_numerics(
    report: report_pb2.Report,
    timed: compile_pb2.Compilation | None,
    numerics: compile_pb2.Compilation | None,
    result: agent_pb2.CandidateResult | None,
    analysis: report_pb2.Report,
) -> None:
    if numerics is None:
        return
    program = numerics.program
    report.numerics.program.CopyFrom(program)
    report.numerics.is_timed_program = timed is not None and program.digest == timed.program.digest
    judged = ("threshold_db", "first_bad", "judged", "timed_sqnr_db", "sqnr_db", "wrong_only_when_fused")
    copy_fields(analysis.numerics, report.numerics, judged)
    if result is None or result.HasField("error"):
        return  # the report's own error explains it
    recorded = result.numerics
    if recorded.HasField("etdump"):
        report.numerics_etdump.CopyFrom(recorded.etdump)
    if recorded.HasField("debug"):
        report.numerics_debug.CopyFrom(recorded.debug)
    if not (recorded.HasField("etdump") and recorded.HasField("debug")):
        error = recorded.error if recorded.HasField("error") else None
        why = f"{error.message} {error.remedy}".strip() if error else "The device's agent did not report it: update the agent."
        report.compile.warnings.add(code="NUMERICS_NOT_RUN", message=f"The numerics pass produced no result. {why}")


def model_digest(candidate: job_pb2.Candidate) -> str:
    """Return the digest of a model: that of its methods' manifest, or of a ready program."""
    if candidate.WhichOneof("source") == "program":
        return candidate.program.digest
    methods = {name: method.exported_program.digest for name, method in candidate.model.methods.items()}
    return digests.of_value({"schema": "etfarm.model/1", "methods": methods})


def since(job: job_pb2.Job, at: datetime) -> float:
    """Return the time from the job's submission to `at`, in milliseconds."""
    return (at - job.create_time.ToDatetime(UTC)).total_seconds() * 1e3


def _device(device: Device) -> report_pb2.ReportDevice:
    return report_pb2.ReportDevice(
        id=device.id, name=device.name, arch=device.arch, soc=device.soc, os=device.os, cores=device.cores,
        memory_bytes=device.memory_bytes, emulated=device.emulated,
    )  # fmt: skip


def _with_names(
    result: agent_pb2.CandidateResult, compilation: compile_pb2.Compilation | None, method: str
) -> agent_pb2.CandidateResult:
    """Return a result in which outputs that differed have the model's names, where the device had their places only."""
    if compilation is None or method not in compilation.facts.methods or not result.repeatability.differences:
        return result
    names = {str(index): spec.name for index, spec in enumerate(compilation.facts.methods[method].outputs)}
    named = agent_pb2.CandidateResult()
    named.CopyFrom(result)
    for difference in named.repeatability.differences:
        difference.output = names.get(difference.output) or difference.output
    return named


def _fill_measured(report: report_pb2.Report, job: job_pb2.Job, result: agent_pb2.CandidateResult) -> None:
    copy_fields(result, report, ("runner", "threads", "load", "memory", "telemetry", "outputs", "samples", "etdump"))
    if result.HasField("samples"):
        for name in ("warmup", "iterations", "duration_ns", "stop_reason"):
            setattr(report.measurement, name, getattr(result, name))
        copy_fields(result, report.measurement, ("steady", "warmup_ns", "repeatability"))
