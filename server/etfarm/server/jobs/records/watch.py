"""Subscriptions to jobs: each receives journaled events in order, and the latest of all other events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import structlog

from etfarm.server.jobs import model
from etfarm.v1.job_pb2 import Job, JobEvent

log = structlog.get_logger()

_MAX_LOG_LINES = 1000
"""Maximum number of log lines queued for a slow watcher; older ones are dropped, but remain available from TailLog."""

_MAX_JOURNALED = 1000
"""Maximum number of changes queued for a slow watcher; older ones are dropped, and `Journal.watch` reads them again."""

_MAX_PROGRESS = 5000
"""Maximum number of phases queued for a slow watcher, since agents choose the names of phases."""


MAX_BYTES: Final = 4 << 20
"""Maximum size of the events of one kind that are queued for a slow watcher. All watchers of a job share its events."""


class _Newest:
    """The newest events of one kind, of each key only the latest, bounded in number and size."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._events: dict[object, tuple[JobEvent, int]] = {}
        self._bytes = 0

    def put(self, key: object, event: JobEvent, size_bytes: int) -> None:
        """Add an event, and drop the oldest ones beyond the bounds."""
        self._drop(key)
        self._events[key] = event, size_bytes
        self._bytes += size_bytes
        while len(self._events) > self._most or (self._bytes > MAX_BYTES and len(self._events) > 1):
            self._drop(next(iter(self._events)))

    def _drop(self, key: object) -> None:
        if (former := self._events.pop(key, None)) is not None:
            self._bytes -= former[1]

    def take(self) -> list[JobEvent]:
        """Return the events, oldest first, and forget them."""
        taken = [event for event, _ in self._events.values()]
        self._events.clear()
        self._bytes = 0
        return taken


class Subscription:
    """Queued events of one watcher: the newest journaled ones in order, progress by cell and phase, the newest log lines."""

    def __init__(self) -> None:
        self._journaled = _Newest(_MAX_JOURNALED)
        self._progress = _Newest(_MAX_PROGRESS)
        self._log = _Newest(_MAX_LOG_LINES)
        self._something = asyncio.Event()

    def put(self, event: JobEvent, size_bytes: int) -> None:
        """Add an event of a size without waiting."""
        if event.HasField("sequence"):
            self._journaled.put(event.sequence, event, size_bytes)
        elif event.WhichOneof("event") == "progress":
            # Keep phases that ended apart from running ones, since they have durations.
            key = event.progress.cell_id, event.progress.phase, event.progress.HasField("duration_ms")
            self._progress.put(key, event, size_bytes)
        else:
            self._log.put(event.log.number, event, size_bytes)
        self._something.set()

    async def take(self) -> list[JobEvent]:
        """Wait for events and return all of them, with progress before the change that follows it."""
        await self._something.wait()
        self._something.clear()
        return [*self._log.take(), *self._progress.take(), *self._journaled.take()]


class Announcer:
    """Delivery of events to the subscriptions of their job. New subscriptions get the latest progress of each live cell."""

    def __init__(self) -> None:
        self._subscriptions: dict[str, set[Subscription]] = {}
        self._latest: dict[str, dict[str, JobEvent]] = {}
        self._listeners: list[Callable[[str, JobEvent], None]] = []

    def on_event(self, listener: Callable[[str, JobEvent], None]) -> None:
        """Register a function to call with the job's id and each event, which must return at once."""
        self._listeners.append(listener)

    def announce(self, job_id: str, event: JobEvent) -> None:
        """Deliver an event to the subscriptions of the job. Call it only after the journal has written the event."""
        kind = event.WhichOneof("event")
        if kind == "progress":
            self._latest.setdefault(job_id, {})[event.progress.cell_id] = event
        elif kind == "cell":
            self._latest.get(job_id, {}).pop(event.cell.id, None)
        elif kind == "job":
            self._latest.pop(job_id, None)
        if subscriptions := self._subscriptions.get(job_id):
            size_bytes = event.ByteSize()
            for subscription in subscriptions:
                subscription.put(event, size_bytes)
        for listener in self._listeners:
            try:
                listener(job_id, event)
            except Exception:
                # The event is written; neither its watchers nor the cell may suffer from a faulty counter.
                log.exception("a listener to events failed", job=job_id)

    def add_phases(self, job: Job) -> Job:
        """Fill in what the live cells of a job, as the database has it, do or wait for; return the job."""
        latest = self._latest.get(job.id, {})
        for cell in job.cells:
            if cell.state not in model.TERMINAL and (event := latest.get(cell.id)) is not None:
                if not event.progress.HasField("duration_ms"):
                    cell.phase = event.progress.phase
                if cell.state == model.WAITING:
                    cell.waiting_for = event.progress.message
        return job

    @contextmanager
    def subscribe(self, job_id: str) -> Iterator[Subscription]:
        """Subscribe to all events from now on, preceded by the latest progress."""
        subscription = Subscription()
        for event in self._latest.get(job_id, {}).values():
            subscription.put(event, event.ByteSize())
        listeners = self._subscriptions.setdefault(job_id, set())
        listeners.add(subscription)
        try:
            yield subscription
        finally:
            listeners.discard(subscription)
            if not listeners:
                self._subscriptions.pop(job_id, None)
