"""The agent as a real process: connections, data folder, shutdown, and results that survive a restart."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from etfarm.v1 import job_pb2
from etfarm.wire.errors import Fault, Kind, error_of
from etfarm.wire.names import PROTOCOL_VERSION
from tests.support.agent import LONG, WAIT_S, Launch, Server, gone, join, launch, server
from tests.support.farm import PROMPTLY_S, wait_until

pytestmark = pytest.mark.slow(reason="starts agents' processes, and waits for their deadlines")

__all__ = ["join", "launch", "server"]


async def test_an_agent_registers_its_machine_and_sends_heartbeats(server: Server, join: Launch) -> None:
    agent, connection = await join("--name", "board-7", "--label", "rack=3")
    hello, device = connection.hello, connection.hello.devices[0]
    assert hello.protocol_version == PROTOCOL_VERSION == 4
    assert (device.name, device.labels["rack"], device.agent_id) == ("board-7", "3", hello.agent_id)
    assert device.arch == os.uname().machine
    assert device.cores == len(os.sched_getaffinity(0))
    assert device.memory_bytes == psutil.virtual_memory().total
    assert sum(len(cluster.cpus) for cluster in device.clusters) == device.cores
    beat = await connection.until(lambda m: m.HasField("heartbeat") and len(connection.received) > 2)
    reported = beat.heartbeat.telemetry[device.id]
    assert 0 < reported.memory_available_bytes < device.memory_bytes
    assert 0 < reported.agent_rss_bytes < 50 << 20, "the agent must stay small"
    assert await agent.line() == f"etfarm agent: connecting to {server.address}"
    assert await agent.line() == f"etfarm agent: connected to {server.address} as board-7 ({device.id})"


async def test_artifacts_are_fetched_once_across_processes(server: Server, join: Launch) -> None:
    for attempt in ("a1", "a2"):
        agent, connection = await join()
        connection.start(attempt, server.candidate("add"), deadline_s=60)
        assert not (await connection.result(attempt)).candidates[0].HasField("error")
        agent.process.terminate()
        assert await agent.ended() == 0
    assert len(server.downloads) == len(set(server.downloads)) == 3


async def test_a_run_survives_a_server_restart(server: Server, join: Launch) -> None:
    _, connection = await join()
    connection.start("a1", server.candidate("conv"), measurement=job_pb2.Measurement(min_time_s=8), deadline_s=60)
    await connection.phase("TIMED")
    await server.stop()
    await server.start()
    again = await server.connected()
    assert again.hello.active_attempts == ["a1"]
    (cell,) = (await again.result("a1")).candidates
    assert not cell.HasField("error") and cell.samples.digest in server.blobs
    assert cell.iterations > 100


async def test_a_result_is_sent_again_until_it_is_acknowledged(
    server: Server, launch: Launch, join: Launch, tmp_path: Path
) -> None:
    agent, connection = await join()
    connection.start("a1", server.candidate("add"), deadline_s=60)
    first = await connection.result("a1")
    await server.stop()
    await server.start()
    second = await server.connected()
    assert second.hello.unacknowledged_attempts == ["a1"] and not second.hello.active_attempts
    assert await second.result("a1") == first
    agent.process.kill()
    await agent.ended()
    agent = await launch()
    third = await server.connected()
    assert third.hello.agent_id == connection.hello.agent_id
    assert third.hello.devices[0].id == connection.hello.devices[0].id
    assert await third.result("a1") == first
    third.ack("a1")
    third.start("a1", server.candidate("add"), deadline_s=60)  # late, and known
    third.start("a2", server.candidate("add"), deadline_s=60)
    await third.result("a2")
    third.ack("a2")
    assert await asyncio.to_thread(wait_until, lambda: not list((tmp_path / "agent" / "results").iterdir()))
    agent.process.terminate()
    await agent.ended()
    await launch()
    assert not (await server.connected()).hello.unacknowledged_attempts


async def test_a_cancelled_result_is_no_longer_sent(server: Server, join: Launch) -> None:
    _, connection = await join()
    connection.start("a1", server.candidate("add"), deadline_s=60)
    await connection.result("a1")
    connection.cancel("a1")
    connection.start("a2", server.candidate("add"), deadline_s=60)
    await connection.result("a2")
    await server.stop()
    await server.start()
    assert (await server.connected()).hello.unacknowledged_attempts == ["a2"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Kind.UNAUTHENTICATED, "BAD_TOKEN"),
        (Kind.PERMISSION_DENIED, "FORBIDDEN"),
        (Kind.ALREADY_EXISTS, "AGENT_CONNECTED"),
        (Kind.FAILED_PRECONDITION, "PROTOCOL_UNSUPPORTED"),
    ],
)
async def test_a_refusal_is_a_single_line_and_exit_code_1(server: Server, launch: Launch, kind: Kind, reason: str) -> None:
    server.refusal = error_of(Fault.USER, reason, "The server does not want you.", "Ask why.", kind=kind)
    agent = await launch(ETFARM_TOKEN="wrong")
    assert await agent.ended() == 1
    assert agent.log.splitlines() == ["etfarm: The server does not want you. Ask why."]


async def test_a_known_agent_retries_while_the_server_holds_its_old_stream(server: Server, launch: Launch) -> None:
    await launch()
    # It counts as known after its first heartbeat: a stream that ends before may be another agent's.
    await (await server.connected()).until(lambda message: message.HasField("heartbeat"))
    await server.stop()
    server.refusal = error_of(Fault.FARM, "AGENT_CONNECTED", "Connected already.", kind=Kind.ALREADY_EXISTS)
    await server.start()
    async with asyncio.timeout(WAIT_S):
        await server.turned_away.wait()
    server.refusal = None
    assert await server.connected()


async def test_an_agent_that_waited_for_the_server_has_a_single_connection(server: Server, launch: Launch) -> None:
    await server.stop()
    agent = await launch()
    assert await agent.line() == f"etfarm agent: connecting to {server.address}"
    assert await asyncio.to_thread(wait_until, lambda: "does not answer" in agent.log)
    await asyncio.sleep(1)  # a few tries more
    await server.start()
    connection = await server.connected()
    # gRPC itself comes back within two seconds where a channel was left over.
    await connection.until(lambda m: len([m for m in connection.received if m.HasField("heartbeat")]) > 15)
    open_ones = [c for c in psutil.Process(agent.process.pid).net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED]
    assert len(open_ones) == 1


async def test_two_agents_cannot_share_a_data_folder(server: Server, launch: Launch, tmp_path: Path) -> None:
    await launch()
    first = await server.connected()
    second = await launch()
    assert await second.ended() == 1
    assert second.log.startswith("etfarm: Another agent uses ") and second.log.count("\n") == 1
    await launch(data=tmp_path / "other")
    other = await server.connected()
    assert other.hello.agent_id != first.hello.agent_id
    assert other.hello.devices[0].id != first.hello.devices[0].id


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "stdin"])
async def test_a_stopped_agent_signs_off_and_leaves_no_processes(server: Server, join: Launch, how: str) -> None:
    agent, connection = await join("--exit-with-stdin")
    connection.start("a1", server.candidate("conv"), measurement=LONG, deadline_s=600)
    await connection.phase("TIMED")
    (runner,) = agent.runners()
    stopped_s = time.monotonic()
    if how == "stdin":
        assert agent.process.stdin is not None
        agent.process.stdin.close()
    else:
        agent.process.send_signal(signal.Signals[how])
    assert await agent.ended() == 0
    assert time.monotonic() - stopped_s < PROMPTLY_S
    await connection.until(lambda m: m.HasField("goodbye"))
    await gone(runner, PROMPTLY_S)


async def test_no_runner_outlives_a_killed_agent(server: Server, launch: Launch, join: Launch) -> None:
    agent, connection = await join()
    connection.start("a1", server.candidate("conv"), measurement=LONG, deadline_s=600)
    await connection.phase("TIMED")
    (runner,) = agent.runners()
    agent.process.kill()
    await gone(runner, PROMPTLY_S)
    await launch()
    assert not (await server.connected()).hello.active_attempts
