"""Agents with tokens that fetch a job's files while their server dies: the next one gives them before it is connected to them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from etfarm.client import Farm
from etfarm.v1 import artifact_pb2, artifact_pb2_grpc, common_pb2
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.status import from_rpc_error
from tests.support.farm import Daemon
from tests.support.programs import program
from tests.support.runner import runner_archive
from tests.support.session_ends import Agent

pytestmark = pytest.mark.slow(reason="kills servers with tokens")

PEOPLE = {"root": "admin", "ann": "user", "rack": "agent", "other": "agent"}
TOKENS = {name: f"token-of-{name}-0123456789" for name in PEOPLE}


class Restarted:
    """A server with tokens that is killed and started again at its address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokens = folder / "tokens"
        self._tokens.touch(mode=0o600)
        self._tokens.write_text("".join(f"{name} {role} {TOKENS[name]}\n" for name, role in PEOPLE.items()))
        self.address = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        """Start it, at the address that it had."""
        self.daemon = Daemon(
            ["serve", "--listen", self.address, "--data", str(self._folder / "data"), "--no-bundle", "--no-prewarm",
             "--exit-with-stdin", "--tokens", str(self._tokens)],
            self._folder / "serve.log",
        )  # fmt: skip
        self.daemon.start()
        self.address = self.daemon.expect("listening on").rpartition(" ")[2]

    def farm(self, name: str) -> Farm:
        """Return a client with a token."""
        return Farm(self.address, token=TOKENS[name])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Restarted]:
    restarted = Restarted(tmp_path)
    with restarted.farm("root") as farm:
        farm.add_bundle(runner_archive())
    yield restarted
    assert restarted.daemon.stop() == 0


async def fetch(address: str, name: str, artifact: common_pb2.Artifact) -> bytes:
    """Download an artifact with a token."""
    async with open_channel(Access(address, TOKENS[name])) as channel:
        call = artifact_pb2_grpc.ArtifactServiceStub(channel).Download(
            artifact_pb2.DownloadArtifactRequest(digest=artifact.digest)
        )
        return b"".join([chunk.data async for chunk in call])


async def test_an_agent_fetches_before_the_next_server_knows_its_connection(server: Restarted) -> None:
    path = program("add").path
    async with open_channel(Access(server.address, TOKENS["rack"])) as channel:
        agent = Agent(channel, "board")
        assert (await agent.stream.read()).HasField("welcome")
        with server.farm("ann") as farm:
            job = await asyncio.to_thread(farm.bench, str(path))
            start = await agent.started()
        agent.close()
    server.daemon.kill9()
    server.start()
    artifact = start.candidates[0].program.pte
    assert await fetch(server.address, "rack", artifact) == path.read_bytes()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await fetch(server.address, "other", artifact)
    assert from_rpc_error(refused.value, server="here").reason == "ARTIFACT_NOT_OF_ATTEMPT"
    async with open_channel(Access(server.address, TOKENS["rack"])) as channel:
        again = Agent(channel, "board", active=[start.attempt_id])
        again.ended(start, "OUT_OF_LUCK", common_pb2.FAULT_USER)
        with server.farm("ann") as farm:
            (report,) = await asyncio.to_thread(lambda: farm.job(job.id).result().reports)
        again.close()
    assert report.error is not None and report.error.reason == "OUT_OF_LUCK"
