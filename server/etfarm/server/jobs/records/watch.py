"""Subscriptions to jobs: each receives journaled events in order, and the latest of all other events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from etfarm.v1.job_pb2 import JobEvent, Progress

log = structlog.get_logger()

_MAX_LOG_LINES = 1000
"""Maximum number of log lines queued for a slow watcher; older ones are dropped, but remain available from TailLog."""

_MAX_JOURNALED = 1000
"""Maximum number of changes queued for a slow watcher; older ones are dropped, and `Journal.watch` reads them again."""

_MAX_PROGRESS = 5000
"""Maximum number of phases queued for a slow watcher, since agents choose the names of phases."""


class Subscription:
    """Queued events of one watcher: the newest journaled ones in order, progress by cell and phase, the newest log lines."""

    def __init__(self) -> None:
        self._journaled: deque[JobEvent] = deque(maxlen=_MAX_JOURNALED)
        self._progress: dict[str, JobEvent] = {}
        self._log: deque[JobEvent] = deque(maxlen=_MAX_LOG_LINES)
        self._something = asyncio.Event()

    def put(self, event: JobEvent) -> None:
        """Add an event without waiting."""
        if event.HasField("sequence"):
            self._journaled.append(event)
        elif event.WhichOneof("event") == "progress":
            # Keep phases that ended apart from running ones, since they have durations.
            key = f"{event.progress.cell_id} {event.progress.phase} {event.progress.HasField('duration_ms')}"
            self._progress.pop(key, None)
            self._progress[key] = event
            if len(self._progress) > _MAX_PROGRESS:
                del self._progress[next(iter(self._progress))]
        else:
            self._log.append(event)
        self._something.set()

    async def take(self) -> list[JobEvent]:
        """Wait for events and return all of them, with progress before the change that follows it."""
        await self._something.wait()
        self._something.clear()
        taken = [*self._log, *self._progress.values(), *self._journaled]
        self._log.clear()
        self._progress.clear()
        self._journaled.clear()
        return taken


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
        for subscription in self._subscriptions.get(job_id, ()):
            subscription.put(event)
        for listener in self._listeners:
            try:
                listener(job_id, event)
            except Exception:
                # The event is written; neither its watchers nor the cell may suffer from a faulty counter.
                log.exception("a listener to events failed", job=job_id)

    def latest(self, job_id: str, cell_id: str) -> Progress | None:
        """Return the latest progress of a live cell; None after its last change."""
        event = self._latest.get(job_id, {}).get(cell_id)
        return None if event is None else event.progress

    @contextmanager
    def subscribe(self, job_id: str) -> Iterator[Subscription]:
        """Subscribe to all events from now on, preceded by the latest progress."""
        subscription = Subscription()
        for event in self._latest.get(job_id, {}).values():
            subscription.put(event)
        listeners = self._subscriptions.setdefault(job_id, set())
        listeners.add(subscription)
        try:
            yield subscription
        finally:
            listeners.discard(subscription)
            if not listeners:
                self._subscriptions.pop(job_id, None)
