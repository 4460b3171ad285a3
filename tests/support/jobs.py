"""Jobs as submissions leave them, and their journal."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from etfarm.server.jobs import model
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.jobs.records.requests import Request
from etfarm.v1.job_pb2 import Job

AT = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)


def queued_job(name: str, cells: int = 1, *, at: datetime = AT, owner: str = "ann", cell: Any = None, **more: Any) -> Job:
    """Return a job whose cells, `NAME-0` and so on, wait to be compiled.

    Args:
        cell: further fields of each cell.
        more: further fields of the job.
    """
    job = Job(id=name, owner=owner, **more)
    job.create_time.FromDatetime(at)
    for index in range(cells):
        job.cells.add(id=f"{name}-{index}", job_id=name, index=index, state=model.QUEUED, version=1, **(cell or {}))
    return job


async def submit(journal: Journal, job: Job, request: str = "") -> Job:
    """Write a new job to a journal; return it as it was written."""
    return (await journal.submit(job, Request(request or job.id, b"")))[0]
