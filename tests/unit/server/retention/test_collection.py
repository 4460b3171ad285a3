"""Collection of artifacts: nothing goes that a job, a report, a cached result, a session or a recent request refers to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import select

from etfarm.server.access.scope import FARM_HOLDER, agent_holder
from etfarm.server.artifacts.store import Store
from etfarm.server.artifacts.uses import LEASE_S
from etfarm.server.compile.cache import Cache
from etfarm.server.jobs import model
from etfarm.server.jobs.records.deletion import JobDeletion
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.jobs.records.tags import Tags
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.retention.collection import ArtifactCollection
from etfarm.server.retention.references import References
from etfarm.server.state import schema
from etfarm.server.state.backup_lock import BackupLock, BackupRunning
from etfarm.server.state.databases import backing_up
from etfarm.server.state.engine import Database, DatabaseUnavailable
from etfarm.v1.agent_pb2 import CandidateResult
from etfarm.v1.common_pb2 import Artifact
from etfarm.v1.compile_pb2 import Compilation
from etfarm.v1.job_pb2 import Attempt, Cell, Job
from etfarm.v1.report_pb2 import Report
from etfarm.wire.chunks import artifact_of
from tests.support.databases import PostgresDatabases
from tests.support.jobs import AT, queued_job, submit, with_programs
from tests.support.refusals import refuses

pytestmark = pytest.mark.usefixtures("each_database")

DAY = timedelta(days=1)


@dataclass
class World:
    """A store and a journal, without leases unless a test asks for them."""

    folder: Path
    database: Database
    passed: timedelta = timedelta()
    """The time that has passed on the store's clock besides the real time."""
    in_use: set[str] = field(default_factory=set)
    number: int = 0

    def __post_init__(self) -> None:
        self.store = self.open_store()
        self.journal = Journal(self.database, Announcer(), lambda: AT)
        self.deletion = JobDeletion(self.database)
        self.references = References(self.database, self.gate)

    def open_store(self) -> Store:
        return Store(self.folder / "artifacts", self.database, clock=lambda: time.time() + self.passed.total_seconds())

    @asynccontextmanager
    async def gate(self) -> AsyncIterator[None]:
        yield

    def collection(self, lease_s: float = 0.0) -> ArtifactCollection:
        def in_use() -> Collection[str]:
            return self.in_use

        return ArtifactCollection(self.store, self.database, self.references, in_use, BackupLock(self.folder), lease_s=lease_s)

    async def put(self, text: str, holder: str = "default", then: timedelta = DAY) -> Artifact:
        """Store a text; then some time passes."""
        artifact = await self.store.put(text.encode(), "ann", holder=holder)
        self.passed += then
        return artifact

    async def job(self, *programs: Artifact, project: str = "default", cell: Cell | None = None) -> Job:
        """Submit a job whose spec names artifacts."""
        self.number += 1
        job = with_programs(queued_job(f"{self.number:016x}", project=project), *programs)
        job.cells[0].MergeFrom(cell or Cell())
        return await submit(self.journal, job)

    async def end(self, job: Job, report: Report | None = None) -> None:
        after = model.advance(job.cells[0], model.CANCELLED, at=AT)
        if report is not None:
            report.cell = after.id
        await self.journal.change(after, report=report)

    async def stored(self) -> set[str]:
        rows = await self.database.read(lambda c: c.execute(select(schema.artifacts.c.digest)).scalars().all())
        assert {digest for digest in rows if self.store.place(digest).exists()} == set(rows)
        assert {path.name for path in self.folder.glob("artifacts/blobs/??/*")} == set(rows)
        assert not list(self.folder.glob("artifacts/uploads/*"))
        return set(rows)


@pytest.fixture
async def world(tmp_path: Path, database: Database) -> AsyncIterator[World]:
    created = World(tmp_path, database)
    yield created
    created.store.close()


async def test_what_nothing_refers_to_goes_least_recently_used_first(world: World) -> None:
    old, middle, new = [await world.put(text * 10) for text in "abc"]
    collection = world.collection()
    planned = await collection.collect(15, dry_run=True)
    assert (planned.count, planned.size_bytes, planned.kept_bytes) == (2, 20, 10)
    assert await world.stored() == {old.digest, middle.digest, new.digest}
    done = await collection.collect(20)
    assert (done.count, done.size_bytes, done.kept_bytes) == (1, 10, 20)
    assert await world.stored() == {middle.digest, new.digest}
    assert (await collection.collect()).count == 2
    assert await world.stored() == set()
    assert await world.store.holdings.used_bytes("default") == 0


Referring = Callable[[World, Artifact], Awaitable[object]]


async def by_a_cell(world: World, artifact: Artifact) -> None:
    await world.end(await world.job(cell=Cell(etrecord=artifact)))


async def by_an_attempts_result(world: World, artifact: Artifact) -> None:
    job = await world.job()
    cell = model.amend(job.cells[0], at=AT)
    cell.attempts.append(Attempt(id="a1", device_id="pi"))
    result = CandidateResult()
    result.outputs.CopyFrom(artifact)
    await world.journal.change(cell, result=result)


async def by_a_report(world: World, artifact: Artifact) -> None:
    report = Report(id="r")
    report.samples.CopyFrom(artifact)
    await world.end(await world.job(), report)


async def by_a_compilation(world: World, artifact: Artifact) -> None:
    compilation = Compilation(key="k")
    compilation.program.pte.CopyFrom(artifact)
    await Cache(world.store, world.database).keep_compilation(compilation)


async def by_stages(world: World, artifact: Artifact) -> None:
    compilation = Compilation(key="k")
    compilation.exported_programs["forward"].CopyFrom(artifact)
    await Cache(world.store, world.database).keep_stages(compilation)


async def by_a_session(world: World, artifact: Artifact) -> None:
    world.in_use.add(artifact.digest)


@pytest.mark.parametrize(
    "refer",
    [
        pytest.param(lambda world, artifact: world.job(artifact), id="a spec"),
        by_a_cell,
        pytest.param(lambda world, artifact: world.job(cell=Cell(outputs=artifact)), id="outputs of a cell"),
        by_an_attempts_result, by_a_report, by_a_compilation, by_stages,
        pytest.param(lambda world, artifact: world.store.hold(FARM_HOLDER, [artifact.digest], "farm"), id="the farm"),
        pytest.param(lambda world, artifact: world.store.hold(agent_holder("rack"), [artifact.digest], "rack"), id="an agent"),
        by_a_session,
    ],
)  # fmt: skip
async def test_what_something_refers_to_stays(world: World, refer: Referring) -> None:
    kept, other = await world.put("kept"), await world.put("other")
    await refer(world, kept)
    world.passed += DAY
    collection = world.collection()
    assert (await collection.collect(0)).count == 1
    assert await world.stored() == {kept.digest}
    with refuses("ARTIFACT_IN_USE") as refused:
        await collection.delete(kept.digest, force=True)
    assert refused.value.metadata["referrers"]
    with refuses("ARTIFACT_NOT_FOUND"):
        await collection.delete(other.digest)


async def test_a_reference_that_a_change_adds_and_one_that_it_drops_are_noticed(world: World) -> None:
    first, second = await world.put("first"), await world.put("second")
    job = await world.job(cell=Cell(outputs=first))
    collection = world.collection()
    await world.references.update()
    cell = model.amend(job.cells[0], at=AT)
    cell.outputs.CopyFrom(second)
    await world.journal.change(cell)
    assert await world.references.of(first.digest, 5), "counts until the job is read again"
    assert (await collection.collect()).count == 1
    assert await world.stored() == {second.digest}


async def test_files_of_a_deleted_job_go_unless_another_job_names_them(world: World) -> None:
    shared, own = await world.put("shared"), await world.put("own")
    job, other = await world.job(shared, own), await world.job(shared)
    for each in (job, other):
        await world.end(each)
    await world.deletion.delete(job.id)
    assert (await world.collection().collect()).count == 1
    assert await world.stored() == {shared.digest}


async def test_a_project_stops_paying_for_what_only_another_needs(world: World) -> None:
    artifact = await world.put("program", holder="vision")
    await world.store.hold("speech", [artifact.digest], "bob")
    await world.job(artifact, project="speech")
    world.passed += DAY
    planned = await world.collection().collect(release=True, dry_run=True)
    assert (planned.count, planned.released_bytes) == (0, 7)
    assert (await world.collection().collect(release=True)).released_bytes == 7
    assert await world.store.holdings.used_bytes("vision") == 0
    assert await world.store.holds(artifact.digest, ["speech"]) and not await world.store.holds(artifact.digest, ["vision"])


@pytest.mark.remedy("ARTIFACT_IN_USE")
async def test_a_recent_use_is_a_lease_also_for_a_later_server(world: World) -> None:
    artifact = await world.put("model")
    assert await world.store.missing([artifact.digest], "default") == []
    for store in (world.store, world.open_store()):
        world.store = store
        collection = world.collection(LEASE_S)
        assert (await collection.collect()).count == 0
        with refuses("ARTIFACT_IN_USE", match="minutes ago"):
            await collection.delete(artifact.digest)
    world.passed += timedelta(hours=3)
    assert (await world.collection(LEASE_S).collect()).count == 1


async def test_delete_with_force_ends_a_lease(world: World) -> None:
    artifact = await world.put("secret", then=timedelta())
    await world.collection(LEASE_S).delete(artifact.digest, force=True)
    assert await world.stored() == set()
    assert await world.store.missing([artifact.digest], "default") == [artifact.digest]


async def test_no_job_loses_its_model_while_everything_is_collected(world: World) -> None:
    """Clients ask, upload what is missing, and submit, while a collection deletes all that nothing refers to."""
    collection = world.collection(LEASE_S)
    texts = [f"model {index}" for index in range(60)]
    for text in texts[::2]:
        await world.put(text)
    ended = asyncio.Event()

    async def collect() -> int:
        count = 0
        while not ended.is_set():
            count += (await collection.collect(0)).count
        return count

    async def submit(text: str) -> Artifact:
        artifact = artifact_of(text.encode())
        if await world.store.missing([artifact.digest], "default"):
            await world.store.put(text.encode(), "ann")
        for _ in range(3):
            await asyncio.sleep(0)
        await world.store.require([artifact.digest], "default")
        await world.job(artifact)
        return artifact

    collecting = asyncio.create_task(collect())
    named = [await submit(text) for text in texts]
    ended.set()
    deleted = await collecting
    await collection.collect(0)
    assert {artifact.digest for artifact in named} <= await world.stored()
    assert deleted > 0, "the collection ran beside the submissions"


@pytest.mark.remedy("BACKUP_RUNNING")
async def test_a_backup_keeps_collections_out(world: World) -> None:
    artifact = await world.put("old")
    with BackupLock(world.folder).backing_up():
        with pytest.raises(BackupRunning):
            await world.collection().collect()
        with pytest.raises(BackupRunning):
            await world.collection().delete(artifact.digest)
    assert (await world.collection().collect()).count == 1


@pytest.mark.parametrize("each_database", ["postgresql"], indirect=True)
async def test_a_backup_on_another_machine_keeps_collections_and_other_backups_out(
    world: World, postgres_databases: PostgresDatabases
) -> None:
    artifact, url = await world.put("old"), postgres_databases.url(world.folder / "farm.sqlite")
    with backing_up(url):
        with pytest.raises(BackupRunning):
            await world.collection().collect()
        with pytest.raises(BackupRunning):
            await world.collection().delete(artifact.digest)
        with pytest.raises(BackupRunning), backing_up(url):
            pass
    assert (await world.collection().collect()).count == 1


@pytest.mark.parametrize("each_database", ["postgresql"], indirect=True)
async def test_a_backup_whose_lock_was_lost_has_failed(world: World, postgres_databases: PostgresDatabases) -> None:
    url = postgres_databases.url(world.folder / "farm.sqlite")
    with pytest.raises(DatabaseUnavailable, match="kept servers from deleting artifacts was lost"), backing_up(url):
        with psycopg.connect(url.text, autocommit=True) as session:
            session.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_locks "
                "WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            )
        await world.collection().collect()


@pytest.mark.remedy("JOB_LIVE", "JOB_TAGGED")
async def test_a_job_is_deleted_with_its_rows_and_a_live_or_tagged_one_is_not(world: World) -> None:
    job = await world.job()
    with refuses("JOB_LIVE"):
        await world.deletion.delete(job.id)
    await world.end(job, Report(id="r"))
    tags = Tags(world.database, lambda: AT)
    await tags.put("baseline", job.id, project="default", caller="ann", is_admin=False)
    await world.references.update()
    with refuses("JOB_TAGGED", match="baseline"):
        await world.deletion.delete(job.id)
    await world.deletion.delete(job.id, with_tags=True)
    tables = (schema.jobs, schema.cells, schema.events, schema.reports, schema.tags, schema.referrers, schema.artifact_references)
    for table in tables:
        assert await world.database.read(lambda c, table=table: c.execute(select(table)).all()) == [], table.name  # type: ignore[misc]
