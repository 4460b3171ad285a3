"""The parts of retention, connected to a server's storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path

from etfarm.server.artifacts.store import Store
from etfarm.server.jobs.records.deletion import JobDeletion
from etfarm.server.retention.clock import RetentionClock
from etfarm.server.retention.collection import ArtifactCollection
from etfarm.server.retention.limits import Limits
from etfarm.server.retention.references import References
from etfarm.server.retention.relief import DiskRelief
from etfarm.server.retention.sweep import Retention
from etfarm.server.state.backup_lock import BackupLock
from etfarm.server.state.engine import Database
from etfarm.server.workers.measurement_lock import MeasurementLock


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
