"""Watches of all jobs of a scope: a snapshot of the live ones, then the latest state of each job and cell that has changed."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

from sqlalchemy import select

from etfarm.server.access.scope import DEFAULT_PROJECT, Scope
from etfarm.server.jobs import model
from etfarm.server.jobs.records.listing import list_job, listed_job
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.v1.job_pb2 import Job, JobChange, JobEvent, Progress

MAX_CHANGES: Final = 5_000
MAX_BYTES: Final = 4 << 20
"""Maximum number and size of the changes that a watcher has not read; beyond them, it gets a new snapshot instead."""
WAIT: Final = "WAIT_FOR_"
"""What the phases begin with in which a cell waits."""


class _Origin(NamedTuple):
    """Who may see a live job."""

    project: str
    owner: str


class JobWatcher:
    """The unread changes of one watcher: of each job and cell only the latest. Watchers share the messages.

    Args:
        scope: the projects that the watcher sees.
        owner: the owner whose jobs it wants; empty for all.
    """

    def __init__(self, scope: Scope, owner: str) -> None:
        self._scope = scope
        self._owner = owner
        self._changes: OrderedDict[str, tuple[JobChange, int]] = OrderedDict()
        """Changes with their sizes."""
        self._bytes = 0
        self._is_behind = False
        self._something = asyncio.Event()

    @property
    def size_bytes(self) -> int:
        """The size of the changes that were not read."""
        return self._bytes

    def wants(self, origin: _Origin) -> bool:
        """Return whether the watcher sees a job."""
        return self._scope.allows(origin.project) and self._owner in ("", origin.owner)

    def put(self, key: str, change: JobChange, size_bytes: int) -> None:
        """Add a change of a size, which replaces earlier ones with the same key."""
        if (former := self._changes.pop(key, None)) is not None:
            self._bytes -= former[1]
        self._changes[key] = change, size_bytes
        self._bytes += size_bytes
        if len(self._changes) > MAX_CHANGES or self._bytes > MAX_BYTES:
            self._changes.clear()
            self._bytes, self._is_behind = 0, True
        self._something.set()

    async def take(self) -> Sequence[JobChange] | None:
        """Wait for changes and return them; None if some were dropped, so that a new snapshot is needed."""
        await self._something.wait()
        if self._is_behind:
            self._is_behind = False
            if not self._changes:
                self._something.clear()
            return None
        self._something.clear()
        taken = [change for change, _ in self._changes.values()]
        self._changes.clear()
        self._bytes = 0
        return taken


class FarmWatch:
    """The watchers of all jobs."""

    def __init__(self, database: Database, announcer: Announcer) -> None:
        self._database = database
        self._watchers: set[JobWatcher] = set()
        self._origins: dict[str, _Origin] = {}
        """Of live jobs, by id."""
        self._knows_earlier = False
        self._waiting: set[str] = set()
        """Ids of the cells whose last phase was a wait."""
        self._announcer = announcer
        announcer.on_event(self._note)

    async def changes(self, scope: Scope, owner: str = "") -> AsyncGenerator[JobChange]:
        """Yield the live jobs of a scope, and then the changes until the caller leaves.

        Args:
            owner: only jobs of this principal; all when empty.
        """
        watcher = JobWatcher(scope, owner)
        self._watchers.add(watcher)
        try:
            await self._load_earlier()
            while True:
                yield JobChange(snapshot_begins=True)
                for job_id in [job_id for job_id, origin in self._origins.items() if watcher.wants(origin)]:
                    job = await self._database.read(partial(listed_job, job_id=job_id))
                    if job is None or model.is_terminal(job.state):
                        # It ended while the live jobs were read.
                        self._origins.pop(job_id, None)
                    if job is not None:
                        yield JobChange(job_id=job_id, job=self._announcer.add_phases(job), job_state=job.state)
                yield JobChange(snapshot_complete=True)
                while (changes := await watcher.take()) is not None:
                    for change in changes:
                        yield change
        finally:
            self._watchers.discard(watcher)

    def add(self, job: Job) -> None:
        """Pass a job that was just submitted, with its cells, to the watchers that may see it."""
        origin = self._origins[job.id] = _Origin(job.project or DEFAULT_PROJECT, job.owner)
        if watchers := self._watchers_of(origin):
            _deliver(watchers, job.id, JobChange(job_id=job.id, job=list_job(job), job_state=job.state))

    def _note(self, job_id: str, event: JobEvent) -> None:
        """Pass a change of a cell, its first wait or work after another, or the end of a job to who may see the job."""
        kind = event.WhichOneof("event")
        if kind == "progress":
            self._note_phase(job_id, event.progress)
            return
        if kind == "job" and model.is_terminal(event.job_state):
            self._origins.pop(job_id, None)
            origin = _Origin(event.job.project or DEFAULT_PROJECT, event.job.owner)
            if watchers := self._watchers_of(origin):
                _deliver(watchers, job_id, JobChange(job_id=job_id, job=event.job, job_state=event.job_state))
        elif kind == "cell":
            self._waiting.discard(event.cell.id)
            self._pass(job_id, event.cell.id, JobChange(job_id=job_id, cell=event.cell, job_state=event.job_state))

    def _note_phase(self, job_id: str, progress: Progress) -> None:
        is_wait = progress.phase.startswith(WAIT) and not progress.HasField("duration_ms")
        if is_wait == (progress.cell_id in self._waiting):
            return
        (self._waiting.add if is_wait else self._waiting.discard)(progress.cell_id)
        self._pass(job_id, f"phase of {progress.cell_id}", JobChange(job_id=job_id, progress=progress))

    def _pass(self, job_id: str, key: str, change: JobChange) -> None:
        """Pass a change of a live job to the watchers that may see it."""
        if (known := self._origins.get(job_id)) is not None and (watchers := self._watchers_of(known)):
            _deliver(watchers, key, change)

    def _watchers_of(self, origin: _Origin) -> list[JobWatcher]:
        return [watcher for watcher in self._watchers if watcher.wants(origin)]

    async def _load_earlier(self) -> None:
        """Learn the live jobs that an earlier server accepted."""
        if self._knows_earlier:
            return
        jobs = schema.jobs.c
        query = select(jobs.id, jobs.project, jobs.owner).where(jobs.finished_at.is_(None)).order_by(jobs.number)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        earlier = {row.id: _Origin(row.project, row.owner) for row in rows}
        self._knows_earlier = True
        self._origins = {**earlier, **self._origins}


def _deliver(watchers: Iterable[JobWatcher], key: str, change: JobChange) -> None:
    # Determined once: it takes as long as serializing the message.
    size_bytes = change.ByteSize()
    for watcher in watchers:
        watcher.put(key, change, size_bytes)
