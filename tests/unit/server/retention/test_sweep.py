"""A sweep deletes what the limits no longer keep, oldest first, and a dry run counts the same without deleting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import select, text

from etfarm.server.access.audit import AuditLog, Entry
from etfarm.server.access.scope import Scope
from etfarm.server.artifacts.store import Store
from etfarm.server.compile.cache import Cache
from etfarm.server.jobs import model
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.jobs.records.tags import Tags
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.retention.clock import ClockImplausible, RetentionClock
from etfarm.server.retention.collection import ArtifactCollection
from etfarm.server.retention.limits import Limits
from etfarm.server.retention.occupancy import LINE_BYTES
from etfarm.server.retention.references import References
from etfarm.server.retention.sweep import Retention, Swept
from etfarm.server.state import schema
from etfarm.server.state.backup_lock import BackupLock
from etfarm.server.state.engine import Database
from etfarm.server.workers.measurement_lock import MeasurementLock
from etfarm.v1.compile_pb2 import Compilation
from tests.support.jobs import queued_job, submit

pytestmark = pytest.mark.usefixtures("each_database")

START = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)
DAY = timedelta(days=1)


class World:
    """A server's records, with a clock that the test moves."""

    def __init__(self, folder: Path, database: Database) -> None:
        self.now = START
        self.database = database
        self.store = Store(folder / "artifacts", database, clock=lambda: datetime.now(UTC).timestamp() + 4000)
        self.journal = Journal(database, Announcer(), lambda: self.now)
        self.quiet = MeasurementLock()
        references = References(database, self.quiet.work)
        collection = ArtifactCollection(self.store, database, references, lambda: (), BackupLock(folder), lease_s=0.0)
        self.retention_by = partial(Retention, database, references, collection, Limits())
        self.retention = self.retention_by(self.clock())

    def clock(self) -> RetentionClock:
        return RetentionClock(lambda: self.now, lambda: self.now.timestamp())

    async def job(self, name: str, log: str = "", compilation: str = "") -> None:
        """Run a job to its end; then a day passes."""
        job = queued_job(name * 16, at=self.now, project="default", cell={"compilation_key": compilation})
        job.spec.labels["filler"] = "x" * 1000
        await submit(self.journal, job)
        await self.journal.change(model.advance(job.cells[0], model.CANCELLED, at=self.now))
        if log:
            row = {"job_id": job.id, "number": 1, "at": self.now, "cell_id": "", "source": "FARM", "text": log}
            await self.database.write(lambda connection: connection.execute(schema.log_lines.insert(), [row]))
        self.now += DAY

    async def large_jobs(self, names: str) -> None:
        """Run jobs that occupy 400 KiB each."""
        for name in names:
            await self.job(name)
        await self.retention.sweep(Limits(), dry_run=True)
        sizes = schema.referrers.update().where(schema.referrers.c.kind == "job").values(size_bytes=400 << 10)
        await self.database.write(lambda connection: connection.execute(sizes))

    async def tag(self, tag: str, name: str) -> None:
        await Tags(self.database, lambda: self.now).put(tag, name * 16, project="default", caller="ann", is_admin=False)

    async def jobs(self) -> str:
        query = select(schema.jobs.c.id).order_by(schema.jobs.c.number)
        return "".join(job_id[0] for job_id in await self.database.read(lambda c: c.execute(query).scalars().all()))

    async def logs(self) -> list[str]:
        query = select(schema.log_lines.c.text).order_by(schema.log_lines.c.job_id)
        return list(await self.database.read(lambda c: c.execute(query).scalars().all()))

    async def sweep(self, *keep: str) -> dict[str, Swept]:
        """Apply limits after a dry run, which must predict the counts."""
        limits = Limits.of(keep, Limits.of(["logs=forever", "cache=forever"]))
        planned = await self.retention.sweep(limits, dry_run=True)
        done = await self.retention.sweep(limits)
        assert [row.count for row in planned] == [row.count for row in done]
        return {row.name: row for row in done}


@pytest.fixture
async def world(tmp_path: Path, database: Database) -> AsyncIterator[World]:
    created = World(tmp_path, database)
    yield created
    created.store.close()


async def test_old_jobs_without_tags_go(world: World) -> None:
    for name in "abcd":
        await world.job(name)
    await world.tag("base", "b")
    await submit(world.journal, queued_job("e" * 16, at=START - 100 * DAY))
    assert (await world.sweep())["jobs"].count == 0
    assert (await world.sweep("jobs=48h"))["jobs"].count == 1
    assert await world.jobs() == "bcde"


async def test_jobs_beyond_a_size_go_oldest_first(world: World) -> None:
    await world.large_jobs("abcd")
    assert (await world.sweep("jobs=1MiB"))["jobs"].count == 2
    assert await world.jobs() == "cd"


async def test_jobs_that_stay_count_for_the_size_and_the_result_says_so(world: World) -> None:
    await world.large_jobs("abcd")
    for name in "ab":
        await world.tag(name, name)
    (planned,) = [row for row in await world.retention.sweep(Limits.of(["jobs=1MiB"]), dry_run=True) if row.name == "jobs"]
    assert (planned.count, planned.kept_count, planned.kept_bytes) == (2, 2, 800 << 10)
    swept = await world.sweep("jobs=1MiB")
    assert (swept["jobs"].kept_count, swept["logs"].kept_count) == (2, None)
    assert await world.jobs() == "ab"


async def test_a_clock_that_is_in_doubt_deletes_nothing_by_age(world: World) -> None:
    for name in "abcd":
        await world.job(name)
    world.now += 100 * DAY
    clock = world.clock()
    await clock.load(world.database)
    retention = world.retention = world.retention_by(clock)
    with pytest.raises(ClockImplausible, match="101 days after its last known time"):
        await retention.sweep(Limits.of(["jobs=1d"]))
    planned = {row.name: row.count for row in await retention.sweep(Limits.of(["jobs=1d"]), dry_run=True)}
    assert planned["jobs"] == 4
    await retention.sweep(Limits.of(["jobs=1d"]).without_ages())
    assert await world.jobs() == "abcd"
    world.now += DAY
    assert (await world.sweep("jobs=1d"))["jobs"].count == 4, "nobody has set it back within a day"


async def test_old_logs_go_and_their_jobs_stay(world: World) -> None:
    for name in "abc":
        await world.job(name, log=f"line of {name}")
    swept = (await world.sweep("logs=48h"))["logs"]
    assert (swept.count, swept.size_bytes) == (1, len("line of a") + LINE_BYTES)
    assert await world.logs() == ["line of b", "line of c"] and await world.jobs() == "abc"
    assert (await world.sweep("logs=48h"))["logs"].count == 0


async def test_unused_compilations_go_with_their_files_and_those_of_jobs_stay(world: World) -> None:
    cache, keys = Cache(world.store, world.database), {name: name * 64 for name in "abc"}
    for name, key in keys.items():
        compilation = Compilation(key=key)
        compilation.program.pte.CopyFrom(await world.store.put(name.encode() * 10, "ann"))
        await cache.keep_compilation(compilation)
        await cache.give("default", compilation, "ann")
    await world.job("j", compilation=keys["a"])
    await world.store.uses.write()
    world.now = datetime.now(UTC) + 30 * DAY
    recent = schema.uses.update().where(schema.uses.c.id == keys["b"]).values(used_at=world.now)
    await world.database.write(lambda connection: connection.execute(recent))
    world.store.uses.clock = lambda: datetime.now(UTC).timestamp() + 100_000
    swept = (await world.sweep("cache=1d"))["cache"]
    assert (swept.count, swept.size_bytes) == (1, 10)
    rows = await world.database.read(lambda c: c.execute(select(schema.compilations.c.key)).scalars().all())
    assert set(rows) == {keys["a"], keys["b"]}
    held = await world.database.read(lambda c: c.execute(select(schema.project_compilations.c.key)).scalars().all())
    assert set(held) == set(rows)
    digests = await world.database.read(lambda c: c.execute(select(schema.artifacts.c.digest)).scalars().all())
    assert len(digests) == 2 and all(world.store.place(digest).exists() for digest in digests)


async def test_a_compilation_is_given_once_and_again_after_it_was_deleted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, compilation = Cache(world.store, world.database), Compilation(key="a" * 64)

    async def give() -> None:
        compilation.program.pte.CopyFrom(await world.store.put(b"program", "ann"))
        await cache.keep_compilation(compilation)
        await cache.give("default", compilation, "ann")

    await give()
    with monkeypatch.context() as patched:
        patched.setattr(world.database, "write", None)
        await cache.give("default", compilation, "ann")
    world.now = datetime.now(UTC) + 30 * DAY
    world.store.uses.clock = lambda: datetime.now(UTC).timestamp() + 100_000
    assert (await world.sweep("cache=1d"))["cache"].count == 1
    await give()
    assert await cache.get_visible(compilation.key, Scope(frozenset({"default"}))) == compilation


async def test_old_audit_entries_go_and_young_ones_cannot(world: World) -> None:
    log = AuditLog(world.database, lambda: world.now, lambda: 0.0)
    world.now = datetime.now(UTC) - 100 * DAY
    log.record(Entry("old", "OK", principal="ann"))
    await log.flush()
    world.now = datetime.now(UTC)
    log.record(Entry("young", "OK", principal="ann"))
    await log.flush()
    assert (await world.sweep("audit=30d"))["audit"].count == 1
    assert [entry.action for entry in await log.list(10, None, "", "")] == ["young"]
    with pytest.raises(Exception, match="append-only for 30 days"):
        await world.database.write(lambda connection: connection.execute(text("DELETE FROM audit")))


async def test_nothing_is_deleted_while_a_device_of_the_machine_measures(world: World) -> None:
    await world.job("a")
    world.now += 10 * DAY
    limits = Limits.of(["jobs=1d"])
    async with world.quiet.measure():
        sweeping = asyncio.create_task(world.retention.sweep(limits))
        for _ in range(50):
            await world.jobs()
        assert await world.jobs() == "a" and not sweeping.done()
    await sweeping
    assert await world.jobs() == ""
