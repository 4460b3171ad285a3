"""Several servers of a farm whose S3 server is away: one of them leads all the same, and what needs bytes waits for them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from etfarm.v1 import job_pb2
from tests.support.databases import PostgresDatabases
from tests.support.farm import etfarm, wait_until
from tests.support.farm_calls import farm_calls
from tests.support.refusals import refusal
from tests.support.s3 import S3Server, environment_of
from tests.support.s3_proxy import S3Proxy, proxy_to
from tests.support.servers import Servers
from tests.support.simulated_agent import SimulatedAgent
from tests.support.takeovers import check, lead_job, simulated_agents, trivial_spec, wait_until_back

pytestmark = pytest.mark.slow(reason="kills servers, whose leases expire after seconds, and starts an S3 server")

JOBS, AGENTS, AT_ONCE = 12, 3, 6


@dataclass
class Farm:
    """Servers, and the proxy between them and the S3 server."""

    servers: Servers
    proxy: S3Proxy

    def list_devices(self) -> str:
        """Return what `etfarm devices list` prints to a user."""
        environment = {**os.environ, "ETFARM_SERVER": self.servers.addresses}
        done = etfarm("devices", "list", cwd=self.servers.folder, environment=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def tokens_of_leases(self) -> list[tuple[int]]:
        """Return how often the lead was taken."""
        return self.servers.query("SELECT token FROM etfarm_cluster.lease")


@pytest.fixture
def farm(tmp_path: Path, postgres_databases: PostgresDatabases, s3_server: S3Server) -> Iterator[Farm]:
    """A farm whose servers a test adds."""
    with proxy_to(s3_server.address) as proxy, postgres_databases.server.new_database() as url:
        location = s3_server.new_location(proxy.address)
        options = ["--blobs", location.url, "--blobs-wait", "1"]
        with Servers(tmp_path, url, options, environment_of(location)) as servers:
            try:
                yield Farm(servers, proxy)
            finally:
                proxy.heal()


async def test_a_standby_takes_the_lead_without_s3_and_no_job_fails(farm: Farm) -> None:
    leader, other = farm.servers.add(), farm.servers.add()
    addresses = farm.servers.addresses
    async with simulated_agents(addresses, AGENTS) as agents, farm_calls(addresses) as calls:
        spec, turns = await trivial_spec(calls), asyncio.Semaphore(AT_ONCE)
        async with SimulatedAgent(addresses, "gone"):
            pass
        waiting = await calls.submit(
            job_pb2.JobSpec(candidates=spec.candidates, devices=[job_pb2.DeviceChoice(selector="name=gone")])
        )
        jobs = [asyncio.create_task(lead_job(calls, spec, turns)) for _ in range(JOBS)]
        await agents[0].until(lambda: len(agents[0].acknowledged) >= 2)
        before = [agent.connections for agent in agents]
        farm.proxy.refuse_all()
        leader.kill9()
        await asyncio.to_thread(other.wait_until_leading)
        await wait_until_back(agents, before)
        listed = await asyncio.to_thread(farm.list_devices)
        assert all(agent.name in listed for agent in agents)
        await calls.call(calls.jobs.Cancel, job_pb2.CancelJobRequest(job_id=waiting.id))
        assert (await calls.watch(waiting.id))[-1].job_state == job_pb2.JOB_STATE_CANCELLED
        error = await refusal(calls.put(b"new" * 1000))
        assert (error.reason, error.kind.name) == ("BLOBS_UNAVAILABLE", "UNAVAILABLE")
        farm.proxy.heal()
        followed = dict(await asyncio.gather(*jobs))
        await calls.put(b"new" * 1000)
        assert farm.tokens_of_leases() == [(2,)]
        await check(calls, followed, {waiting.id})
        assert set(calls.repeated) <= {"UNAVAILABLE"}, calls.repeated


async def test_a_farm_starts_without_s3(farm: Farm) -> None:
    farm.proxy.refuse_all()
    leader, other = farm.servers.add(), farm.servers.add()
    for server in (leader, other):  # before S3 is there again
        assert await asyncio.to_thread(
            wait_until, lambda server=server: "starting without the artifacts' S3 server" in server.log
        )
    addresses = farm.servers.addresses
    async with simulated_agents(addresses, 1) as agents, farm_calls(addresses) as calls:
        assert agents[0].name in await asyncio.to_thread(farm.list_devices)
        farm.proxy.heal()
        job_id, events = await lead_job(calls, await trivial_spec(calls), asyncio.Semaphore(1))
        await check(calls, {job_id: events})
    assert farm.tokens_of_leases() == [(1,)]
