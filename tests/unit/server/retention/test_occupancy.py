"""What jobs occupy, compared with what databases and disks say."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Connection, insert

from etfarm.server.access.scope import FARM_HOLDER
from etfarm.server.artifacts.store import Store
from etfarm.server.jobs import model
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.jobs.records.requests import Request
from etfarm.server.jobs.records.tags import Tags
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.retention.occupancy import artifact_bytes
from etfarm.server.retention.references import References
from etfarm.server.retention.sweep import _kept_jobs, _occupied_by_jobs
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.server.workers.measurement_lock import MeasurementLock
from etfarm.v1.agent_pb2 import CandidateResult
from etfarm.v1.common_pb2 import Artifact
from etfarm.v1.job_pb2 import Job
from etfarm.v1.report_pb2 import Report
from tests.support.databases import PostgresDatabases
from tests.support.jobs import AT, queued_job

pytestmark = pytest.mark.usefixtures("each_database")

PATH = (model.COMPILING, model.WAITING, model.RUNNING, model.ANALYZING, model.SUCCEEDED)
TABLES = (
    "jobs", "job_models", "cells", "attempts", "events", "reports", "log_lines", "referrers", "artifact_references"
)  # fmt: skip


class World:
    """A journal and a store, whose jobs end at once."""

    def __init__(self, folder: Path, database: Database) -> None:
        self.database = database
        self.blobs = folder / "artifacts" / "blobs"
        self.store = Store(folder / "artifacts", database)
        self.journal = Journal(database, Announcer(), lambda: AT)
        self.references = References(database, MeasurementLock().work)

    async def job(self, name: str, *artifacts: Artifact) -> None:
        await self.database.write(lambda connection: self.write_job(connection, name, *artifacts))

    def write_job(
        self, connection: Connection, name: str, *artifacts: Artifact, cells: int = 1, operators: int = 0, lines: int = 0
    ) -> None:
        job = queued_job(name, cells, name=name, project="default", cell={"candidate_name": "resnet8"})
        job.spec.labels["commit"] = name * 4
        for artifact in artifacts:
            job.spec.candidates.add(name=name).program.pte.CopyFrom(artifact)
        self.journal.write_new(connection, job, Request(name, b"d" * 16))
        self._end(connection, job, operators)
        rows = [
            {"job_id": name, "number": number, "at": AT, "cell_id": job.cells[0].id, "source": "FARM", "text": "x" * 80}
            for number in range(lines)
        ]
        if rows:
            connection.execute(insert(schema.log_lines), rows)

    def _end(self, connection: Connection, job: Job, operators: int) -> None:
        for cell in job.cells:
            for state in PATH:
                after = model.advance(cell, state, at=AT)
                if state == model.RUNNING:
                    attempt = after.attempts.add(id=f"{after.id}-attempt", device_id="a-device")
                    attempt.start_time.FromDatetime(AT)
                report = new_report(job, after.id, operators) if state == model.SUCCEEDED else None
                result = CandidateResult(cell_id=after.id) if state == model.ANALYZING else None
                self.journal.write_change(connection, after, report, result)
                cell.CopyFrom(after)

    async def counted(self) -> dict[str, int]:
        await self.references.update()
        return await self.database.read(_occupied_by_jobs)


def new_report(job: Job, cell: str, operators: int) -> Report:
    report = Report(id=f"r-{cell}", cell=cell)
    report.create_time.FromDatetime(AT)
    report.model.name = "resnet8"
    for index in range(operators):
        operator = report.operators.add(index=index, name=f"aten.convolution.{index}", p50_ns=random.Random(index).random())
        operator.source.file, operator.source.code = "models/mobilenet.py", "return self.activation(self.norm(self.conv(x)))"
    return report


@pytest.fixture
async def world(tmp_path: Path, database: Database) -> AsyncIterator[World]:
    created = World(tmp_path, database)
    yield created
    created.store.close()


async def bytes_of_tables(world: World, path: Path, databases: PostgresDatabases | None) -> int:
    """Return what the tables of jobs occupy with their indexes, once what was overwritten is gone."""
    if databases is None:
        names = ", ".join(f"'{name}'" for name in TABLES)
        query = f"""SELECT sum(pgsize) FROM dbstat
            WHERE aggregate = TRUE AND name IN (SELECT name FROM sqlite_master WHERE tbl_name IN ({names}))"""
        return await world.database.read(lambda connection: connection.exec_driver_sql(query).scalar_one())
    with psycopg.connect(databases.url(path).text, autocommit=True) as connection:
        total = 0
        for name in TABLES:
            connection.execute(f"VACUUM FULL {name}".encode())
            row = connection.execute("SELECT pg_total_relation_size(%s)", [name]).fetchone()
            assert row is not None
            total += row[0]
        return total


@pytest.mark.parametrize(
    ("cells", "operators", "lines"), [(1, 0, 0), (1, 84, 20), (6, 5, 0), (3, 30, 5)], ids=["small", "large", "wide", "usual"]
)
async def test_the_size_of_jobs_is_that_of_their_rows_and_artifacts(
    world: World, tmp_path: Path, each_database: str, request: pytest.FixtureRequest, cells: int, operators: int, lines: int
) -> None:
    count = 200 // cells
    databases = request.getfixturevalue("postgres_databases") if each_database == "postgresql" else None
    before = await bytes_of_tables(world, tmp_path / "farm.sqlite", databases)
    shared = await world.store.put(b"s" * 100_000, "ann")
    own = await world.store.put(b"o" * 30_000, "ann")

    def write(connection: Connection) -> None:
        for number in range(count):
            artifacts = (shared, own) if number == 0 else (shared,)
            world.write_job(connection, f"{number:016x}", *artifacts, cells=cells, operators=operators, lines=lines)

    await world.database.write(write)
    counted = await world.counted()
    rows = await bytes_of_tables(world, tmp_path / "farm.sqlite", databases) - before
    files = sum(path.stat().st_size for path in world.blobs.glob("??/*"))
    artifacts = await world.database.read(artifact_bytes)
    assert len(counted) == count
    assert sum(artifacts.values()) == files
    assert sum(counted.values()) - files == pytest.approx(rows, rel=0.2), each_database


async def test_an_artifact_counts_for_the_last_job_that_refers_to_it(world: World) -> None:
    shared, of_a = await world.store.put(b"s" * 50_000, "ann"), await world.store.put(b"a" * 30_000, "ann")
    of_farm = await world.store.put(b"f" * 90_000, "ann", holder=FARM_HOLDER)
    await world.job("a", shared, of_a, of_farm)
    await world.job("b", shared)
    await world.references.update()
    assert await world.database.read(artifact_bytes) == {"a": 30_000, "b": 50_000}
    # A job that is never deleted keeps them for good.
    await Tags(world.database, lambda: AT).put("base", "a", project="default", caller="ann", is_admin=False)
    assert await world.database.read(artifact_bytes) == {"a": 80_000}
    count, size_bytes = await world.database.read(_kept_jobs)
    assert count == 1 and size_bytes > 80_000
