"""What a farm of several servers says of itself: its servers, their metrics, and who called, whichever server was asked."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from urllib.request import urlopen

import grpc
import pytest

from etfarm.v1 import audit_pb2, audit_pb2_grpc, farm_pb2, farm_pb2_grpc, project_pb2, project_pb2_grpc
from etfarm.wire.channel import Access, open_channel
from tests.support.databases import PostgresDatabases
from tests.support.databases import postgres_databases as postgres_databases
from tests.support.farm import etfarm
from tests.support.proxy import link_to
from tests.support.servers import Server, Servers

WAIT_S = 60.0
TOKEN = "secret-of-ann-0123456789"


@contextmanager
def farm(folder: Path, databases: PostgresDatabases) -> Iterator[Servers]:
    with databases.server.new_database() as url, Servers(folder, url) as running:
        yield running


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, postgres_databases: PostgresDatabases) -> Iterator[Servers]:
    """A farm of two servers with metrics, the first of which leads."""
    with farm(tmp_path_factory.mktemp("farm"), postgres_databases) as running:
        for _ in range(2):
            running.add("--metrics", "127.0.0.1:0")
        yield running


async def info_at(address: str) -> farm_pb2.ServerInfo:
    async with open_channel(Access(address)) as channel:
        info: farm_pb2.ServerInfo = await farm_pb2_grpc.FarmServiceStub(channel).GetServerInfo(farm_pb2.GetServerInfoRequest())
        return info


async def until_known(servers: Servers) -> None:
    """Wait until the leader, which looks once a second, knows all servers."""
    async with asyncio.timeout(WAIT_S):
        while len((await info_at(servers.servers[0].address)).servers) < len(servers.servers):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def metrics_of(server: Server) -> dict[str, float]:
    """Return the samples of a server's metrics."""
    assert server.daemon is not None
    address = next(line for line in server.daemon.lines if "metrics on" in line).rpartition(" ")[2]
    with urlopen(f"http://{address}/metrics", timeout=WAIT_S) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_the_service_manager_of_each_server_hears_who_leads(tmp_path: Path, postgres_databases: PostgresDatabases) -> None:
    with ExitStack() as closing:
        running = closing.enter_context(farm(tmp_path, postgres_databases))
        managers = [closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) for _ in range(2)]
        for number, manager in enumerate(managers):
            manager.bind(str(tmp_path / f"notify-{number}"))
            manager.settimeout(WAIT_S)
            running.add(environment={"NOTIFY_SOCKET": str(tmp_path / f"notify-{number}")})

        def until(number: int, status: str) -> None:
            while managers[number].recv(4096) != f"STATUS={status}".encode():
                pass

        leader, standby = running.servers
        until(0, "leading the farm")
        until(1, f"forwarding calls to {leader.address}")
        leader.stop()
        until(1, "leading the farm")
        assert standby.daemon is not None and standby.daemon.stop() == 0


@pytest.mark.remedy("OTHER_BLOBS")
def test_a_server_takes_part_once_it_has_the_artifacts_of_the_others(
    tmp_path: Path, postgres_databases: PostgresDatabases
) -> None:
    with farm(tmp_path, postgres_databases) as running:
        running.add()
        shared, running.blobs = running.blobs, tmp_path / "elsewhere"
        running.blobs.mkdir()
        with pytest.raises(AssertionError):
            running.add()
        refused = running.servers.pop()
        assert "Give all servers of a farm the same --blobs" in refused.log
        shutil.rmtree(refused.folder)
        running.blobs = shared
        running.add()


async def test_each_server_names_all_of_them_the_leader_first(servers: Servers) -> None:
    leader, standby = servers.servers
    await until_known(servers)
    for asked, via in ((leader, ""), (standby, standby.address)):
        info = await info_at(asked.address)
        assert [(each.address, each.leads) for each in info.servers] == [(leader.address, True), (standby.address, False)]
        assert {each.version for each in info.servers} == {version("etfarm")}
        assert info.servers[0].start_time.ToNanoseconds() < info.servers[1].start_time.ToNanoseconds()
        assert info.forwarded_by == via


async def test_doctor_names_the_servers_and_the_one_that_answered(servers: Servers, tmp_path: Path) -> None:
    leader, standby = servers.servers
    await until_known(servers)
    environment = {"ETFARM_DATA": str(tmp_path / "data"), "ETFARM_SERVER": standby.address}
    done = await asyncio.to_thread(etfarm, "doctor", "--json", cwd=tmp_path, environment=environment)
    (members,) = [each for each in json.loads(done.stdout)["findings"] if each["name"] == "servers"]
    assert members["status"] == "OK"
    own = version("etfarm")
    assert members["detail"] == (
        f"{leader.address} leads; {standby.address} (etfarm {own}) stands by; {standby.address} forwarded the call"
    )


async def test_the_metrics_of_each_server_say_who_leads_and_what_was_forwarded(servers: Servers) -> None:
    leader, standby = servers.servers
    forwarded = 'etfarm_forwarded_calls_total{code="OK",rpc="FarmService.GetServerInfo"}'
    before = (await asyncio.to_thread(metrics_of, standby)).get(forwarded, 0.0)
    for _ in range(3):
        await info_at(standby.address)
    leading, standing = [await asyncio.to_thread(metrics_of, each) for each in (leader, standby)]
    assert (leading["etfarm_leader"], standing["etfarm_leader"]) == (1.0, 0.0)
    assert standing[forwarded] == before + 3.0 and forwarded not in leading
    assert leading["etfarm_leaderless_seconds_total"] < WAIT_S
    # Only the leader works with the database; a standby reads the lease alone.
    assert leading["etfarm_database_connections"] >= 1.0 and leading["etfarm_database_connections_lost_total"] == 0.0
    assert leading["etfarm_database_round_trips_total"] > leading['etfarm_database_seconds_count{kind="write"}'] > 0.0
    assert "etfarm_database_connections" not in standing


async def test_the_audit_log_names_the_address_of_who_called_a_standby(servers: Servers) -> None:
    leader, standby = servers.servers
    with link_to(standby.address, "127.0.0.2") as caller, link_to(leader.address, "127.0.0.3") as direct:
        for name, address in (("via-standby", caller.address), ("direct", direct.address)):
            async with open_channel(Access(address)) as channel:
                await project_pb2_grpc.ProjectServiceStub(channel).Create(project_pb2.CreateProjectRequest(name=name))
    peers = {}
    async with open_channel(Access(standby.address)) as channel, asyncio.timeout(WAIT_S):
        while len(peers) < 2:  # the log is written after a moment
            listed = await audit_pb2_grpc.AuditServiceStub(channel).List(
                audit_pb2.ListAuditEntriesRequest(action="ProjectService.Create")
            )
            peers = {entry.subject: entry.peer for entry in listed.entries}
            await asyncio.sleep(0.05)
    assert peers == {"via-standby": "127.0.0.2", "direct": "127.0.0.3"}


async def test_a_standby_without_tokens_receives_nothing_from_strangers_to_its_leader(
    tmp_path: Path, postgres_databases: PostgresDatabases
) -> None:
    """Only the leader has the token file. The first call shows it: the standby refuses it without a message."""
    (tmp_path / "tokens").touch(mode=0o600)
    (tmp_path / "tokens").write_text(f"ann admin {TOKEN}\n")
    with farm(tmp_path, postgres_databases) as running:
        running.add("--tokens", str(tmp_path / "tokens"))
        standby = running.add()
        async with open_channel(Access(standby.address)) as channel, asyncio.timeout(WAIT_S):
            call = channel.stream_stream("/etfarm.v1.JobService/Get")()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        async with open_channel(Access(standby.address, token=TOKEN)) as channel:
            assert await farm_pb2_grpc.FarmServiceStub(channel).GetServerInfo(farm_pb2.GetServerInfoRequest())
