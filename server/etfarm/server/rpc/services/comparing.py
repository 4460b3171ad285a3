"""ReportService.Compare: the comparison of two jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from etfarm.server.access.scope import Scope
from etfarm.server.jobs.records.journal import Journal
from etfarm.v1 import comparison_pb2, job_pb2, report_pb2
from etfarm.wire import comparison
from etfarm.wire.comparison import Side
from etfarm.wire.errors import error_for
from etfarm.wire.report import job_json, report_json

MAX_BYTES: Final = 60 << 20
"""Maximum size of a comparison, which must fit into a message of 64 MiB."""


Selected = tuple[job_pb2.Job, Sequence[report_pb2.Report], str | None]


async def compare(
    journal: Journal, request: comparison_pb2.CompareRequest, version: str, scope: Scope
) -> comparison_pb2.CompareResponse:
    """Return the comparison of two jobs.

    Args:
        version: version of this server, for the jobs' JSON.
        scope: the projects that the caller sees.

    Raises:
        JOB_NOT_FOUND, REPORT_NOT_FOUND, NothingToCompare: see ReportService.Compare.
    """
    base = await _select(journal, request.base, version, scope)
    candidate = await _select(journal, request.candidate, version, scope)
    # Hundreds of reports have several hundred thousand operators.
    return await asyncio.to_thread(_answer, base, candidate)


async def _select(journal: Journal, reference: str, version: str, scope: Scope) -> Selected:
    name, choice = comparison.split_choice(reference)
    job = await journal.get(name, scope)
    job.server_version = version
    return job, await _reports(journal, job.id), choice


async def _reports(journal: Journal, job_id: str) -> Sequence[report_pb2.Report]:
    """Return all reports of a job, which are read page by page."""
    of_job: list[report_pb2.Report] = []
    start: int | None = 0
    while start is not None:
        reports, start = await journal.reports.page(job_id, start=start)
        of_job += reports
    return of_job


def _answer(base: Selected, candidate: Selected) -> comparison_pb2.CompareResponse:
    message = comparison.compare(_side(*base), _side(*candidate))
    if (size := message.ByteSize()) > MAX_BYTES:
        raise error_for(
            "COMPARISON_TOO_LARGE",
            f"The comparison must have at most {MAX_BYTES:,} bytes, got {size:,}.",
            "Compare a cell at a time: write JOB#0 and JOB#0.",
            limit=MAX_BYTES,
            got=size,
        )
    return comparison_pb2.CompareResponse(comparison=message)


def _side(job: job_pb2.Job, reports: Sequence[report_pb2.Report], choice: str | None) -> Side:
    return Side([report_json(report) for report in reports], job_json(job), None, choice)
