"""A farm whose PostgreSQL restarts, or is replaced by its standby, in the middle of jobs: nothing is lost, nothing done twice."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import psycopg
import pytest

from etfarm.v1 import job_pb2
from tests.support import invariants
from tests.support.farm import FarmProcess
from tests.support.farm_calls import FarmCalls, farm_calls
from tests.support.postgres import PostgresServer, postgres_server
from tests.support.programs import program
from tests.support.simulated_agent import SELECTOR, SimulatedAgent

pytestmark = pytest.mark.slow(reason="restarts and replaces the database of a real server in the middle of jobs")

WAIT_S = 120.0
JOBS = 60
SETTINGS = {"shared_buffers": "32MB", "max_wal_size": "256MB"}


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    with postgres_server(SETTINGS) as running:
        running.execute("CREATE DATABASE {}", "farm")
        yield running


def farm_on(folder: Path, url: str) -> FarmProcess:
    """Return a farm with a database, not yet started."""
    return FarmProcess(folder, bundle=False, serve=["--database", url])


@asynccontextmanager
async def working(farm: FarmProcess, agents: int = 4) -> AsyncIterator[FarmCalls]:
    """Agents that answer every run after a moment, and calls of a user."""
    async with AsyncExitStack() as stack:
        for number in range(agents):
            await stack.enter_async_context(SimulatedAgent(farm.address, f"sim{number}", run_s=0.02))
        yield await stack.enter_async_context(farm_calls(farm.address))


async def submit_all(calls: FarmCalls, count: int, progress: asyncio.Event) -> list[str]:
    """Submit jobs one after the other, each as often as it takes, and return their ids."""
    candidate = await calls.program(program("add").bytes, "add")
    ids = []
    for number in range(count):
        spec = job_pb2.JobSpec(candidates=[candidate], devices=[job_pb2.DeviceChoice(selector=SELECTOR)])
        request = job_pb2.SubmitJobRequest(spec=spec, request_id=f"request-{number}")
        job = await calls.call(calls.jobs.Submit, request)
        ids.append(job.id)
        if number == count // 4:
            progress.set()
    return ids


async def assert_all_succeed_once(calls: FarmCalls, ids: list[str], count: int) -> None:
    assert len(set(ids)) == count, "each request is one job"
    for job_id in ids:
        events = await calls.watch(job_id)
        job = await calls.call(calls.jobs.Get, job_pb2.GetJobRequest(job_id=job_id))
        assert job.state == job_pb2.JOB_STATE_SUCCEEDED, job
        assert invariants.check_events(job, events) == []
        assert invariants.check_reports(job, await calls.reports_of(job_id)) == []
    listed = await calls.call(calls.jobs.List, job_pb2.ListJobsRequest(page_size=500))
    assert sorted(job.id for job in listed.jobs) == sorted(ids)


async def test_jobs_outlive_restarts_of_the_database(postgres: PostgresServer, tmp_path: Path) -> None:
    farm = farm_on(tmp_path, postgres.url("farm"))
    try:
        farm.start(agents=0)
        pid = farm.server.pid if farm.server else 0
        async with working(farm) as calls, asyncio.timeout(WAIT_S):
            progress = asyncio.Event()
            submitting = asyncio.create_task(submit_all(calls, JOBS, progress))
            await progress.wait()
            for _ in range(3):
                # In this thread, with which the server would end.
                postgres.stop()
                postgres.start()
                await asyncio.sleep(0.2)  # some work between two restarts
            await assert_all_succeed_once(calls, await submitting, JOBS)
        assert farm.server is not None and farm.server.pid == pid and farm.server.process is not None
        assert farm.server.process.poll() is None, "the same server"
        assert "Traceback" not in (tmp_path / "serve.log").read_text()
    finally:
        farm.stop()


async def test_jobs_outlive_a_failover_to_a_standby(tmp_path: Path) -> None:
    settings = {**SETTINGS, "synchronous_standby_names": "*", "wal_level": "replica"}
    with postgres_server(SETTINGS) as primary:
        primary.execute("CREATE DATABASE {}", "farm")
        standby = PostgresServer(SETTINGS, port=5433)
        farm: FarmProcess | None = None
        try:
            primary.run("pg_basebackup", "-h", str(primary.folder), "-U", "postgres", "-D", str(standby.data), "-R", "--no-sync",
                        "-c", "fast")  # fmt: skip
            standby.start()
            primary.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{settings['synchronous_standby_names']}'")
            primary.execute("ALTER ROLE postgres SET synchronous_commit = remote_apply")
            primary.execute("SELECT pg_reload_conf()")
            url = f"postgresql://postgres@/farm?host={primary.folder},{standby.folder}&port=5432,5433"
            farm = farm_on(tmp_path, url).start(agents=0)
            async with working(farm) as calls, asyncio.timeout(WAIT_S):
                progress = asyncio.Event()
                submitting = asyncio.create_task(submit_all(calls, JOBS, progress))
                await progress.wait()
                primary.stop(signal.SIGQUIT)
                with psycopg.connect(standby.url("farm"), autocommit=True) as connection:
                    connection.execute("SELECT pg_promote()")
                await assert_all_succeed_once(calls, await submitting, JOBS)
            assert "Traceback" not in (tmp_path / "serve.log").read_text()
        finally:
            if farm is not None:
                farm.stop()
            standby.remove()
