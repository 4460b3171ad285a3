"""Reports of jobs in the database."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC
from typing import Final

from sqlalchemy import Connection, func, select, update

from etfarm.server.access.scope import Scope
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.server.state.paging import PAGE_SIZES
from etfarm.v1 import report_pb2
from etfarm.v1.job_pb2 import Cell, Job
from etfarm.wire.errors import Kind, UserError

PAGE_BYTES: Final = 4 << 20
"""Maximum total size of the reports of a page; a single report may exceed it."""


class ReportNotFound(UserError):
    """A report id that does not exist."""

    reason = "REPORT_NOT_FOUND"
    kind = Kind.NOT_FOUND


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
        return await asyncio.to_thread(lambda: [report_pb2.Report.FromString(body) for body in bodies])

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
        return await asyncio.to_thread(lambda: [report_pb2.Report.FromString(body) for body in bodies]), following

    async def get(self, report_id: str, scope: Scope) -> report_pb2.Report:
        """Return a report of a job that the caller sees.

        Raises:
            ReportNotFound: the scope has no report with this id.
        """
        jobs = schema.jobs.c
        of_scope = select(schema.reports.c.body).join(schema.jobs, jobs.id == schema.reports.c.job_id)
        query = of_scope.where(schema.reports.c.id == report_id, scope.clause(jobs.project))
        body = await self._database.read(lambda connection: connection.execute(query).scalar())
        if body is None:
            raise ReportNotFound(
                f"There is no report {report_id!r}.",
                "`etfarm report show JOB --json -` lists the ids of a job's reports.",
                report=report_id,
            )
        return await asyncio.to_thread(report_pb2.Report.FromString, body)

    async def replace(self, job: Job, reports: Sequence[report_pb2.Report]) -> None:
        """Replace a terminal job's reports by newer versions with the same ids, all or none."""
        cells = {cell.id: cell for cell in job.cells}

        def write(connection: Connection) -> None:
            for report in reports:
                row = report_row(cells[report.cell], report)
                connection.execute(update(schema.reports).where(schema.reports.c.id == report.id).values(row))

        await self._database.write(write, durable=True)


def report_row(cell: Cell, report: report_pb2.Report) -> dict[str, object]:
    """Return the database row of a report."""
    return {
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
        "body": report.SerializeToString(),
    }
