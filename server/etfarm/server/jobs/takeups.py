"""Recovery of jobs after a crash: jobs are counted, resumed one at a time, and set aside after the third crash.

A job itself may crash the server. Therefore, after an unclean end, a new server durably increments the count of each job that was
being handled, right before it resumes the job. Once the job waits or is finished, the count is decremented, so that only the job
that causes the crash keeps its count. A server that survives for a while clears all counts, since its predecessors crashed for
another reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sqlalchemy import case, select, update

from etfarm.server.jobs import model
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.v1.job_pb2 import Job
from etfarm.wire.errors import FarmError

MOST: Final = 3
"""Number of crashes of the server after which a job is set aside."""

CARE_S: Final = 10.0
"""Maximum time for which a resumed job runs alone before the next one is resumed, in seconds."""

STABLE_S: Final = 600.0
"""Time after which a surviving server clears the counts, in seconds."""

IN_SERVER: Final = frozenset({model.QUEUED, model.COMPILING, model.ANALYZING})
"""States in which the server itself works on a cell."""

HANDLED: Final = IN_SERVER | {model.RUNNING}
"""States in which a cell may have crashed the server: the result of a run may arrive at any time."""


class SetAside(FarmError):
    """A job during whose handling the server crashed three times."""

    reason = "SET_ASIDE"

    def __init__(self, job_id: str) -> None:
        super().__init__(
            f"The server died {MOST} times while it was handling job {job_id}, which is now set aside so that other "
            "jobs can continue.",
            "Tell the farm's admin, who finds the cause in the server's log. Submit the job again once the cause is fixed.",
            job=job_id, times=MOST,
        )  # fmt: skip


def is_handled(job: Job) -> bool:
    """Return whether a server was working on a job or could receive one of its results."""
    return any(cell.state in HANDLED for cell in job.cells)


class Takeups:
    """Numbers of recoveries of live jobs, in the database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def counts(self) -> Mapping[str, int]:
        """Return the number of recoveries of each live job by job id."""
        jobs = schema.jobs.c
        query = select(jobs.id, jobs.takeups).where(jobs.finished_at.is_(None))
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return {row.id: row.takeups for row in rows}

    async def count(self, job_id: str) -> None:
        """Increment a job's count durably."""
        await self._add(job_id, 1)

    async def uncount(self, job_id: str) -> None:
        """Decrement a job's count, after the job came to rest."""
        await self._add(job_id, -1)

    async def _add(self, job_id: str, number: int) -> None:
        takeups = schema.jobs.c.takeups + number
        change = update(schema.jobs).where(schema.jobs.c.id == job_id).values(takeups=case((takeups < 0, 0), else_=takeups))
        await self._database.write(lambda connection: connection.execute(change) and None, durable=number > 0)

    async def clear(self) -> None:
        """Reset all counts."""
        change = update(schema.jobs).where(schema.jobs.c.takeups > 0).values(takeups=0)
        await self._database.write(lambda connection: connection.execute(change) and None)


class CleanEnd:
    """A marker file that exists while a server runs, and afterwards only if the server did not end cleanly."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "server.running"
        self._has_begun = False

    def begin(self) -> bool:
        """Record that a server runs; return whether the previous one ended cleanly."""
        was_clean = not self._file.exists()
        self._file.touch(mode=0o600)
        self._has_begun = True
        return was_clean

    def end(self) -> None:
        """Record that the server ends cleanly. A server that could not start leaves the marker of the previous one."""
        if self._has_begun:
            self._file.unlink(missing_ok=True)
