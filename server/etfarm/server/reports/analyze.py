"""The analysis of one candidate's run in a jailed child, from samples, outputs and traces to the measured part of a report."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from etfarm.server.graphs import lost_columns
from etfarm.server.graphs.quantized_outputs import describe, is_quantized
from etfarm.server.reports.latency import generation, interleaved, slow_group, statistics
from etfarm.server.reports.numerics import (
    accuracy,
    calls,
    forced_text,
    fused,
    numeric_gap,
    reference,
    reference_models,
    wrong_outputs,
)
from etfarm.server.reports.request import (
    CALLS_DIFFER,
    CUT_SHORT,
    LOW_ACCURACY,
    OUTPUTS_DO_NOT_MATCH,
    PREFILL_TRACE_TIMES,
    SAMPLES_LEFT_OUT,
    TRACE_TIMES,
    AnalyzeRequest,
    Scores,
    Trace,
)
from etfarm.server.reports.trace import profile
from etfarm.server.workers.limits import limit_parsing
from etfarm.v1 import compile_pb2, report_pb2
from etfarm.wire import series, tensors
from etfarm.wire.errors import EtfarmError
from etfarm.wire.samples import round_down
from etfarm.wire.sqnr import FAR_FROM_QUANTIZED_GRAPH, PART_LOST, QUANTIZED_DB
from etfarm.wire.words import word_of

_LOG = logging.getLogger(__name__)

_PART_OF_LIMIT = 0.8
"""Fraction of the time limit for running graphs on the host, which leaves time to report the comparisons."""

_SAMPLES_S = 20.0
"""Time limit for the comparison of further samples, for all references together; the current sample is completed."""

_TEXT_S = 120.0
"""Time limit for the tokens that one reference executes."""

Emit = Callable[[bytes], None]


def analyze(request: AnalyzeRequest, folder: Path, emit: Emit) -> bytes:
    """Return a serialized etfarm.v1.Report with the measured parts and `compile.warnings`.

    The measured parts are `inputs.tensors`, `latency`, `runs` (their statistics), `interleaved`, `accuracy`, `profile`,
    `operators`, `trace_times`, `numerics`, `numeric_gap` and those of `generation`. A part for which the request has no files
    stays empty. A part that fails adds a warning with a code ANALYSIS_... and does not affect the others; its traceback goes to
    the job's log.

    Args:
        folder: folder of the child. TRACE_TIMES is written there if the run was traced, and `trace_times.size_bytes` is set;
            PREFILL_TRACE_TIMES likewise for the trace of prefill; temporary files belong in the jail's TMPDIR.
        emit: called with JSON objects {"stage": "INPUTS" | "STATISTICS" | "COMPARISON" | "ACCURACY" | "QUANTIZED_ACCURACY" |
            "CALLS" | "JOIN" | "GENERATION" | "PREFILL_JOIN" | "ENCODER_JOIN" | "PERPLEXITY" | "EAGER_TEXT" | "QUANTIZED_TEXT" |
            "HOST_TEXT" | "NUMERICS", "phase": "START" | "END", "duration_ms": X}; X is null at START.
    """
    deadline_s = time.monotonic() + _PART_OF_LIMIT * request.limit_s
    report = report_pb2.Report()
    if request.inputs is not None:
        with _part("INPUTS", report, emit):
            inputs = tensors.decode(request.inputs.read_bytes())
            report.inputs.tensors.extend(map(_input, inputs))
            if sentence := describe_nan(inputs):
                _warn(report, "INPUTS_HAVE_NAN", sentence)
    if request.samples is not None:
        with _part("STATISTICS", report, emit):
            _fill_latency(report, request)
    if request.samples is not None and request.base_samples is not None:
        with _part("COMPARISON", report, emit):
            _fill_interleaved(report, request, request.samples, request.base_samples)
    expected: list[tensors.Value] = []
    if request.outputs is not None and request.inputs is not None and request.model is not None:
        with _part("ACCURACY", report, emit):
            expected = _fill_accuracy(report, request, request.outputs, request.inputs, request.model, report_pb2.REFERENCE_EAGER)
    if request.outputs is not None and request.inputs is not None and request.quantized is not None:
        of_model, expected = expected, []
        with _part("QUANTIZED_ACCURACY", report, emit):
            expected = _fill_accuracy(
                report, request, request.outputs, request.inputs, request.quantized, report_pb2.REFERENCE_QUANTIZED, of_model
            )
    if request.calls is not None:
        with _part("CALLS", report, emit):
            if sentence := calls.find_difference(request.calls, request.screen):
                _warn(report, CALLS_DIFFER, sentence)
    if request.etdump is not None or request.traced_ns:
        with _part("JOIN", report, emit), limit_parsing(request.etdump, request.etrecord, request.pte):
            profile.fill(
                report, request, lambda code, message: _warn(report, code, message), partial(_save_times, report, folder)
            )
    if request.generation is not None:
        with _part("GENERATION", report, emit):
            generation.fill(report.generation, request.generation)
    if request.prefill is not None:
        with _part("PREFILL_JOIN", report, emit), limit_parsing(request.prefill.etdump, request.etrecord, request.pte):
            _fill_prefill(report, request, request.prefill, folder)
    if request.encoders is not None:
        with _part("ENCODER_JOIN", report, emit):
            for trace in request.encoders:
                with limit_parsing(trace.etdump, request.etrecord, request.pte):
                    _fill_encoder(report, request, trace)
    if request.scores is not None:
        _fill_text_accuracy(report, request, request.scores, emit, deadline_s)
    if request.numerics is not None and request.inputs is not None:
        with _part("NUMERICS", report, emit):
            numeric_gap.fill(
                report, request.method, request.model, request.inputs, request.numerics, deadline_s,
                lambda code, message: _warn(report, code, message), request.screen,
            )  # fmt: skip
            separate = None if request.numerics.is_timed_program else request.numerics.outputs
            if expected and separate is not None and request.outputs is not None:
                quantized = request.numerics.quantized is not None
                fused.fill_numerics(report, expected, request.outputs, separate, quantized=quantized)
    return report.SerializeToString()


def describe_nan(inputs: Iterable[tensors.Value]) -> str:
    """Return a warning with the number of NaN in each input; empty if there are no NaN."""
    counts = []
    for index, value in enumerate(inputs):
        if isinstance(value, tensors.Scalar) and not isinstance(value.value, float):
            continue
        array = np.asarray(value.value) if isinstance(value, tensors.Scalar) else tensors.to_array(value)
        # numpy does not count bfloat16 and the 8-bit floats as inexact dtypes, but its isnan handles them.
        count = 0 if array.dtype.kind in "biu" else int(np.isnan(array).sum())
        if count:
            counts.append(f"{count} of {array.size} element{'s' if array.size > 1 else ''} of {value.name or index!r}")
    return f"The inputs have NaN: {', '.join(counts)}. What is computed from it is NaN as well." if counts else ""


def prewarm() -> None:
    """Import what `analyze` needs, and run it once on one thread. The forkserver calls this before it forks."""
    import io

    import torch

    # The first load of a .pt2 imports and caches many modules; a program without arithmetic starts no threads.
    archive = io.BytesIO()
    torch.export.save(torch.export.export(torch.nn.Identity(), (torch.zeros(1),)), archive)
    archive.seek(0)
    torch.export.load(archive).module()(torch.zeros(1))


@contextmanager
def _part(stage: str, report: report_pb2.Report, emit: Emit) -> Iterator[None]:
    began_s = time.perf_counter()
    emit(json.dumps({"stage": stage, "phase": "START", "duration_ms": None}).encode())
    try:
        yield
    except Exception as error:  # noqa: BLE001 - one failed part must not lose the others: it becomes a warning, and is logged
        _LOG.warning("analysis: %s failed", stage, exc_info=True)
        message = str(error) if isinstance(error, EtfarmError) else f"{type(error).__name__}: {error}"
        _warn(report, f"ANALYSIS_{stage}_FAILED", message)
    finally:
        duration_ms = (time.perf_counter() - began_s) * 1e3
        emit(json.dumps({"stage": stage, "phase": "END", "duration_ms": duration_ms}).encode())


def _warn(report: report_pb2.Report, code: str, message: str) -> None:
    report.compile.warnings.append(compile_pb2.Warning(code=code, message=message[:2000]))


def _input(value: tensors.Value) -> report_pb2.InputTensor:
    if isinstance(value, tensors.Tensor):
        return report_pb2.InputTensor(name=value.name, dtype=value.dtype, shape=value.shape)
    kind = "None" if value.value is None else f"{type(value.value).__name__} scalar"
    return report_pb2.InputTensor(name=value.name, dtype=kind)


def _fill_latency(report: report_pb2.Report, request: AnalyzeRequest) -> None:
    assert request.samples is not None
    samples = statistics.read_samples(request.samples)
    summary = statistics.summarize(samples)
    report.latency.SetInParent()
    if summary is None:
        return
    report.latency.MergeFrom(
        report_pb2.Latency(
            min_ns=summary.min, p10_ns=summary.p10, p50_ns=summary.p50, p90_ns=summary.p90, p99_ns=summary.p99,
            mean_ns=summary.mean, stddev_ns=summary.stddev, p50_ci95_ns=summary.p50_ci95 or (), drift=summary.drift,
            effective_samples=summary.effective_samples,
        )
    )  # fmt: skip
    _fill_slow_group(report.latency, samples, interleaved.count_by_process(request.blocks) or request.runs)
    if request.blocks:
        return
    for part in statistics.split_runs(samples, request.runs) if request.runs else (samples,):
        of_run = statistics.summarize(part)
        assert of_run is not None  # a run has samples
        run = report.runs.add(p50_ns=of_run.p50, p50_ci95_ns=of_run.p50_ci95 or (), drift=of_run.drift)
        _fill_slow_group(run, part)


def _fill_slow_group(
    measured: report_pb2.Latency | report_pb2.Run, samples: NDArray[np.int64], processes: Sequence[int] = ()
) -> None:
    group = slow_group.find(samples, processes)
    if group is not None:
        measured.slow_share, measured.slow_ratio = group.share, group.ratio


def _save_times(report: report_pb2.Report, folder: Path, rows: Sequence[Sequence[int]]) -> None:
    """Write the traced times of the method and of each operator, the file of Report.trace_times."""
    report.trace_times.size_bytes = (folder / TRACE_TIMES).write_bytes(series.encode_trace_times(rows, len(rows[0])))


def _fill_prefill(report: report_pb2.Report, request: AnalyzeRequest, trace: Trace, folder: Path) -> None:
    """Fill the profile and the operators of prefill, whose trace is joined with the same files as that of decode."""
    own = report_pb2.Report()

    def save(rows: Sequence[Sequence[int]]) -> None:
        content = series.encode_trace_times(rows, len(rows[0]))
        report.generation.prefill_trace_times.size_bytes = (folder / PREFILL_TRACE_TIMES).write_bytes(content)

    try:
        _fill_profile(own, report, request, trace, "Prefill", save)
    finally:
        # The runner's own times are reported even if the trace cannot be read.
        if own.HasField("profile"):
            report.generation.prefill_profile.CopyFrom(own.profile)
        report.generation.prefill_operators.extend(own.operators)


def _fill_encoder(report: report_pb2.Report, request: AnalyzeRequest, trace: Trace) -> None:
    """Fill the profile and the operators of an encoder; the times of single iterations are not kept."""
    own = report_pb2.Report()
    try:
        _fill_profile(own, report, request, trace, trace.method, lambda rows: None)
    finally:
        if own.HasField("profile"):
            report.generation.encoders.add(method=trace.method, profile=own.profile, operators=own.operators)


def _fill_profile(
    own: report_pb2.Report,
    report: report_pb2.Report,
    request: AnalyzeRequest,
    trace: Trace,
    about: str,
    save: Callable[[Sequence[Sequence[int]]], None],
) -> None:
    of_trace = replace(request, etdump=trace.etdump, traced_ns=trace.traced_ns, method=trace.method)
    profile.fill(own, of_trace, lambda code, message: _warn(report, code, f"{about}: {message}"), save)


def _fill_interleaved(report: report_pb2.Report, request: AnalyzeRequest, samples: Path, base: Path) -> None:
    rounds = interleaved.rounds_of(
        interleaved.medians(statistics.read_samples(samples), request.blocks),
        interleaved.medians(statistics.read_samples(base), request.base_blocks),
    )
    comparison = interleaved.compare(rounds)
    if comparison is None:
        return
    report.interleaved.MergeFrom(
        report_pb2.PairedRatio(
            ratio=comparison.ratio, ratio_ci95=comparison.ci95 or (), rounds=len(rounds.ratios), ratios=rounds.ratios.tolist(),
            process_pairs=len(set(rounds.pairs.tolist())),
        )
    )  # fmt: skip


def _fill_text_accuracy(
    report: report_pb2.Report, request: AnalyzeRequest, scores: Scores, emit: Emit, deadline_s: float
) -> None:
    """Fill the accuracy of generation against each model that the server has."""
    target = report.generation.accuracy
    with _part("PERPLEXITY", report, emit):
        forced_text.fill_perplexity(target, scores)
    pte = request.pte if scores.on_host else None
    references = [
        ("EAGER_TEXT", report_pb2.REFERENCE_EAGER, request.model),
        ("QUANTIZED_TEXT", report_pb2.REFERENCE_QUANTIZED, request.quantized),
        ("HOST_TEXT", report_pb2.REFERENCE_HOST, pte),
    ]
    left = sum(path is not None for _, _, path in references)
    for stage, against, path in references:
        if path is None:
            continue
        with _part(stage, report, emit):
            # Late parts of the analysis need time, too.
            limit_s = min(_TEXT_S, max(1.0, (deadline_s - time.monotonic()) / (left + 1)))
            compared, is_whole = _compared_text(path, against, request, scores, limit_s)
            target.references.append(compared)
            if not is_whole:
                _warn(report, CUT_SHORT, _describe_cut(compared, scores, limit_s))
        left -= 1


def _compared_text(
    path: Path, against: report_pb2.Reference.ValueType, request: AnalyzeRequest, scores: Scores, limit_s: float
) -> tuple[report_pb2.GenerationReference, bool]:
    """Return the deviation of the device from one model, and whether all was compared in time.

    The model is no longer in memory when this returns.
    """
    model: forced_text.ReferenceModel
    if against == report_pb2.REFERENCE_HOST:
        model = reference_models.HostModel(path, request.method, scores.inputs)
    else:
        model = reference_models.EagerModel(path, scores.inputs, request.screen)
    compared = report_pb2.GenerationReference(reference=against)
    return compared, forced_text.compare(compared, scores, model, limit_s)


def _describe_cut(compared: report_pb2.GenerationReference, scores: Scores, limit_s: float) -> str:
    """Return the warning of a comparison that its time limit ended."""
    reference_field = report_pb2.GenerationReference.DESCRIPTOR.fields_by_name["reference"]
    what = f"The comparison with the {word_of(reference_field, compared.reference)} ended after {limit_s:.0f} s"
    done = f"{compared.tokens:,} of {scores.executed:,} tokens, and {compared.generated_tokens:,} generated ones"
    return f"{what}: it has {done}. Run `etfarm report analyze` to try again, or measure fewer tokens."


def _fill_accuracy(
    report: report_pb2.Report,
    request: AnalyzeRequest,
    outputs: Path,
    inputs: Path,
    model: Path,
    against: report_pb2.Reference.ValueType,
    of_model: Sequence[tensors.Value] = (),
) -> list[tensors.Value]:
    """Add the accuracy of each output over all samples; return the reference's outputs of the first one.

    Args:
        of_model: the outputs before quantization of the first sample, for a quantized program.
    """
    name_of_reference = word_of(report_pb2.OutputAccuracy.DESCRIPTOR.fields_by_name["reference"], against)
    program = reference.load(model, request.screen)
    files = (inputs, *(request.further.inputs if request.further is not None else ()))
    expected_samples = reference.run(program, (tensors.decode(file.read_bytes()) for file in files))
    pairs: list[list[tuple[tensors.Value, tensors.Value]]] = []
    references = sum(path is not None for path in (request.model, request.quantized))
    began_s, limit_s = time.monotonic(), min(_SAMPLES_S, request.limit_s) / references
    why = ""
    for actual_outputs in _actual_samples(request, tensors.decode(outputs.read_bytes())):
        if pairs and time.monotonic() - began_s > limit_s:
            del pairs[round_down(len(pairs)) :]
            why = f"PyTorch on the server needs more than {limit_s:g} s for all."
            break
        try:
            pairs.append(accuracy.pair(next(expected_samples), actual_outputs))
        except reference.ReferenceNotRunnable as error:
            if not pairs:
                raise
            why = str(error)
            break
    if why:
        compared = f"Accuracy against the {name_of_reference} is over {len(pairs)} of {len(files)} samples"
        _warn(report, SAMPLES_LEFT_OUT, f"{compared}: {why}")
    rows = []
    for index, (_, actual) in enumerate(pairs[0]):
        name = request.output_names[index] if index < len(request.output_names) else actual.name or str(index)
        row = report_pb2.OutputAccuracy(
            output=name, dtype=accuracy.dtype_of(actual), shape=accuracy.shape_of(actual), reference=against
        )
        try:
            together = accuracy.compare_samples(name, [sample[index] for sample in pairs])
        except accuracy.OutputsDoNotMatch as error:
            _warn(report, OUTPUTS_DO_NOT_MATCH, f"{error} It was compared with the {name_of_reference}.")
        else:
            row.MergeFrom(
                report_pb2.OutputAccuracy(
                    **asdict(together.difference), samples=together.samples, sqnr_db_min=together.sqnr_db_min,
                    sqnr_db_max=together.sqnr_db_max,
                )
            )  # fmt: skip
        rows.append(row)
    scores = [row for row in rows if row.HasField("top1_agreement")]
    # With several outputs, such as boxes and landmarks, it is unknown which are class scores.
    for row in scores if len(scores) > 1 else ():
        row.ClearField("top1_agreement")
    report.accuracy.extend(rows)
    if against == report_pb2.REFERENCE_EAGER:
        comparable = {at: (row.output, [sample[at] for sample in pairs]) for at, row in enumerate(rows) if row.HasField("equal")}
        if sentence := wrong_outputs.describe(
            request.method, comparable, lambda: next(reference.run(program, [tensors.decode(inputs.read_bytes())])),
            lambda float32: reference.run_in_half(program, inputs, float32=float32),
            quantized=request.is_quantized or request.quantized is not None or is_quantized(program), backends=request.backends,
            known=[message for _, message in request.known_problems],
        ):  # fmt: skip
            _warn(report, LOW_ACCURACY, sentence)
        is_quantized_here = request.is_quantized or request.quantized is not None
        is_known = any(code == PART_LOST for code, _ in request.known_problems)
        for at, (name, samples) in comparable.items() if is_quantized_here and not is_known else ():
            if rows[at].sqnr_db >= QUANTIZED_DB and (columns := lost_columns.find(samples, lost_columns.columns_of(program, at))):
                _warn(report, PART_LOST, lost_columns.describe(request.method, name, columns, program, at))
    # A model that the client has quantized is its own quantized graph.
    if sentence := describe(
        program, [row.output for row in rows], pairs, lambda sample: reference.read_inputs(files[sample]), request.backends,
        of_model, is_source=against == report_pb2.REFERENCE_EAGER,
    ):  # fmt: skip
        _warn(report, FAR_FROM_QUANTIZED_GRAPH, sentence)
    return [expected for expected, _ in pairs[0]]


def _actual_samples(request: AnalyzeRequest, first: list[tensors.Value]) -> Iterator[list[tensors.Value]]:
    """Yield the device's outputs of each sample: the first one, and those in the file of the further ones."""
    yield first
    if request.further is not None and first:
        values = tensors.decode(request.further.outputs.read_bytes())
        for place in range(min(len(request.further.inputs), len(values) // len(first))):
            yield values[place * len(first) : (place + 1) * len(first)]
