"""Several servers of one farm: whichever dies, stands still or is cut off, jobs, agents and watchers go on at another one."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path

import psycopg
import pytest

from etfarm.client import AsyncFarm
from etfarm.server.cluster import lease
from etfarm.server.state import revisions
from etfarm.v1 import farm_pb2, job_pb2
from etfarm.wire.names import PROTOCOL_VERSION
from tests.support import next_release, source_tree
from tests.support.clock import skewed_by
from tests.support.databases import PostgresDatabases
from tests.support.farm import START_S
from tests.support.farm_calls import FarmCalls, farm_calls
from tests.support.postgres import QUICK, PostgresServer, postgres_server
from tests.support.proxy import link_to
from tests.support.servers import Server, Servers
from tests.support.takeovers import check, lead_job, simulated_agents, trivial_spec, wait_until_back

pytestmark = pytest.mark.slow(reason="kills and stops servers in the middle of jobs, whose leases expire after seconds")

BACK_S = 15.0
"""Time within which a farm whose leader was killed has its agents back, on a busy machine; a bench has the real limit."""
LEFT_S = 9.0
"""Time within which a stopped leader is left for the next one: 6 s on an idle machine; a keepalive of 10 s takes at least 11."""
JOBS, AT_ONCE = 60, 12


@pytest.fixture
def servers(tmp_path: Path, postgres_databases: PostgresDatabases) -> Iterator[Servers]:
    """A farm whose servers a test adds."""
    with postgres_databases.server.new_database() as url, Servers(tmp_path, url) as running:
        yield running
        for each in running.servers:
            # What a server writes that has lost its lease is refused, which its log has in full.
            assert "Traceback" not in each.log or "no longer leads" in each.log, each.log


async def test_jobs_agents_and_watchers_go_on_when_the_leader_is_killed(servers: Servers) -> None:
    leader, other = servers.add(), servers.add()
    async with simulated_agents(servers.addresses) as agents, farm_calls(servers.addresses) as calls:
        spec, turns = await trivial_spec(calls), asyncio.Semaphore(AT_ONCE)
        jobs = [asyncio.create_task(lead_job(calls, spec, turns)) for _ in range(JOBS)]
        await agents[0].until(lambda: len(agents[0].acknowledged) >= 2)
        before, running = [agent.connections for agent in agents], [set(agent.active) for agent in agents]
        leader.kill9()
        assert await wait_until_back(agents, before) < BACK_S
        followed = dict(await asyncio.gather(*jobs))
        await check(calls, followed)
        for agent, attempts in zip(agents, running, strict=True):
            assert {agent.started[attempt] for attempt in attempts} <= {1}, "a running attempt was restarted, not adopted"
    other.wait_until_leading()


async def test_a_leader_that_stands_still_is_fenced(servers: Servers) -> None:
    leader, other = servers.add(), servers.add()
    async with (
        simulated_agents(other.address, 1) as agents, farm_calls(leader.address) as direct, farm_calls(other.address) as calls,
    ):  # fmt: skip
        spec, before = await trivial_spec(calls), [agent.connections for agent in agents]
        leader.signal(signal.SIGSTOP)
        late = asyncio.ensure_future(
            direct.jobs.Submit(job_pb2.SubmitJobRequest(protocol_version=PROTOCOL_VERSION, request_id="late", spec=spec))
        )
        await asyncio.to_thread(other.wait_until_leading)
        job = await calls.submit(spec)
        await wait_until_back(agents, before)
        await calls.watch(job.id)
        await asyncio.sleep(10.0 - lease.LEASE_S)
        leader.signal(signal.SIGCONT)
        # Its process starts anew and forwards; what it was asked before that changes nothing.
        assert leader.daemon is not None
        await asyncio.to_thread(leader.daemon.expect, f"forwarding calls to {other.address}")
        await asyncio.wait({late})
        assert late.exception() is not None
        assert [known.id for known in await direct.all_jobs()] == [job.id]
        info = await direct.call(direct.farm.GetServerInfo, farm_pb2.GetServerInfoRequest())
        assert (info.forwarded_by, info.servers[0].address) == (leader.address, other.address)


async def test_users_and_agents_leave_a_leader_that_stands_still(servers: Servers) -> None:
    leader, other = servers.add(), servers.add()
    async with simulated_agents(servers.addresses, 2) as agents, AsyncFarm(servers.addresses) as farm:
        before = [agent.connections for agent in agents]
        await farm.info()
        leader.signal(signal.SIGSTOP)
        async with asyncio.timeout(LEFT_S):
            await asyncio.gather(farm.jobs(1), wait_until_back(agents, before), new_client(servers.addresses))
        assert other.address in other.log


async def new_client(addresses: str) -> None:
    async with AsyncFarm(addresses):
        pass


async def test_a_leader_in_the_middle_of_a_write_does_not_delay_the_next_one(servers: Servers) -> None:
    servers.add()
    ((token,),) = servers.query("SELECT token FROM etfarm_cluster.lease")
    with psycopg.connect(servers.url) as writing:  # as a leader that stands still between two statements of a transaction
        writing.execute("SELECT set_config('application_name', %s, false)", (lease.writer_name(token),))
        writing.execute("SELECT token FROM etfarm_cluster.lease WHERE id = 1 FOR KEY SHARE")
        other = servers.add()
        servers.servers[0].kill9()
        await asyncio.to_thread(other.wait_until_leading, BACK_S)
        with pytest.raises(psycopg.OperationalError):
            writing.execute("SELECT 1")


async def test_a_leader_that_is_cut_from_the_database_is_replaced(tmp_path: Path) -> None:
    with postgres_server(QUICK | {"listen_addresses": "127.0.0.1", "port": "0"} | free_port()) as database:
        port = database.settings["port"]
        with link_to(f"127.0.0.1:{port}") as link:
            database.port = int(port)
            with Servers(tmp_path, database.url("postgres")) as servers:
                of_link = f"postgresql://postgres@{link.address}/postgres"
                leader, other = servers.add(url=of_link), servers.add()
                async with simulated_agents(servers.addresses) as agents, farm_calls(servers.addresses) as calls:
                    spec, turns = await trivial_spec(calls), asyncio.Semaphore(AT_ONCE)
                    jobs = [asyncio.create_task(lead_job(calls, spec, turns)) for _ in range(JOBS)]
                    await agents[0].until(lambda: len(agents[0].acknowledged) >= 2)
                    before = [agent.connections for agent in agents]
                    link.cut()
                    await asyncio.to_thread(other.wait_until_leading)
                    await wait_until_back(agents, before)
                    await check(calls, dict(await asyncio.gather(*jobs)))
                    link.heal()
                    assert leader.daemon is not None
                    await asyncio.to_thread(leader.daemon.expect, "forwarding calls to")


@contextmanager
def farm_on_its_own_database(folder: Path) -> Iterator[tuple[PostgresServer, Servers]]:
    settings = QUICK | {"synchronous_commit": "remote_apply"}  # a crash loses no write
    with postgres_server(settings) as database, Servers(folder, database.url("postgres")) as servers:
        yield database, servers


def stand_still(database: PostgresServer, for_s: float) -> None:
    """Freeze a database. In a thread: the event loop of a busy test returns later."""
    database.freeze()
    try:
        time.sleep(for_s)
    finally:
        database.thaw()


def crash(database: PostgresServer, for_s: float) -> None:
    """Kill a database, and start it again later."""
    database.stop(signal.SIGQUIT)
    time.sleep(for_s)
    database.start()


@pytest.mark.parametrize(("leave", "for_s"), [(stand_still, lease.LEASE_S + lease.RENEWAL_S / 2), (crash, lease.LEASE_S)])
async def test_a_leader_goes_on_when_its_database_answers_after_the_lease_has_expired(
    tmp_path: Path, leave: Callable[[PostgresServer, float], None], for_s: float
) -> None:
    with farm_on_its_own_database(tmp_path) as (database, servers):
        leader, other = servers.add(), servers.add()
        before, after = await work_meanwhile(servers, partial(leave, database, for_s))
        assert after == before
        assert "no longer leads" not in leader.log and "this server leads" not in other.log


async def test_no_job_fails_when_the_database_returns_as_the_leader_gives_up(tmp_path: Path) -> None:
    with farm_on_its_own_database(tmp_path) as (database, servers):
        leader = servers.add()
        servers.add()
        await work_meanwhile(servers, partial(crash, database, lease.LEASE_S + lease.LATE_S))
        assert "no longer leads" in leader.log


async def work_meanwhile(servers: Servers, fault: Callable[[], None]) -> tuple[list[int], list[int]]:
    """Do jobs during a fault, none of which is lost; return how often each agent had connected before and after it."""
    async with simulated_agents(servers.addresses) as agents, farm_calls(servers.addresses) as calls:
        spec, turns = await trivial_spec(calls), asyncio.Semaphore(AT_ONCE)
        jobs = [asyncio.create_task(lead_job(calls, spec, turns)) for _ in range(JOBS)]
        await agents[0].until(lambda: len(agents[0].acknowledged) >= 2)
        before = [agent.connections for agent in agents]
        with ThreadPoolExecutor(1) as thread:
            await asyncio.get_running_loop().run_in_executor(thread, fault)
            # A database that the thread has started ends with it.
            await check(calls, dict(await asyncio.gather(*jobs)))
        return before, [agent.connections for agent in agents]


def free_port() -> dict[str, str]:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"port": str(probe.getsockname()[1])}


async def test_a_leader_that_ends_in_order_hands_over_at_once(servers: Servers) -> None:
    leader, other = servers.add(), servers.add()
    async with simulated_agents(servers.addresses, 2) as agents, farm_calls(servers.addresses) as calls:
        spec = await trivial_spec(calls)
        await calls.watch((await calls.submit(spec)).id)
        before = [agent.connections for agent in agents]
        began = time.monotonic()
        leader.signal(signal.SIGTERM)
        await asyncio.to_thread(other.wait_until_leading)
        assert time.monotonic() - began < lease.LEASE_S
        await wait_until_back(agents, before)
        await calls.watch((await calls.submit(spec)).id)
        assert [server.address for server in (await info_of(calls)).servers] == [other.address]
    assert servers.query("SELECT token, released FROM etfarm_cluster.lease") == [(2, False)]


async def info_of(calls: FarmCalls) -> farm_pb2.ServerInfo:
    answer: farm_pb2.ServerInfo = await calls.call(calls.farm.GetServerInfo, farm_pb2.GetServerInfoRequest())
    return answer


@pytest.mark.parametrize("skew_s", [-30, 30])
async def test_clocks_of_servers_may_differ(servers: Servers, skew_s: int) -> None:
    leader = servers.add()
    skewed = servers.add(environment=skewed_by(skew_s))
    await asyncio.sleep(2 * lease.LEASE_S)
    assert servers.query("SELECT token FROM etfarm_cluster.lease") == [(1,)], "a skewed clock took the lease of a living leader"
    leader.kill9()
    await asyncio.to_thread(skewed.wait_until_leading)
    leader.start()
    await asyncio.sleep(2 * lease.LEASE_S)
    assert servers.query("SELECT token FROM etfarm_cluster.lease") == [(2,)]
    skewed.kill9()
    await asyncio.to_thread(leader.wait_until_leading)


async def test_a_lost_notification_delays_the_next_leader_only_until_it_looks_again(servers: Servers) -> None:
    leader, other = servers.add(), servers.add()
    leader.signal(signal.SIGSTOP)  # it renews nothing more, and notifies nobody
    servers.query("UPDATE etfarm_cluster.lease SET expires_at = to_timestamp(0), released = true RETURNING 1")
    await asyncio.to_thread(other.wait_until_leading, BACK_S)
    leader.signal(signal.SIGCONT)
    assert leader.daemon is not None
    await asyncio.to_thread(leader.daemon.expect, f"forwarding calls to {other.address}")


async def test_a_server_does_not_lead_on_tables_of_a_newer_version(servers: Servers) -> None:
    leader = servers.add()
    servers.query("UPDATE alembic_version SET version_num = '9999' RETURNING 1")
    older = servers.add()
    leader.kill9()
    with pytest.raises(AssertionError):
        await asyncio.to_thread(older.wait_until_leading, 2 * lease.LEASE_S)
    assert re.search("a newer version of etfarm has migrated the database", older.log)


async def test_servers_of_two_versions_are_one_farm_during_an_upgrade(servers: Servers, tmp_path: Path) -> None:
    """The newer one stands by, takes the lead with its migration, and leads the older one's agents and jobs on."""
    newer_tree = source_tree.environment(next_release.make_tree(tmp_path / "next"))
    former, newer = servers.add(), servers.add(environment=newer_tree)
    own, revision = version("etfarm"), "SELECT version_num FROM alembic_version"
    async with simulated_agents(servers.addresses) as agents, farm_calls(servers.addresses) as calls:
        spec, turns = await trivial_spec(calls), asyncio.Semaphore(AT_ONCE)
        async with farm_calls(newer.address) as through_newer, asyncio.timeout(BACK_S):
            while len((info := await info_of(through_newer)).servers) < 2:  # noqa: ASYNC110 - the leader looks once a second
                await asyncio.sleep(0.05)
            assert (info.version, info.forwarded_by) == (own, newer.address)
            assert [server.version for server in info.servers] == [own, next_release.VERSION]
        assert servers.query(revision) == [(revisions.HEAD,)], "a server migrated the database of another one's lead"
        jobs = [asyncio.create_task(lead_job(calls, spec, turns)) for _ in range(JOBS)]
        await agents[0].until(lambda: len(agents[0].acknowledged) >= 2)
        before, running = [agent.connections for agent in agents], [set(agent.active) for agent in agents]
        former.signal(signal.SIGTERM)
        await asyncio.to_thread(newer.wait_until_leading)
        await wait_until_back(agents, before)
        assert servers.query(revision) == [(next_release.REVISION,)]
        assert former.daemon is not None and former.daemon.process is not None
        await asyncio.to_thread(former.daemon.process.wait, BACK_S)
        former.start()  # not upgraded yet
        async with farm_calls(former.address) as through_former:
            info = await info_of(through_former)
            assert (info.version, info.forwarded_by) == (next_release.VERSION, former.address)
            jobs += [asyncio.create_task(lead_job(through_former, spec, turns)) for _ in range(AT_ONCE)]
            followed = dict(await asyncio.gather(*jobs))
        await check(calls, followed)
        for agent, attempts in zip(agents, running, strict=True):
            assert {agent.started[attempt] for attempt in attempts} <= {1}, "a running attempt was restarted, not adopted"
    assert servers.query("SELECT DISTINCT rating FROM jobs") == [(0,)]
    newer.signal(signal.SIGTERM)
    with pytest.raises(AssertionError):
        await asyncio.to_thread(former.wait_until_leading, 2 * lease.LEASE_S)
    assert re.search("a newer version of etfarm has migrated the database", former.log)


async def test_a_server_that_cannot_lead_takes_no_lease(servers: Servers) -> None:
    servers.add().kill9()
    assert servers.blobs is not None
    (servers.blobs / "cache").mkdir()  # as of a farm whose artifacts are in a bucket
    unable = servers.add()
    assert unable.daemon is not None and unable.daemon.process is not None
    assert await asyncio.to_thread(unable.daemon.process.wait, START_S) != 0
    assert "The farm's artifacts are in a bucket" in unable.log
    assert servers.query("SELECT token FROM etfarm_cluster.lease") == [(1,)]


async def test_a_server_with_other_blobs_is_refused(servers: Servers, tmp_path: Path) -> None:
    servers.add()
    elsewhere = Server(tmp_path / "elsewhere", (tmp_path / "other blobs"), servers.url, {}, ())
    (tmp_path / "other blobs").mkdir()
    with pytest.raises(AssertionError, match="Give all servers of a farm the same --blobs"):
        elsewhere.start()
