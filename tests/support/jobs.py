"""Jobs as submissions leave them, and their journal."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from etfarm.server.jobs import model
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.jobs.records.requests import Request
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.state.engine import Database
from etfarm.v1.common_pb2 import Artifact
from etfarm.v1.job_pb2 import Candidate, Cell, Job, MethodSource, Model
from etfarm.v1.report_pb2 import Report

AT = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)


def queued_job(job_id: str, cells: int = 1, *, at: datetime = AT, owner: str = "ann", cell: Any = None, **more: Any) -> Job:
    """Return a job whose cells, `ID-0` and so on, wait to be compiled.

    Args:
        cell: further fields of each cell.
        more: further fields of the job.
    """
    job = Job(id=job_id, owner=owner, **more)
    job.create_time.FromDatetime(at)
    for index in range(cells):
        job.cells.add(id=f"{job_id}-{index}", job_id=job_id, index=index, state=model.QUEUED, version=1, **(cell or {}))
    return job


async def submit(journal: Journal, job: Job, request: str = "") -> Job:
    """Write a new job to a journal; return it as it was written."""
    return (await journal.submit(job, Request(request or job.id, b"")))[0]


def with_programs(job: Job, *programs: Artifact) -> Job:
    """Add candidates with exported programs to a job."""
    for program in programs:
        source = Model(name="m", methods={"forward": MethodSource(exported_program=program)})
        job.spec.candidates.append(Candidate(name="m", model=source))
    return job


class JournalWorld:
    """A journal on an open database."""

    def __init__(self, database: Database, now: Callable[[], datetime] = lambda: AT, **more: Any) -> None:
        self.database = database
        self.announcer = Announcer()
        self.journal = Journal(database, self.announcer, now, **more)

    async def submit(self, job_id: str = "job00000", cells: int = 1, *, request: str = "", **more: Any) -> Job:
        """Write a new job."""
        return await submit(self.journal, queued_job(job_id, cells, **more), request)

    async def step(self, cell: Cell, *states: int, report: Report | None = None) -> Cell:
        """Bring a cell through states; a report comes with the last one."""
        for state in states:
            after = model.advance(cell, state, at=AT)  # type: ignore[arg-type]
            cell = await self.journal.change(after, report=report if state in model.TERMINAL else None)
        return cell
