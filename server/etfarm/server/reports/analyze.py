"""Step 9, in the jailed child: samples, outputs and trace of one candidate's run as the measured part of its report."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from etfarm.server.reports import accuracy, attribution, etdump, graph, join, reference, statistics
from etfarm.server.reports.request import AnalyzeRequest
from etfarm.v1 import compile_pb2, report_pb2
from etfarm.wire import tensors
from etfarm.wire.errors import EtfarmError

_LOG = logging.getLogger(__name__)

Emit = Callable[[bytes], None]


def analyze(request: AnalyzeRequest, folder: Path, emit: Emit) -> bytes:
    """A serialized etfarm.v1.Report with `latency`, `accuracy`, `profile` and `operators`; nothing else is set but
    `compile.warnings`.

    What the request has nothing for stays empty. A part that fails leaves a warning with a code ANALYSIS_... and the others
    as they are; its traceback goes to the job's log.

    Args:
        folder: the child's own; unused, temporary files go where the jail's TMPDIR is.
        emit: gets JSON objects {"stage": "STATISTICS" | "ACCURACY" | "JOIN", "phase": "START" | "END", "duration_ms": X}; X
            is null at START.
    """
    report = report_pb2.Report()
    if request.samples is not None:
        with _part("STATISTICS", report, emit):
            _fill_latency(report, request.samples)
    if request.outputs is not None and request.inputs is not None and request.model is not None:
        with _part("ACCURACY", report, emit):
            _fill_accuracy(report, request, request.outputs, request.inputs, request.model)
    if request.etdump is not None or request.traced_ns:
        with _part("JOIN", report, emit):
            _fill_profile(report, request)
    return report.SerializeToString()


def prewarm() -> None:
    """Imports, and runs once, what `analyze` needs, on one thread. For the forkserver, before it forks."""
    import io

    import torch
    from executorch.devtools.etdump import serialize  # noqa: F401
    from executorch.exir._serialize import _flatbuffer_program

    _flatbuffer_program._patch_generated_flatbuffer_aliases()
    # The first load of a .pt2 imports and caches much; a program without arithmetic starts no threads.
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
    except Exception as error:  # noqa: BLE001 - one failed part must not lose the others: it is told, and logged
        _LOG.warning("analysis: %s failed", stage, exc_info=True)
        told = str(error) if isinstance(error, EtfarmError) else f"{type(error).__name__}: {error}"
        _warn(report, f"ANALYSIS_{stage}_FAILED", told)
    finally:
        duration_ms = (time.perf_counter() - began_s) * 1e3
        emit(json.dumps({"stage": stage, "phase": "END", "duration_ms": duration_ms}).encode())


def _warn(report: report_pb2.Report, code: str, message: str) -> None:
    report.compile.warnings.append(compile_pb2.Warning(code=code, message=message[:2000]))


def _fill_latency(report: report_pb2.Report, path: Path) -> None:
    samples = statistics.read_samples(path)
    summary = statistics.summarize(samples)
    report.latency.samples_ns.extend(samples.tolist())
    if summary is None:
        return
    report.latency.MergeFrom(
        report_pb2.Latency(
            min_ns=summary.min, p50_ns=summary.p50, p90_ns=summary.p90, p99_ns=summary.p99, mean_ns=summary.mean,
            stddev_ns=summary.stddev, p50_ci95_ns=summary.p50_ci95 or (),
        )
    )  # fmt: skip


def _fill_accuracy(report: report_pb2.Report, request: AnalyzeRequest, outputs: Path, inputs: Path, model: Path) -> None:
    given = tensors.decode(outputs.read_bytes())
    wanted = reference.run(model, tensors.decode(inputs.read_bytes()))
    for index, (expected, actual) in enumerate(accuracy.pair(wanted, given)):
        name = request.output_names[index] if index < len(request.output_names) else actual.name or str(index)
        row = report_pb2.OutputAccuracy(
            output=name, dtype=accuracy.dtype_of(actual), shape=accuracy.shape_of(actual), reference=accuracy.REFERENCE
        )
        try:
            found = accuracy.compare(name, expected, actual)
        except accuracy.OutputsDoNotMatch as error:
            _warn(report, "ANALYSIS_OUTPUTS_DO_NOT_MATCH", str(error))
        else:
            row.MergeFrom(
                report_pb2.OutputAccuracy(
                    equal=found.equal, max_abs_error=found.max_abs_error, mean_abs_error=found.mean_abs_error,
                    cosine=found.cosine, sqnr_db=found.sqnr_db,
                )
            )  # fmt: skip
        report.accuracy.append(row)


def _fill_profile(report: report_pb2.Report, request: AnalyzeRequest) -> None:
    if request.traced_ns:
        # Stands alone where the trace cannot be read.
        report.profile.iterations = len(request.traced_ns)
        report.profile.p50_ns = float(np.median(request.traced_ns))
    if request.etdump is None:
        return
    trace = etdump.read(request.etdump.read_bytes())
    record, program = graph.Record(), {}
    if request.etrecord is not None:
        try:
            record = graph.read_record(request.etrecord, request.method)
        except graph.BadRecord as error:
            _warn(report, "ANALYSIS_ETRECORD_UNREADABLE", f"{error} The rows have no modules and no source lines.")
    if request.pte is not None:
        try:
            program = graph.read_program(request.pte, request.method)
        except graph.BadProgram as error:
            _warn(report, "ANALYSIS_PROGRAM_UNREADABLE", f"{error} The rows do not name their backends.")
    if trace.left_out:
        _warn(
            report,
            "ANALYSIS_ITERATIONS_DIFFER",
            f"{trace.left_out} traced iterations executed other instructions than the other {trace.method_ns.size} did "
            "and are left out of the profile.",
        )
    found = attribution.attribute(trace, program, record)
    if found.unaligned:
        _warn(
            report,
            "ANALYSIS_KERNELS_UNALIGNED",
            f"The kernels of {len(found.unaligned)} of {found.delegates} XNNPACK delegates have no source lines. "
            f"{found.unaligned[0]}",
        )
    joined = join.join(trace, record, program, request.method, found.kernels)
    report.profile.CopyFrom(joined.profile)
    report.operators.extend(joined.operators)
