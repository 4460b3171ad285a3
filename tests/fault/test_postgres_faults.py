"""A farm whose PostgreSQL restarts, stands still, or is replaced by its standby, in the middle of jobs: nothing is lost, nothing
done twice."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest
from sqlalchemy import Connection, insert, select

from etfarm.server.state import schema
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.databases import create_database
from etfarm.server.state.engine import DatabaseUnavailable
from etfarm.v1 import job_pb2
from etfarm.wire.names import PROTOCOL_VERSION
from etfarm.wire.status import from_rpc_error
from tests.support import invariants
from tests.support.farm import FarmProcess, etfarm
from tests.support.farm_calls import FarmCalls, farm_calls
from tests.support.postgres import PostgresServer, postgres_server
from tests.support.programs import program
from tests.support.refusals import refusal
from tests.support.simulated_agent import SELECTOR, SimulatedAgent

pytestmark = pytest.mark.slow(reason="restarts and replaces the database of a real server in the middle of jobs")

WAIT_S = 120.0
JOBS = 60
SILENT_S = 15.0
"""Time after which a connection to a server that does not answer is given up, where work waits for 10 s or less."""
SETTINGS = {"shared_buffers": "32MB", "max_wal_size": "256MB"}


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    with postgres_server(SETTINGS) as running:
        running.execute("CREATE DATABASE {}", "farm")
        yield running


def farm_on(folder: Path, url: str, *options: str) -> FarmProcess:
    """Return a farm with a database, not yet started."""
    return FarmProcess(folder, bundle=False, serve=["--database", url, *options])


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
        request = job_pb2.SubmitJobRequest(protocol_version=PROTOCOL_VERSION, spec=spec, request_id=f"request-{number}")
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
        assert job.state == job_pb2.JOB_STATE_SUCCEEDED, [cell.error for cell in job.cells]
        assert invariants.check_events(job, events) == []
        assert invariants.check_reports(job, await calls.reports_of(job_id)) == []
    listed = await calls.call(calls.jobs.List, job_pb2.ListJobsRequest(page_size=500))
    assert sorted(job.id for job in listed.jobs) == sorted(ids)


async def test_jobs_outlive_restarts_of_the_database(postgres: PostgresServer, tmp_path: Path) -> None:
    with farm_on(tmp_path, postgres.url("farm")) as farm:
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


async def test_jobs_outlive_a_database_that_hangs(postgres: PostgresServer, tmp_path: Path) -> None:
    with farm_on(tmp_path, postgres.url("farm"), "--database-wait", "2") as farm:
        farm.start(agents=0)
        async with working(farm) as calls, asyncio.timeout(WAIT_S):
            candidate = await calls.program(program("add").bytes, "add")
            spec = job_pb2.JobSpec(candidates=[candidate], devices=[job_pb2.DeviceChoice(selector=SELECTOR)])
            progress = asyncio.Event()
            submitting = asyncio.create_task(submit_all(calls, JOBS, progress))
            await progress.wait()
            postgres.freeze()
            try:
                frozen_s = time.monotonic()
                asked = (
                    *(calls.jobs.List(job_pb2.ListJobsRequest(page_size=1)) for _ in range(20)),
                    calls.jobs.Submit(
                        job_pb2.SubmitJobRequest(protocol_version=PROTOCOL_VERSION, spec=spec, request_id="while it stands still")
                    ),
                )
                errors = await asyncio.gather(*asked, return_exceptions=True)
                assert time.monotonic() - frozen_s < SILENT_S + 10.0
            finally:
                postgres.thaw()
            for error in errors:
                assert isinstance(error, grpc.aio.AioRpcError)
                assert from_rpc_error(error, server="here").reason == "DATABASE_UNAVAILABLE"
            await assert_all_succeed_once(calls, await submitting, JOBS)
        assert farm.server is not None and farm.server.process is not None and farm.server.process.poll() is None
        assert "Traceback" not in (tmp_path / "serve.log").read_text()


@contextmanager
def without_free_connections(postgres: PostgresServer, url: str) -> Iterator[None]:
    """Take every connection that the role of a URL may have, also those of the farm."""
    held: list[psycopg.Connection[Any]] = []
    others = "FROM pg_stat_activity WHERE usename = 'farm' AND pid <> ALL(%s)"
    with psycopg.connect(postgres.url("farm"), autocommit=True) as admin:
        try:
            for _ in range(1000):
                with suppress(psycopg.OperationalError):
                    while True:
                        held.append(psycopg.connect(url))
                pids = [each.info.backend_pid for each in held]
                if admin.execute(f"SELECT pg_terminate_backend(pid, 5000) {others}", [pids]).rowcount == 0:
                    break
            assert admin.execute(f"SELECT count(*) {others}", [pids]).fetchone() == (0,)
            yield
        finally:
            for each in held:
                each.close()


async def test_jobs_outlive_a_database_without_free_connections(tmp_path: Path) -> None:
    with postgres_server({**SETTINGS, "max_connections": "16", "superuser_reserved_connections": "3"}) as postgres:
        postgres.execute("CREATE ROLE {} LOGIN", "farm")
        postgres.execute("CREATE DATABASE {} OWNER {}", "farm", "farm")
        url = postgres.url("farm").replace("postgres@", "farm@")
        with farm_on(tmp_path, url, "--database-wait", "2") as farm:
            farm.start(agents=0)
            async with working(farm) as calls, asyncio.timeout(WAIT_S):
                progress = asyncio.Event()
                submitting = asyncio.create_task(submit_all(calls, JOBS, progress))
                await progress.wait()
                with without_free_connections(postgres, url):
                    error = await refusal(calls.jobs.List(job_pb2.ListJobsRequest(page_size=1)))
                    assert error.reason == "DATABASE_UNAVAILABLE" and "max_connections" in error.remedy
                    check = ("serve", "--check", "--json", "--data", "other", "--database", url, "--database-wait", "1")
                    refused = await asyncio.to_thread(etfarm, *check, cwd=tmp_path, environment={})
                    assert refused.returncode == 1
                    (problem,) = json.loads(refused.stdout)["problems"]
                    assert problem["reason"] == "DATABASE_UNAVAILABLE" and "connection" in problem["message"]
                    assert "max_connections" in problem["remedy"]
                await assert_all_succeed_once(calls, await submitting, JOBS)
            assert farm.server is not None and farm.server.process is not None and farm.server.process.poll() is None
            assert "Traceback" not in (tmp_path / "serve.log").read_text()


async def test_a_commit_that_a_database_does_not_answer_is_done_once(postgres: PostgresServer) -> None:
    runs, is_frozen = 0, asyncio.Event()
    loop = asyncio.get_running_loop()

    def write(connection: Connection) -> None:
        nonlocal runs
        runs += 1
        row = {"digest": f"d{runs}", "size_bytes": 1, "owner": "ann", "stored_at": datetime.now(UTC)}
        connection.execute(insert(schema.artifacts), row)
        if runs == 1:
            postgres.freeze()
            loop.call_soon_threadsafe(is_frozen.set)

    def digests(connection: Connection) -> list[str]:
        return list(connection.execute(select(schema.artifacts.c.digest)).scalars())

    database = create_database(Path("/nowhere/farm.sqlite"), DatabaseUrl.parse(postgres.url("farm")), 1.0)
    try:
        await database.open()
        assert await database.read(digests) == []
        writing = asyncio.create_task(database.write(write, durable=True))
        try:
            async with asyncio.timeout(SILENT_S + 5.0):
                await is_frozen.wait()
                for refused in await asyncio.gather(database.read(digests), database.write(digests), return_exceptions=True):
                    assert isinstance(refused, DatabaseUnavailable)
            assert not writing.done(), "whether it is committed is not known yet"
        finally:
            postgres.thaw()
        async with asyncio.timeout(WAIT_S):
            await writing
            assert await database.read(digests) == [f"d{runs}"]
    finally:
        await asyncio.to_thread(database.close)


async def test_a_server_ends_while_its_database_hangs(postgres: PostgresServer, tmp_path: Path) -> None:
    farm = farm_on(tmp_path, postgres.url("farm"), "--database-wait", "2")
    farm.start(agents=0)
    postgres.freeze()
    try:
        began_s = time.monotonic()
        await asyncio.to_thread(farm.stop)
        assert time.monotonic() - began_s < 2 * SILENT_S
    finally:
        postgres.thaw()


async def test_a_server_ends_while_its_jobs_wait_for_a_database_that_is_gone(postgres: PostgresServer, tmp_path: Path) -> None:
    with farm_on(tmp_path, postgres.url("farm")) as farm:
        farm.start(agents=0)
        async with working(farm) as calls:
            progress = asyncio.Event()
            submitting = asyncio.create_task(submit_all(calls, JOBS, progress))
            await progress.wait()
            postgres.stop(signal.SIGQUIT)
            await asyncio.sleep(1.0)  # jobs come to wait
            submitting.cancel()
            await asyncio.gather(submitting, return_exceptions=True)
            began_s = time.monotonic()
            await asyncio.to_thread(farm.stop)
            assert time.monotonic() - began_s < 2 * SILENT_S


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
