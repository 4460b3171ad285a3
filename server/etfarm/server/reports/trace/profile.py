"""The report's profile and operator rows of a traced pass, from those of its files that can be read.

The data flow between rows comes from the edge graph of the ETRecord. Operators without a row, such as a relu that a backend fused
into a convolution or a view without cost, forward their inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final

import numpy as np

from etfarm.server.graphs.origins import Operator
from etfarm.server.reports.request import AnalyzeRequest
from etfarm.server.reports.trace import attribution, etdump, graph, join, provenance
from etfarm.server.reports.trace.graph import base_name
from etfarm.v1 import report_pb2

Warn = Callable[[str, str], None]
"""Called with a code and a sentence."""

SaveTimes = Callable[[Sequence[Sequence[int]]], None]
"""Called with the traced times of the method, then of each operator; the last call counts."""

_NO_LINES = "The rows have no modules and no source lines."
_NO_ROWS = "There are no operators."
MOST_INPUTS: Final = 64
"""Maximum number of rows that one row or value is traced back to."""


def fill(report: report_pb2.Report, request: AnalyzeRequest, warn: Warn, save_times: SaveTimes) -> None:
    """Set `profile` and `operators`, and save their times; the report has the latency and the runs, if any were timed.

    A file that is missing, damaged or does not match costs the facts that only it provides, and adds one warning: the trace
    provides all rows, the ETRecord modules and lines, the program names and backends. The runner's own times of the pass are
    always reported.

    Raises:
        BAD_TRACE: the trace cannot be read; `profile` is set nevertheless.
    """
    if request.traced_ns:
        _fill_times(report.profile, request)
        save_times([request.traced_ns])
    trace = _trace(request, warn)
    if trace is None:
        return
    program = _program(request, warn)
    misfit = provenance.misfit_of_trace(trace, program)
    if misfit is not None:
        warn("ANALYSIS_TRACE_OF_ANOTHER_PROGRAM", f"The trace is of another program: {misfit}. {_NO_ROWS}")
        return
    misfit = provenance.misfit_of_run(trace, request.traced_ns)
    if misfit is not None:
        warn("ANALYSIS_TRACE_OF_ANOTHER_RUN", f"The trace is of another run: {misfit}. {_NO_ROWS}")
        return
    record = _record(request, program, warn)
    if trace.left_out:
        warn(
            "ANALYSIS_ITERATIONS_DIFFER",
            f"{trace.left_out} traced iterations executed other instructions than the other {trace.method_ns.size} "
            "and are left out of the profile.",
        )
    origins = attribution.attribute(trace, program, record)
    if origins.unaligned:
        (_, instruction), why = next(iter(origins.unaligned.items()))
        hint = (
            " None of them fits, so the trace may be of another program."
            if len(origins.unaligned) == origins.delegates > 1
            else ""
        )
        warn(
            "ANALYSIS_KERNELS_UNALIGNED",
            f"The kernels of {len(origins.unaligned)} of {origins.delegates} XNNPACK delegates have no source lines. "
            f"Instruction {instruction}: {why}{hint}",
        )
    if origins.partial:
        (_, instruction), why = next(iter(origins.partial.items()))
        warn(
            "ANALYSIS_KERNELS_UNALIGNED",
            f"Some kernels of {len(origins.partial)} of {origins.delegates} XNNPACK delegates have no source lines. "
            f"Instruction {instruction}: {why}",
        )
    joined = join.join(
        trace, record, program, request.method, origins.kernels, {**origins.unaligned, **origins.partial}, origins.instructions
    )
    report.profile.CopyFrom(joined.profile)
    # The process of the last run traced, and processes of one program differ.
    _fill_cost(report.profile, report.runs[-1] if report.runs else report.latency)
    report.operators.extend(joined.operators)
    connect(report.operators, record.operators)
    save_times(joined.times_ns)


def _fill_cost(profile: report_pb2.Profile, timed: report_pb2.Run | report_pb2.Latency) -> None:
    """Set what tracing costs: the medians of both passes are compared, since neither depends on single slow iterations."""
    if not timed.p50_ns:
        return
    profile.traced_ratio = profile.p50_ns / timed.p50_ns
    cost_ns = profile.p50_ns - timed.p50_ns
    intervals = [ends for ends in (profile.mean_ci95_ns, timed.p50_ci95_ns) if ends]
    noise_ns = math.hypot(*((high - low) / 2 for low, high in intervals))
    if profile.events and len(intervals) == 2 and cost_ns > noise_ns:
        profile.event_cost_ns = cost_ns / profile.events


def _fill_times(profile: report_pb2.Profile, request: AnalyzeRequest) -> None:
    profile.iterations = len(request.traced_ns)
    profile.p50_ns = float(np.median(request.traced_ns))


def _trace(request: AnalyzeRequest, warn: Warn) -> etdump.Trace | None:
    if request.etdump is None or not request.etdump.exists():
        warn("ANALYSIS_TRACE_MISSING", f"The run was traced, but its trace is missing. {_NO_ROWS}")
        return None
    return etdump.read(request.etdump.read_bytes())


def _program(request: AnalyzeRequest, warn: Warn) -> dict[tuple[int, int], graph.Instruction]:
    if request.pte is None:
        return {}
    try:
        return graph.read_program(request.pte, request.method)
    except graph.BadProgram as error:
        warn("ANALYSIS_PROGRAM_UNREADABLE", f"{error} The rows do not name their backends.")
        return {}


def _record(request: AnalyzeRequest, program: provenance.Program, warn: Warn) -> graph.Record:
    if request.etrecord is None:
        return graph.Record()
    try:
        record = graph.read_record(request.etrecord, request.method)
    except graph.BadRecord as error:
        warn("ANALYSIS_ETRECORD_UNREADABLE", f"{error} {_NO_LINES}")
        return graph.Record()
    if not record.handles or not record.nodes:
        warn(
            "ANALYSIS_ETRECORD_WITHOUT_HANDLES",
            f"The ETRecord has no debug handles of the method {request.method!r}. {_NO_LINES}",
        )
        return graph.Record()
    misfit = provenance.misfit_of_record(record, program)
    if misfit is not None:
        warn("ANALYSIS_ETRECORD_OF_ANOTHER_EXPORT", f"The ETRecord is of another export: {misfit}. {_NO_LINES}")
        return graph.Record()
    return record


def connect(rows: Sequence[report_pb2.OperatorRow], operators: Sequence[Operator]) -> None:
    """Set `input_rows` of each row.

    Args:
        rows: in the order of execution, with their debug handles.
        operators: the operators of the edge graph, in the graph's order.
    """
    candidates = _by_handle(rows)
    producers: dict[Hashable, frozenset[int]] = {}
    """By value: the rows that it comes from."""
    inputs: dict[int, set[int]] = {}
    for operator in operators:
        sources = _first(index for value in operator.takes for index in producers.get(value, ()))
        owners = _owners(operator, candidates)
        # An operator that became several kernels passes its inputs through all of them.
        for row in owners:
            inputs.setdefault(row.index, set()).update(source for source in sources if source < row.index)
            sources = frozenset((row.index,))
        producers.update(dict.fromkeys(operator.gives, sources))
    for row in rows:
        row.input_rows.extend(sorted(inputs.get(row.index, ()))[:MOST_INPUTS])


def _first(indexes: Iterable[int]) -> frozenset[int]:
    return frozenset(sorted(set(indexes))[:MOST_INPUTS])


def _by_handle(rows: Sequence[report_pb2.OperatorRow]) -> dict[int, list[report_pb2.OperatorRow]]:
    """Return the rows of each debug handle, in order; a delegate's own row only if no kernel of it has handles."""
    attributed = {row.parent for row in rows if row.HasField("parent") and row.debug_handles}
    by_handle: dict[int, list[report_pb2.OperatorRow]] = {}
    for row in rows:
        if row.kind != report_pb2.OPERATOR_KIND_REST and row.index not in attributed:
            for handle in row.debug_handles:
                by_handle.setdefault(handle, []).append(row)
    return by_handle


def _owners(operator: Operator, candidates: dict[int, list[report_pb2.OperatorRow]]) -> list[report_pb2.OperatorRow]:
    """Return the rows that execute an operator, in order: those of its handle that have its type."""
    rows = {row.index: row for handle in operator.handles for row in candidates.get(handle, ())}
    return [row for _, row in sorted(rows.items()) if any(base_name(name) == operator.name for name in row.op_types)]
