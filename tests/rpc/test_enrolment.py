"""`etfarm agent` as a real process that enrolls at a real server, and its use of the token afterwards."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from etfarm.v1 import agent_pb2, agent_pb2_grpc, common_pb2, token_pb2, token_pb2_grpc
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.names import PROTOCOL_VERSION
from etfarm.wire.status import from_rpc_error
from tests.support.agent import Server
from tests.support.farm import START_S, Daemon, private_file, serve
from tests.support.runner import know_own_runners

pytestmark = pytest.mark.slow(reason="starts servers and agents that enrol")

ADMIN = "token-of-root-0123456789"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("enrolment")
    tokens = private_file(folder / "tokens", f"root admin {ADMIN}\n")
    with serve(folder, "--tokens", str(tokens)) as daemon:
        yield daemon.expect("listening on").rpartition(" ")[2]


async def enrolment_token(address: str, name: str) -> str:
    """Return an enrolment token as `etfarm tokens create NAME --agent` creates it."""
    async with open_channel(Access(address, ADMIN)) as channel:
        request = token_pb2.CreateTokenRequest(principal=name, role=common_pb2.ROLE_AGENT, enrolment=True)
        return (await token_pb2_grpc.TokenServiceStub(channel).Create(request)).secret


async def agents_of(address: str, principal: str) -> list[agent_pb2.Agent]:
    async with open_channel(Access(address, ADMIN)) as channel:
        listed = await agent_pb2_grpc.AgentServiceStub(channel).ListAgents(agent_pb2.ListAgentsRequest())
    return [agent for agent in listed.agents if agent.principal == principal]


def agent_of(folder: Path, address: str, token: str = "") -> Daemon:
    """Return an agent that is not started yet; without a token, ETFARM_TOKEN is not set."""
    know_own_runners(folder / "agent")
    daemon = Daemon(
        ["agent", "--server", address, "--data", str(folder / "agent"), "--name", "board", "--exit-with-stdin"],
        folder / "agent.log", {"ETFARM_TOKEN": token}, executes=True,
    )  # fmt: skip
    if not token:
        del daemon._environment["ETFARM_TOKEN"]
    return daemon


async def test_an_agent_enrolls_once_and_reconnects_with_its_stored_token(address: str, tmp_path: Path) -> None:
    one_time = await enrolment_token(address, "board-1")
    first = agent_of(tmp_path, address, one_time)
    await asyncio.to_thread(first.start)
    await asyncio.to_thread(first.expect, "connected to")
    try:
        kept = tmp_path / "agent" / "token"
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
        token = json.loads(kept.read_text())["token"]
        assert token.startswith("etf_") and one_time not in kept.read_text()
        assert one_time not in Path(f"/proc/{first.pid}/environ").read_bytes().decode()
        (bound,) = await agents_of(address, "board-1")
        assert (bound.connected, len(bound.device_ids)) == (True, 1)
    finally:
        assert await asyncio.to_thread(first.stop) == 0
    # Neither the used token again nor none at all keeps it from its own.
    for environment in ("", one_time):
        again = agent_of(tmp_path, address, environment)
        await asyncio.to_thread(again.start)
        await asyncio.to_thread(again.expect, "connected to")
        assert await asyncio.to_thread(again.stop) == 0
    assert json.loads(kept.read_text())["token"] == token
    assert len(await agents_of(address, "board-1")) == 1
    assert token not in (tmp_path / "agent.log").read_text()


async def test_a_second_agent_cannot_enroll_with_a_used_token(address: str, tmp_path: Path) -> None:
    one_time = await enrolment_token(address, "board-2")
    for name, folder in (("first", tmp_path / "first"), ("second", tmp_path / "second")):
        folder.mkdir()
        agent = agent_of(folder, address, one_time)
        await asyncio.to_thread(agent.start)
        if name == "first":
            await asyncio.to_thread(agent.expect, "connected to")
            assert await asyncio.to_thread(agent.stop) == 0
            continue
        assert agent.process is not None
        try:
            assert await asyncio.to_thread(agent.process.wait, START_S) != 0
        finally:
            await asyncio.to_thread(agent.stop)
        assert "was used already" in agent.log.read_text()
        assert not (folder / "agent" / "token").exists()
    assert len(await agents_of(address, "board-2")) == 1


@pytest.mark.remedy("PROTOCOL_UNSUPPORTED")
async def test_an_agent_that_the_server_does_not_understand_keeps_its_enrolment_token(address: str) -> None:
    one_time = await enrolment_token(address, "board-3")
    async with open_channel(Access(address, one_time)) as channel:
        enroll = agent_pb2_grpc.AgentServiceStub(channel).Enroll
        later = agent_pb2.EnrollAgentRequest(agent_id="b3", protocol_version=PROTOCOL_VERSION + 2, agent_version="9.0")
        later.oldest_protocol_version = PROTOCOL_VERSION + 1
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await enroll(later)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        error = from_rpc_error(refused.value, server=address)
        assert error.reason == "PROTOCOL_UNSUPPORTED" and "(etfarm 9.0)" in error.message
        later.oldest_protocol_version = PROTOCOL_VERSION
        answer = await enroll(later)
        assert answer.principal == "board-3"


class Stranger(Server):
    """Another server, which records the metadata of its callers."""

    def __init__(self) -> None:
        super().__init__()
        self.metadata: list[str] = []

    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[agent_pb2.ServerMessage]:
        self.metadata += [str(value) for _, value in context.invocation_metadata()]
        async for message in super().Connect(request_iterator, context):
            yield message


async def test_the_token_is_sent_to_no_other_server(address: str, tmp_path: Path) -> None:
    agent = agent_of(tmp_path, address, await enrolment_token(address, "board-3"))
    await asyncio.to_thread(agent.start)
    await asyncio.to_thread(agent.expect, "connected to")
    assert await asyncio.to_thread(agent.stop) == 0
    token = json.loads((tmp_path / "agent" / "token").read_text())["token"]
    stranger = Stranger()
    await stranger.start()
    try:
        moved = agent_of(tmp_path, stranger.address)
        await asyncio.to_thread(moved.start)
        await stranger.connected()
        assert stranger.metadata and not any(token in value for value in stranger.metadata)
        assert await asyncio.to_thread(moved.stop) == 0
    finally:
        await stranger.stop()
    # It is still the first server's.
    back = agent_of(tmp_path, address)
    await asyncio.to_thread(back.start)
    await asyncio.to_thread(back.expect, "connected to")
    assert await asyncio.to_thread(back.stop) == 0
