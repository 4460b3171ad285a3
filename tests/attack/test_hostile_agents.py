"""Agents with valid tokens that flood, claim and lie, against a real server: what they cost, and whose fault it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

import etfarm.wire.channel
from etfarm.client import Farm
from etfarm.v1 import agent_pb2
from etfarm.wire.channel import CLIENT_OPTIONS, Access, open_channel
from tests.support.farm import Daemon
from tests.support.runner import runner_archive
from tests.support.session_ends import Agent

pytestmark = pytest.mark.slow(reason="attacks a real server with agents")

WAIT_S = 120.0
PEOPLE = {"root": "admin", "ann": "user", "thief": "agent"}
TOKENS = {name: f"token-of-{name}-0123456789" for name in PEOPLE}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("hostile")
    tokens = folder / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text("".join(f"{name} {role} {TOKENS[name]}\n" for name, role in PEOPLE.items()))
    daemon = Daemon(
        ["serve", "--listen", "127.0.0.1:0", "--data", str(folder / "data"), "--no-bundle", "--no-prewarm", "--exit-with-stdin",
         "--tokens", str(tokens)],
        folder / "serve.log",
    )  # fmt: skip
    daemon.start()
    try:
        address = daemon.expect("listening on").rpartition(" ")[2]
        with Farm(address, token=TOKENS["root"]) as farm:
            farm.add_bundle(runner_archive())
        yield address
    finally:
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log.read_text()


@pytest.fixture
async def channels(server: str) -> AsyncIterator[dict[str, grpc.aio.Channel]]:
    opened = {name: open_channel(Access(server, token)) for name, token in TOKENS.items()}
    yield opened
    for channel in opened.values():
        await channel.close()


async def is_welcome(agent: Agent) -> None:
    async with asyncio.timeout(WAIT_S):
        message = await agent.stream.read()
    assert isinstance(message, agent_pb2.ServerMessage) and message.HasField("welcome"), message


async def test_an_agent_that_does_not_read_its_answers_is_not_read_either(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise gRPC's own window grows with what it receives.
    monkeypatch.setattr(etfarm.wire.channel, "CLIENT_OPTIONS", [*CLIENT_OPTIONS, ("grpc.http2.bdp_probe", 0)])
    sent, acknowledged = 9_000, 0
    async with open_channel(Access(server, TOKENS["thief"])) as channel:
        deaf = Agent(channel, "deaf", devices=[])
        await is_welcome(deaf)
        for _ in range(sent):
            deaf.send(agent_pb2.AgentMessage(run_result=agent_pb2.RunResult(attempt_id="\N{PILE OF POO}" * 1_000)))
        deaf.outgoing.put_nowait(None)
        # It counts as dead after 15 s, as if it had sent nothing.
        await asyncio.sleep(25)
        async with asyncio.timeout(WAIT_S):
            while isinstance(message := await deaf.stream.read(), agent_pb2.ServerMessage):
                acknowledged += 1
                assert len(message.ack.attempt_id) <= 100
    assert 0 < acknowledged < sent / 2
