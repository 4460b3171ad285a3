"""Reports of jobs in the database."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import Connection, func, select, update

from etfarm.server.access.scope import Scope
from etfarm.server.jobs import model
from etfarm.server.reports.latency.between_runs import MAX_HISTORY, Earlier
from etfarm.server.reports.runs import valid_runs
from etfarm.server.state import schema
from etfarm.server.state.bodies import seal, unseal
from etfarm.server.state.engine import Database
from etfarm.server.state.paging import PAGE_SIZES
from etfarm.v1 import report_pb2
from etfarm.v1.job_pb2 import Cell, Job
from etfarm.wire import digest as digests
from etfarm.wire.errors import error_for

_MAX_SIMILAR: Final = 500
"""Maximum number of reports of other programs that a spread is pooled over, the newest ones."""

PAGE_BYTES: Final = 4 << 20
"""Maximum total size of the reports of a page; a single report may exceed it."""


class ReportRecords:
    """Database access to reports."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def of_job(self, job_id: str) -> Sequence[report_pb2.Report]:
        """Return the reports of a job in the order of its cells."""
        query = (
            select(schema.reports.c.body)
            .join(schema.cells, schema.cells.c.id == schema.reports.c.cell_id)
            .where(schema.reports.c.job_id == job_id)
            .order_by(schema.cells.c.index)
        )
        bodies = await self._database.read(lambda connection: connection.execute(query).scalars().all())
        return await asyncio.to_thread(lambda: [_report(body, job_id) for body in bodies])

    async def page(
        self, job_id: str, *, start: int, size: int = PAGE_SIZES[1], most_bytes: int = PAGE_BYTES, cell_id: str = ""
    ) -> tuple[Sequence[report_pb2.Report], int | None]:
        """Return a page of a job's reports, beginning with the cell of index `start`, and the start of the next page.

        Args:
            size: maximum number of reports.
            most_bytes: maximum total size of the serialized reports; a single report may exceed it.
            cell_id: id of the only cell to return the report of; empty for all cells.
        """
        cells, reports = schema.cells.c, schema.reports.c
        terms = [reports.job_id == job_id, cells.index >= start, *([reports.cell_id == cell_id] if cell_id else [])]
        joined = schema.reports.join(schema.cells, cells.id == reports.cell_id)
        sizes = select(reports.id, cells.index.label("place"), func.length(reports.body).label("size")).select_from(joined)
        query = sizes.where(*terms).order_by(cells.index).limit(size + 1)

        def read(connection: Connection) -> tuple[Sequence[bytes], int | None]:
            bodies: list[bytes] = []
            bytes_left = most_bytes
            for row in connection.execute(query).all():
                if bodies and (len(bodies) == size or row.size > bytes_left):
                    return bodies, row.place
                bytes_left -= row.size
                bodies.append(connection.execute(select(reports.body).where(reports.id == row.id)).scalar_one())
            return bodies, None

        bodies, following = await self._database.read(read)
        return await asyncio.to_thread(lambda: [_report(body, job_id) for body in bodies]), following

    async def get(self, report_id: str, scope: Scope) -> report_pb2.Report:
        """Return a report of a job that the caller sees.

        Raises:
            REPORT_NOT_FOUND: the scope has no report with this id.
        """
        jobs = schema.jobs.c
        of_scope = select(schema.reports.c.body).join(schema.jobs, jobs.id == schema.reports.c.job_id)
        query = of_scope.where(schema.reports.c.id == report_id, scope.clause(jobs.project))
        body = await self._database.read(lambda connection: connection.execute(query).scalar())
        if body is None:
            raise error_for(
                "REPORT_NOT_FOUND",
                f"There is no report {report_id!r}.",
                "`etfarm report show JOB --json -` lists the ids of a job's reports.",
                report=report_id,
            )
        return await asyncio.to_thread(report_pb2.Report.FromString, body)

    async def find_earlier(self, project: str, report: report_pb2.Report) -> Earlier:
        """Return the medians of valid reports before `report`, those of its project only: others' times are none of its business.

        Its history are reports with equally many valid runs; similar programs count with single runs only.
        Reports of releases without runs do not count, since their execution was not recorded.
        """
        execution = execution_of(report)
        if not execution:
            return Earlier()
        reports, jobs = schema.reports.c, schema.jobs.c
        before = reports.created_at < report.create_time.ToDatetime(UTC)
        of_project = select(reports.execution, reports.p50_ns).join(schema.jobs, jobs.id == reports.job_id)
        of_project = of_project.where(jobs.project == project, before).order_by(reports.created_at.desc())
        same = of_project.where(reports.execution == execution).limit(MAX_HISTORY)
        decade = 10.0 ** math.floor(math.log10(report.latency.p50_ns))
        similar = of_project.where(
            reports.device_kind == device_kind_of(report), reports.execution != execution,
            reports.p50_ns >= decade, reports.p50_ns < 10 * decade,
        ).limit(_MAX_SIMILAR)  # fmt: skip

        def read(connection: Connection) -> Earlier:
            groups: dict[str, list[float]] = {}
            for row in connection.execute(similar):
                groups.setdefault(row.execution, []).append(row.p50_ns)
            history = tuple(row.p50_ns for row in connection.execute(same))
            return Earlier(history, tuple(map(tuple, groups.values())))

        return await self._database.read(read)

    async def replace(self, job: Job, reports: Sequence[report_pb2.Report], *, at: datetime) -> None:
        """Replace a terminal job's reports by newer versions with the same ids, all or none, and the results of their cells.

        Args:
            at: the time of the change.
        """
        cells = {cell.id: cell for cell in job.cells}

        def write(connection: Connection) -> None:
            for report in reports:
                row = report_row(cells[report.cell], report)
                connection.execute(update(schema.reports).where(schema.reports.c.id == report.id).values(row))
                _update_cell(connection, report, at)

        await self._database.write(write, durable=True)


def _update_cell(connection: Connection, report: report_pb2.Report, at: datetime) -> None:
    """Write a new version of the report's cell if the cell's result differs from the report's."""
    stored = schema.cells.c.id == report.cell
    # As stored: an analysis that ended since the job was read may have changed it.
    row = connection.execute(select(schema.cells.c.body, schema.cells.c.job_id).where(stored)).one_or_none()
    if row is None:
        return  # the job was deleted in the meantime
    before = unseal(Cell, row.body, "a cell", row.job_id)
    after = Cell()
    after.CopyFrom(before)
    model.copy_result(report, after)
    if after != before:
        after = model.amend(after, at=at)
        values = {"version": after.version, "body": seal(after)}
        connection.execute(update(schema.cells).where(stored).values(values))


def _report(body: bytes, job_id: str) -> report_pb2.Report:
    return unseal(report_pb2.Report, body, "a report", job_id)


def execution_of(report: report_pb2.Report) -> str:
    """Return a digest of what determines a report's latency, apart from chance; empty if the report is no evidence for it.

    That is the program with its method, inputs, threads and cores, the runner, and the device. The number of valid runs belongs
    to it, since the median over several runs varies less than that of one.
    """
    program = report.compile.compilation.program.digest
    if (
        report.verdict.status != report_pb2.VERDICT_STATUS_VALID
        or not report.runs
        or not program
        or not report.latency.p50_ns > 0
    ):
        return ""
    runner = report.runner
    return digests.of_value(
        {
            "schema": "etfarm.execution/1", "program": program, "method": report.method, "inputs": report.inputs.digest,
            "threads": report.threads, "device": report.device.id, "runs": len(valid_runs(report)),
            "runner": [runner.kind, runner.executorch, runner.bundle_digest, runner.cores],
        }
    )  # fmt: skip


def device_kind_of(report: report_pb2.Report) -> str:
    """Return what devices of one kind have in common."""
    return f"{report.device.arch} {report.device.soc} {report.device.cores}"


def report_row(cell: Cell, report: report_pb2.Report) -> dict[str, object]:
    """Return the database row of a report."""
    execution = execution_of(report)
    # The spread that other programs assume is that of single runs.
    is_single = bool(execution) and len(valid_runs(report)) == 1
    return {
        "execution": execution,
        "device_kind": device_kind_of(report) if is_single else "",
        "id": report.id,
        "job_id": cell.job_id,
        "cell_id": cell.id,
        "model_name": report.model.name,
        "model_digest": report.model.digest,
        "recipe": report.recipe if report.HasField("recipe") else None,
        "method": report.method if report.HasField("method") else None,
        "threads": report.threads if report.HasField("threads") else None,
        "recipe_digest": report.recipe_digest,
        "device_id": report.device.id,
        "p50_ns": report.latency.p50_ns if report.latency.HasField("p50_ns") else None,
        "created_at": report.create_time.ToDatetime(UTC),
        "body": seal(report),
    }
