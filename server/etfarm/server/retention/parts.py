"""The parts of retention, connected to a server's storage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

import structlog

from etfarm.server.artifacts.room import Room
from etfarm.server.artifacts.store import Store
from etfarm.server.jobs.records.deletion import JobDeletion
from etfarm.server.retention.clock import RetentionClock
from etfarm.server.retention.collection import ArtifactCollection
from etfarm.server.retention.limits import Limits
from etfarm.server.retention.references import References
from etfarm.server.retention.sweep import Retention
from etfarm.server.state.backup_lock import BackupLock, BackupRunning
from etfarm.server.state.engine import Database
from etfarm.server.workers.measurement_lock import MeasurementLock
from etfarm.wire.errors import EtfarmError

log = structlog.get_logger()

BELOW: Final = 1.5
"""Free space below which artifacts are deleted, relative to that below which new work is refused."""
UP_TO: Final = 2.0
"""Free space that the deletion aims at, relative to the same: no more goes than that takes."""
POLL_S: Final = 5.0
"""Interval at which the free space is measured."""
PAUSE_S: Final = 60.0
"""Time until another attempt, if the last one could not free enough."""


class RetentionParts:
    """Deletion of jobs and artifacts, by request and by the server's limits.

    Args:
        data: the server's data folder.
        users: functions that return the digests which live sessions and attempts use.
        limits: what the server keeps.
        measurement_lock: the lock of measurements on the server's machine, beside which nothing is deleted.
        now: returns the current time in UTC.
    """

    def __init__(
        self,
        data: Path,
        store: Store,
        database: Database,
        users: Sequence[Callable[[], Iterable[str]]],
        limits: Limits,
        measurement_lock: MeasurementLock,
        now: Callable[[], datetime],
    ) -> None:
        references = References(database, measurement_lock.work)
        self.deletion = JobDeletion(database)
        self.collection = ArtifactCollection(
            store, database, references, lambda: {digest for user in users for digest in user()}, BackupLock(data)
        )
        self.relief = DiskRelief(store.room, self.collection)
        self.retention = Retention(database, references, self.collection, limits, RetentionClock(now))


class DiskRelief:
    """The task that frees space on the server's disk while it is nearly full.

    Args:
        room: the space on the disk.
        collection: deletes artifacts that nothing refers to, and that nobody has used within the last hour.
    """

    def __init__(self, room: Room, collection: ArtifactCollection, *, poll_s: float = POLL_S, pause_s: float = PAUSE_S) -> None:
        self._room = room
        self._collection = collection
        self._poll_s = poll_s
        self._pause_s = pause_s

    async def tend(self) -> None:
        """Measure the free space, and free some if necessary, until the task is cancelled."""
        while True:
            is_relieved = False
            try:
                is_relieved = await self.relieve()
            except BackupRunning:
                log.warning("the disk is nearly full; artifacts are deleted once the backup has ended")
            except EtfarmError as error:
                log.warning("the disk is nearly full, and no artifacts could be deleted", why=error.message)
            except Exception:
                log.exception("the disk is nearly full, and no artifacts could be deleted")
            await asyncio.sleep(self._poll_s if is_relieved else self._pause_s)

    async def relieve(self) -> bool:
        """Delete artifacts if the disk is nearly full; return whether enough space is free afterwards.

        Raises:
            BackupRunning: a backup reads the store.
        """
        space = self._room.measure()
        if space.free_bytes >= space.work_bytes * BELOW:
            return True
        wanted_bytes = int(space.work_bytes * UP_TO) - space.free_bytes
        done = await self._collection.collect(free_bytes=wanted_bytes)
        space = self._room.measure()
        is_relieved = space.free_bytes >= space.work_bytes * BELOW
        note = log.info if is_relieved else log.warning
        note(
            "the disk is nearly full: deleted artifacts that nothing refers to",
            count=done.count,
            size_bytes=done.size_bytes,
            free_bytes=space.free_bytes,
            work_bytes=space.work_bytes,
        )
        return is_relieved
