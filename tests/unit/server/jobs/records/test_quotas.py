"""Quotas of work under way: counted where jobs are written, so that two requests at once cannot both be the last one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import Connection

from etfarm.server.access.scope import EVERYTHING
from etfarm.server.jobs import model
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.jobs.records.quotas import Counted, Quotas
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.state.engine import Database
from etfarm.v1.job_pb2 import Job
from etfarm.wire.errors import Kind, UserError
from tests.support import jobs
from tests.support.databases import sqlite_only
from tests.support.jobs import AT, queued_job
from tests.support.refusals import refuses

pytestmark = pytest.mark.usefixtures("each_database")


@pytest.fixture
async def journal(database: Database) -> AsyncIterator[Journal]:
    quotas = Quotas(live_jobs_per_user=2, live_jobs_per_project=3, live_cells_per_user=5, live_cells_per_project=50)
    yield Journal(database, Announcer(), lambda: AT, quotas)


async def submit(journal: Journal, job_id: str, *, owner: str = "ann", cells: int = 1) -> Job:
    return await jobs.submit(journal, queued_job(job_id, cells, owner=owner))


async def test_the_last_job_that_is_allowed_is_written_once_however_many_come_at_once(journal: Journal) -> None:
    outcomes = await asyncio.gather(*(submit(journal, f"job-{n}") for n in range(8)), return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert len(refused) == 6
    for error in refused:
        assert isinstance(error, UserError)
        assert (error.reason, error.kind) == ("QUOTA_EXCEEDED", Kind.RESOURCE_EXHAUSTED)
        assert (error.metadata["quota"], error.metadata["limit"]) == ("live_jobs_per_user", "2")
    assert len((await journal.list(50, None, EVERYTHING))[0]) == 2


async def test_a_job_that_is_over_makes_room_and_a_request_that_is_known_needs_none(journal: Journal) -> None:
    first, _ = await submit(journal, "job-0"), await submit(journal, "job-1")
    assert await submit(journal, "job-0") == first
    await journal.change(model.advance(first.cells[0], model.CANCELLED, at=AT))
    await submit(journal, "job-2")


@pytest.mark.remedy("QUOTA_EXCEEDED")
async def test_cells_are_counted_over_all_live_jobs_of_a_user(journal: Journal) -> None:
    job = await submit(journal, "job-0", cells=3)
    with refuses("QUOTA_EXCEEDED", match="live cells"):
        await submit(journal, "job-1", cells=3)
    await journal.change(model.advance(job.cells[0], model.CANCELLED, at=AT))
    await submit(journal, "job-1", cells=3)


async def test_the_users_of_a_project_share_its_quota(journal: Journal) -> None:
    for name, owner in (("job-0", "ann"), ("job-1", "ann"), ("job-2", "bob")):
        await submit(journal, name, owner=owner)
    with refuses("QUOTA_EXCEEDED", match="The project default may have at most 3 live jobs"):
        await submit(journal, "job-3", owner="eve")


def test_what_is_held_open_is_counted_for_each_principal_and_given_back() -> None:
    counted = Counted("streams_per_user", "streams", 2)
    with counted.hold("ann"), counted.hold("bob"):
        with counted.hold("ann"), refuses("QUOTA_EXCEEDED", match="ann may have at most 2 streams"), counted.hold("ann"):
            raise AssertionError("one too many was let in")
        with counted.hold("ann"):
            pass
    assert not counted._open


@pytest.mark.remedy("UNKNOWN_QUOTA")
def test_quotas_are_set_by_name() -> None:
    assert Quotas.of(["sessions_per_user=3"]) == Quotas(sessions_per_user=3)
    for wrong in ("sessions", "sessions=3", "sessions_per_user=", "sessions_per_user=-1", "sessions_per_user=²"):
        with refuses("UNKNOWN_QUOTA", match="live_jobs_per_user"):
            Quotas.of([wrong])


async def test_the_specs_of_live_jobs_are_counted_in_bytes(database: Database) -> None:
    journal = Journal(database, Announcer(), lambda: AT, Quotas(live_spec_bytes_per_user=1_000))
    for name in ("job-0", "job-1"):
        await jobs.submit(journal, queued_job(name, spec={"name": "n" * 400}))
    with refuses("QUOTA_EXCEEDED", match="bytes of live jobs' specs"):
        await jobs.submit(journal, queued_job("job-2", spec={"name": "n" * 400}))


@sqlite_only  # asks for SQLite's plan
async def test_a_submission_finds_live_jobs_by_an_index_however_many_have_ended(database: Database) -> None:
    statements: list[str] = []

    def plans(connection: Connection) -> list[str]:
        raw = connection.connection.driver_connection
        assert raw is not None
        raw.set_trace_callback(statements.append)
        Quotas().check_job(connection, Job(id="j", owner="ann"))
        raw.set_trace_callback(None)
        return [row[3] for query in statements for row in raw.execute(f"EXPLAIN QUERY PLAN {query}")]

    steps = [step for step in await database.read(plans) if "jobs" in step]
    assert len(steps) >= 4
    assert all("USING INDEX jobs_finished_of_" in step for step in steps), steps
