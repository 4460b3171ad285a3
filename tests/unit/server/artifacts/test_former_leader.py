"""A server that has lost the lead deletes nothing from what it shares with the server that leads now."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from etfarm.server.artifacts.file_blobs import FileBlobs
from etfarm.server.artifacts.store import Store
from etfarm.server.state.engine import Database
from etfarm.wire.chunks import artifact_of
from etfarm.wire.errors import error_for
from tests.support.databases import Refusal, new_database
from tests.support.refusals import refuses
from tests.support.stores import Stores

DATA = os.urandom(10_000)
DIGEST = artifact_of(DATA).digest


@dataclass
class Two:
    """Two servers with one database and one place for artifacts."""

    former: Store
    database: Database
    """The former leader's connection to the database."""
    leader: Store

    def take_lead(self) -> None:
        """Let the database refuse what the former leader writes, as its fence does."""
        self.database.guard = Refusal(
            error_for("FENCED", "This server no longer leads the farm, so it changes nothing.", "Try again.")
        )

    async def read(self) -> bytes:
        """Return the artifact's bytes from where they are stored, not from a copy."""
        if not isinstance(self.leader.blobs, FileBlobs):
            self.leader.place(DIGEST).unlink(missing_ok=True)
        return b"".join([chunk.data async for chunk in self.leader.chunks(DIGEST, 0)])


@pytest.fixture
async def two(tmp_path: Path, stores: Stores) -> AsyncIterator[Two]:
    databases = [new_database(tmp_path / "farm.sqlite") for _ in range(2)]
    for database in databases:
        await database.open()
    # Files are in one folder that both servers mount; copies of a bucket's objects are each server's own.
    folders = [tmp_path / ("shared" if stores.location is None else name) for name in ("former", "leader")]
    created = [stores.create(folder, database) for folder, database in zip(folders, databases, strict=True)]
    for store in created:
        await store.open()
    yield Two(created[0], databases[0], created[1])
    for database in databases:
        database.close()


@pytest.mark.remedy("FENCED")
async def test_a_removal_that_the_database_refuses_deletes_nothing(two: Two) -> None:
    await two.former.put(DATA, "ann")
    two.take_lead()
    with refuses("FENCED"):
        await two.former.remove([DIGEST], unused_since_s=two.former.uses.clock() + 1)
    assert await two.leader.absent([DIGEST]) == []
    assert await two.read() == DATA
    await two.leader.remove([DIGEST], unused_since_s=two.leader.uses.clock() + 1)
    assert await two.leader.absent([DIGEST]) == [DIGEST]


async def test_what_is_stored_again_after_the_rows_were_deleted_stays(two: Two) -> None:
    await two.former.put(DATA, "ann")
    assert two.former.blobs.withdraw(DIGEST)
    await two.former.holdings.forget([DIGEST])
    # Here the former leader stands still, and another server takes the lead.
    two.take_lead()
    await two.leader.put(DATA, "ann")
    if isinstance(two.former.blobs, FileBlobs):  # the file that was withdrawn is another one
        await two.former.blobs.delete([DIGEST])
    else:
        with refuses("FENCED"):
            await two.former.blobs.delete([DIGEST])
    assert await two.leader.absent([DIGEST]) == []
    assert await two.read() == DATA
