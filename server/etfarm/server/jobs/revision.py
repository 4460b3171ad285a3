"""Revision of a finished job's reports: a new analysis of the stored files by the current code."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from etfarm.server.compile.cache import CompilationNotFound
from etfarm.server.compile.compiler import Compiler
from etfarm.server.devices.errors import DeviceNotFound
from etfarm.server.jobs import model
from etfarm.server.jobs.cells.analysis import CellAnalysis
from etfarm.server.jobs.cells.cell_run import CellRun
from etfarm.server.jobs.cells.dispatch import Dispatch
from etfarm.server.jobs.cells.numerics import NumericsPrograms
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.jobs.records.log import JobLog
from etfarm.server.reports.analysis_parts import FILE_MISSING, is_of_analysis
from etfarm.server.reports.request import CALLS_DIFFER, LOW_ACCURACY
from etfarm.server.reports.runs import LEFT_OUT, NOT_REPEATED
from etfarm.v1 import agent_pb2, report_pb2
from etfarm.v1.device_pb2 import Device
from etfarm.v1.job_pb2 import Cell, Job
from etfarm.wire.errors import error_for
from etfarm.wire.messages import copy_fields
from etfarm.wire.sqnr import FAR_FROM_QUANTIZED_GRAPH, PART_LOST

_PARTS = (
    "latency",
    "runs",
    "run_spread",
    "interleaved",
    "verdict",
    "profile",
    "operators",
    "trace_times",
    "numerics",
    "numeric_gap",
    "generation",
)
"""Report parts that an analysis computes. Parts that can no longer be computed stay; accuracy is kept per reference."""

_ROWS = {"operators": "profile", "numeric_gap": "numerics"}
"""Lists of rows, with the part that describes them: neither is meaningful without the other."""


class Revision:
    """Repetition of analyses, for one job of a project at a time, since the workers serve others, too."""

    def __init__(
        self,
        journal: Journal,
        joblog: JobLog,
        compiler: Compiler,
        dispatch: Dispatch,
        analysis: CellAnalysis,
        now: Callable[[], datetime],
    ) -> None:
        self._journal = journal
        self._joblog = joblog
        self._compiler = compiler
        self._numerics = NumericsPrograms(compiler)
        self._dispatch = dispatch
        self._analysis = analysis
        self._now = now
        self._turns = defaultdict[str, asyncio.Lock](asyncio.Lock)
        """Locks by project, so that no project waits for another one's thousand reports."""

    async def revise(self, job: Job) -> Sequence[report_pb2.Report]:
        """Replace the job's reports, all at once, by new ones with the same ids; return them in the order of the cells.

        The cells' results follow them.

        Reports of incomplete measurements stay unchanged, as do parts whose files are no longer stored.

        Raises:
            JOB_LIVE: the job has live cells.
            REPORT_NOT_FOUND: the job has no reports.
            EtfarmError: no analysis is possible; nothing is changed.
        """
        if not model.is_terminal(job.state):
            raise error_for("JOB_LIVE", f"Job {job.id} is still live.", "Wait until it is done: `etfarm jobs watch`.", job=job.id)
        async with self._turns[job.project]:
            reports = await self._journal.reports.of_job(job.id)
            if not reports:
                raise error_for("REPORT_NOT_FOUND", f"Job {job.id} has no reports.", job=job.id)
            await self._joblog.flush()
            await self._joblog.resume(job.id)
            cells = {cell.id: cell for cell in job.cells}
            revised = [await self._revise(job, cells[report.cell], report) for report in reports]
            await self._journal.reports.replace(job, revised, at=self._now())
            self._joblog.end(job.id)
        return revised

    async def _revise(self, job: Job, cell: Cell, before: report_pb2.Report) -> report_pb2.Report:
        if not cell.attempts:
            return before
        results = await self._journal.results_of(cell.attempts[-1].id)
        result = results.get(cell.id, agent_pb2.CandidateResult())
        if not result.HasField("runner") or result.HasField("error"):
            return before
        run = CellRun(job, cell, result=result, device=self._device(cell, before))
        try:
            run.compilation = await self._compiler.get(cell.compilation_key)
        except CompilationNotFound:
            return _unchanged(before)
        await self._numerics.recover(run)
        run.analysis = await self._analysis.analyze(run, results)
        at = before.create_time.ToDatetime(UTC)
        run.earlier = await self._journal.reports.find_earlier(job.project, self._analysis.report(run, cell, before.id, at=at))
        report = self._analysis.report(run, cell, before.id, at=at)
        report.create_time.CopyFrom(before.create_time)  # exact to the nanosecond
        keep(before, report)
        return report

    def _device(self, cell: Cell, before: report_pb2.Report) -> Device:
        """Return the device as it was when measured. Facts that the report does not contain are as currently known."""
        device = Device()
        try:
            device.CopyFrom(self._dispatch.device_of(cell))
        except DeviceNotFound:
            device.id = cell.attempts[-1].device_id
        for field, value in before.device.ListFields():
            setattr(device, field.name, value)
        return device


def keep(before: report_pb2.Report, revised: report_pb2.Report) -> None:
    """Copy the parts that `revised` lacks from `before`, with the warnings of their analysis."""
    present = {field.name for field, _ in revised.ListFields()}
    missing = {field.name for field, _ in before.ListFields() if field.name in _PARTS and field.name not in present}
    if _is_placed(before) and not _is_placed(revised):
        missing.add("operators")
    missing |= {_ROWS[name] for name in missing if name in _ROWS}
    if missing & {"profile", "operators"}:
        missing.add("trace_times")  # its rows are those of the profile and the operators
    for name in missing:
        revised.ClearField(name)  # type: ignore[arg-type]
    copy_fields(before, revised, missing)
    if "latency" in missing and "profile" not in missing:
        _keep_trace_verdict(before.profile, revised.profile)
    if before.inputs.tensors and not revised.inputs.tensors and revised.inputs.digest == before.inputs.digest:
        revised.inputs.tensors.extend(before.inputs.tensors)
    compared, before_compared = ({row.reference for row in report.accuracy} for report in (revised, before))
    if _keep_accuracy(before, revised) or missing:
        known = {(warning.code, warning.message) for warning in revised.compile.warnings}
        codes = {
            *((LEFT_OUT, NOT_REPEATED) if "runs" in missing else ()),
            *((FAR_FROM_QUANTIZED_GRAPH,) if report_pb2.REFERENCE_QUANTIZED not in compared else ()),
            *((LOW_ACCURACY, PART_LOST) if report_pb2.REFERENCE_EAGER in before_compared - compared else ()),
            *((CALLS_DIFFER,) if any(warning.code == FILE_MISSING for warning in revised.compile.warnings) else ()),
        }
        old = [warning for warning in before.compile.warnings if is_of_analysis(warning) or warning.code in codes]
        revised.compile.warnings.extend(warning for warning in old if (warning.code, warning.message) not in known)


def _keep_accuracy(before: report_pb2.Report, revised: report_pb2.Report) -> bool:
    """Copy the rows of references that `revised` lacks, keeping their order; return whether there were any."""
    known = {row.reference for row in revised.accuracy}
    kept = [row for row in before.accuracy if row.reference not in known]
    if kept:
        order = {reference: rank for rank, reference in enumerate(dict.fromkeys(row.reference for row in before.accuracy))}
        rows = sorted([*kept, *revised.accuracy], key=lambda row: order.get(row.reference, len(order)))
        revised.ClearField("accuracy")
        revised.accuracy.extend(rows)
    return bool(kept)


def _keep_trace_verdict(before: report_pb2.Profile, revised: report_pb2.Profile) -> None:
    """Copy what compares the traced pass with the timed one, whose samples are no longer stored."""
    if not before.HasField("traced_ratio"):
        return
    revised.traced_ratio = before.traced_ratio
    if before.HasField("event_cost_ns"):
        revised.event_cost_ns = before.event_cost_ns
    revised.verdict.CopyFrom(before.verdict)


def _is_placed(report: report_pb2.Report) -> bool:
    """Return whether operators have modules or source lines, which an analysis without the ETRecord cannot determine."""
    return any(row.HasField("module") or row.HasField("source") for row in report.operators)


def _unchanged(before: report_pb2.Report) -> report_pb2.Report:
    """Return the former report with a warning that it was not revised."""
    message = "The job's compilation is no longer stored: this report stays as it was. Submit the job again for a new one."
    report = report_pb2.Report()
    report.CopyFrom(before)
    if not any(warning.message == message for warning in report.compile.warnings):
        report.compile.warnings.add(code=FILE_MISSING, message=message)
    return report
