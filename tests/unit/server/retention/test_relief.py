"""Relief of a disk that is nearly full, on a store whose disk has a size that the test chooses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from etfarm.server.artifacts.errors import DiskFull
from etfarm.server.artifacts.room import Room
from etfarm.server.artifacts.store import Store
from etfarm.server.retention.collection import ArtifactCollection
from etfarm.server.retention.parts import DiskRelief
from etfarm.server.retention.references import References
from etfarm.server.state.backup_lock import BackupLock
from etfarm.server.state.engine import Database
from etfarm.v1.common_pb2 import Artifact
from tests.support.jobs import JournalWorld, queued_job, submit, with_programs

KIB = 1024
WORK_BYTES = 100 * KIB
"""Free space below which work is refused; relief begins below 150 KiB and aims at 200 KiB."""


@dataclass
class Disk:
    """A store on a disk of some size."""

    folder: Path
    database: Database
    size_bytes: int = 1000 * KIB
    others_bytes: int = 0
    """What others have written to the disk."""
    now_s: float = 1_000_000_000.0

    def __post_init__(self) -> None:
        self.store = Store(self.folder / "artifacts", self.database, clock=lambda: self.now_s)
        self.store.room = self.room = Room(self.folder, 10 * KIB, WORK_BYTES, free=lambda _: self.free_bytes)
        references = References(self.database, self.gate)
        self.backups = BackupLock(self.folder)
        self.collection = ArtifactCollection(self.store, self.database, references, set, self.backups, lease_s=0.0)
        self.relief = DiskRelief(self.room, self.collection, poll_s=0.01, pause_s=0.01)

    @asynccontextmanager
    async def gate(self) -> AsyncIterator[None]:
        yield

    @property
    def free_bytes(self) -> int:
        used = sum(path.stat().st_size for path in self.folder.glob("artifacts/*/**/*") if path.is_file())
        return self.size_bytes - self.others_bytes - used

    async def put(self, number: int, size_bytes: int = 100 * KIB) -> Artifact:
        artifact = await self.store.put(number.to_bytes(1, "big") * size_bytes, "ann")
        self.now_s += 3600
        return artifact

    async def count(self, *artifacts: Artifact) -> int:
        """Return how many of the artifacts are stored."""
        return len(await self.store.sizes([artifact.digest for artifact in artifacts], for_now=True))


@pytest.fixture
async def disk(tmp_path: Path, database: Database) -> AsyncIterator[Disk]:
    created = Disk(tmp_path, database)
    # `stored_at` is of the real clock, before which nothing may have been used.
    created.now_s = datetime.now(UTC).timestamp() + 3600
    yield created
    created.store.close()


async def test_a_disk_with_space_is_left_alone(disk: Disk) -> None:
    stored = [await disk.put(number) for number in range(8)]
    assert disk.free_bytes == 200 * KIB
    assert await disk.relief.relieve()
    assert await disk.count(*stored) == len(stored)


async def test_only_as_much_goes_as_new_work_needs_and_nothing_that_a_job_names(disk: Disk) -> None:
    stored = [await disk.put(number) for number in range(8)]
    named, oldest, next_oldest, *others = stored
    await submit(JournalWorld(disk.database).journal, with_programs(queued_job("job"), named))
    disk.others_bytes = 90 * KIB
    assert disk.free_bytes == 110 * KIB
    assert await disk.relief.relieve()
    assert await disk.count(oldest) == 0
    assert await disk.count(named, next_oldest, *others) == 2 + len(others)
    assert disk.free_bytes == 210 * KIB


async def test_new_work_is_accepted_again_by_itself(disk: Disk) -> None:
    for number in range(9):
        await disk.put(number)
    disk.others_bytes = 50 * KIB
    with pytest.raises(DiskFull):
        disk.room.require_work()
    relieving = asyncio.create_task(disk.relief.tend())
    async with asyncio.timeout(30):
        await disk.store.wait_for_space(lambda why: None)
    disk.room.require_work()
    relieving.cancel()
    await asyncio.gather(relieving, return_exceptions=True)


async def test_a_disk_that_others_fill_is_relieved_as_far_as_possible(disk: Disk) -> None:
    stored = [await disk.put(number) for number in range(2)]
    disk.others_bytes = 780 * KIB
    assert disk.free_bytes == 20 * KIB
    assert await disk.relief.relieve()
    assert disk.free_bytes == 220 * KIB
    disk.others_bytes += 200 * KIB
    assert not await disk.relief.relieve()
    assert await disk.count(*stored) == 0
