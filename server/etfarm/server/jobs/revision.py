"""Step 9 again: the reports of a job that is over, worked out from the stored files by today's code."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC
from functools import partial

from etfarm.server.compile.cache import CompilationNotFound
from etfarm.server.compile.compiler import Compiler
from etfarm.server.devices.errors import DeviceNotFound
from etfarm.server.jobs import model
from etfarm.server.jobs.cells.cell_run import Way
from etfarm.server.jobs.cells.execution import Execution
from etfarm.server.jobs.cells.groups import base_of
from etfarm.server.jobs.cells.numerics import NumericsPrograms
from etfarm.server.jobs.records.journal import Journal, ReportNotFound
from etfarm.server.jobs.records.log import JobLog
from etfarm.server.reports.analyst import Analyst
from etfarm.server.reports.assembly import assemble
from etfarm.server.reports.findings import FILE_MISSING, is_of_analysis
from etfarm.server.reports.verdict import Thresholds
from etfarm.v1 import agent_pb2, report_pb2
from etfarm.v1.device_pb2 import Device
from etfarm.v1.job_pb2 import Cell, Job
from etfarm.wire.errors import Kind, UserError

_PARTS = ("latency", "interleaved", "verdict", "profile", "operators", "numerics", "numeric_gap")
"""Of a report: what is worked out, and stays as it was where it cannot be any more; accuracy does by its references."""

_ROWS = {"operators": "profile", "numeric_gap": "numerics"}
"""Rows, and what tells of them: one without the other means nothing."""


class JobLive(UserError):
    """The job has cells on their way, whose reports are still to come."""

    reason = "JOB_LIVE"
    kind = Kind.FAILED_PRECONDITION


class Revision:
    """Works out again what was measured before: one job of a project at a time, since the workers have others' to do."""

    def __init__(
        self,
        journal: Journal,
        joblog: JobLog,
        compiler: Compiler,
        execution: Execution,
        analyst: Analyst,
        *,
        thresholds: Thresholds,
    ) -> None:
        self._journal = journal
        self._joblog = joblog
        self._compiler = compiler
        self._numerics = NumericsPrograms(compiler)
        self._execution = execution
        self._analyst = analyst
        self._thresholds = thresholds
        self._turns = defaultdict[str, asyncio.Lock](asyncio.Lock)
        """By project: none waits for another's thousand reports."""

    async def revise(self, job: Job) -> Sequence[report_pb2.Report]:
        """Writes new reports in place of the job's, with the same ids, all at once; gives them in the order of the cells.

        What was not measured to its end stays as it is, and so does each part whose files are not stored any more.

        Raises:
            JobLive: it is not over.
            ReportNotFound: it has no reports.
            EtfarmError: no analysis can be done; nothing is changed.
        """
        if not model.is_terminal(job.state):
            raise JobLive(f"Job {job.id} is still live.", "Wait until it is done: `etfarm jobs watch`.", job=job.id)
        async with self._turns[job.project]:
            reports = await self._journal.reports(job.id)
            if not reports:
                raise ReportNotFound(f"Job {job.id} has no reports.", job=job.id)
            await self._joblog.flush()
            await self._joblog.resume(job.id)
            cells = {cell.id: cell for cell in job.cells}
            made = [await self._revised(job, cells[report.cell], report) for report in reports]
            await self._journal.replace_reports(job, made)
        return made

    async def _revised(self, job: Job, cell: Cell, before: report_pb2.Report) -> report_pb2.Report:
        if not cell.attempts:
            return before
        results = await self._journal.results_of(cell.attempts[-1].id)
        result = results.get(cell.id, agent_pb2.CandidateResult())
        if not result.HasField("runner") or result.HasField("error"):
            return before
        way = Way(job, cell, result=result, device=self._device(cell, before))
        try:
            way.compilation = await self._compiler.get(cell.compilation_key)
        except CompilationNotFound:
            return _unchanged(before)
        await self._numerics.recover(way)
        way.analysis = await self._analyst.analyze(
            model.candidate_of(job, cell), way.compilation, cell.method,
            self._execution.inputs_of(job, cell, way.compilation), result,
            partial(self._joblog.add, job.id, cell.id, "ANALYSIS"),
            base=base_of(cell.id, results), numerics=way.numerics, fresh=job.spec.no_cache,
            project=job.project,
        )  # fmt: skip
        made = assemble(
            before.id, job, cell, at=before.created_at.ToDatetime(UTC), compilation=way.compilation, device=way.device,
            result=result, analysis=way.analysis, thresholds=self._thresholds, numerics=way.numerics,
            inputs=self._execution.inputs_of(job, cell, way.compilation), warnings=way.warnings,
        )  # fmt: skip
        made.created_at.CopyFrom(before.created_at)  # to the nanosecond
        keep(before, made)
        return made

    def _device(self, cell: Cell, before: report_pb2.Report) -> Device:
        """As it was when it was measured, with what reports do not tell as it is known now."""
        device = Device()
        try:
            device.CopyFrom(self._execution.device_of(cell))
        except DeviceNotFound:
            device.id = cell.attempts[-1].device_id
        for field, value in before.device.ListFields():
            setattr(device, field.name, value)
        return device


def keep(before: report_pb2.Report, made: report_pb2.Report) -> None:
    """Takes over what `made` lacks and `before` has, with the warnings of then."""
    there = {field.name for field, _ in made.ListFields()}
    lost = {field.name for field, _ in before.ListFields() if field.name in _PARTS and field.name not in there}
    if _is_placed(before) and not _is_placed(made):
        lost.add("operators")
    lost |= {_ROWS[name] for name in lost if name in _ROWS}
    for name in lost:
        made.ClearField(name)  # type: ignore[arg-type]
        if name in _ROWS:
            getattr(made, name).extend(getattr(before, name))
        elif before.HasField(name):  # type: ignore[arg-type]
            getattr(made, name).CopyFrom(getattr(before, name))
    if before.inputs.tensors and not made.inputs.tensors and made.inputs.digest == before.inputs.digest:
        made.inputs.tensors.extend(before.inputs.tensors)
    if _keep_accuracy(before, made) or lost:
        known = {(warning.code, warning.message) for warning in made.compile.warnings}
        old = [warning for warning in before.compile.warnings if is_of_analysis(warning)]
        made.compile.warnings.extend(warning for warning in old if (warning.code, warning.message) not in known)


def _keep_accuracy(before: report_pb2.Report, made: report_pb2.Report) -> bool:
    """Takes over the rows of references that `made` has none of, in the order of then; whether there were any."""
    known = {row.reference for row in made.accuracy}
    kept = [row for row in before.accuracy if row.reference not in known]
    if kept:
        order = {reference: place for place, reference in enumerate(dict.fromkeys(row.reference for row in before.accuracy))}
        rows = sorted([*kept, *made.accuracy], key=lambda row: order.get(row.reference, len(order)))
        made.ClearField("accuracy")
        made.accuracy.extend(rows)
    return bool(kept)


def _is_placed(report: report_pb2.Report) -> bool:
    """Whether operators have modules or source lines, which an analysis without the ETRecord cannot tell."""
    return any(row.HasField("module") or row.HasField("source") for row in report.operators)


def _unchanged(before: report_pb2.Report) -> report_pb2.Report:
    """The report as it was, with a warning that it is no newer."""
    message = "The job's compilation is no longer stored: this report stays as it was. Submit the job again for a new one."
    report = report_pb2.Report()
    report.CopyFrom(before)
    if not any(warning.message == message for warning in report.compile.warnings):
        report.compile.warnings.add(code=FILE_MISSING, message=message)
    return report
