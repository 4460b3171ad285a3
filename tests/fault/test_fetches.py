"""Agents with tokens that fetch a job's files while their server dies: the next one gives them before it is connected to them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from etfarm.v1 import artifact_pb2, artifact_pb2_grpc, common_pb2
from etfarm.wire.channel import Access, open_channel
from tests.support.credentials import OTHER, RACK, Credentials
from tests.support.farm import FarmProcess
from tests.support.programs import program
from tests.support.refusals import refusal
from tests.support.session_ends import Agent

pytestmark = pytest.mark.slow(reason="kills servers with tokens")


async def fetch(access: Access, artifact: common_pb2.Artifact) -> bytes:
    """Download an artifact as somebody."""
    async with open_channel(access) as channel:
        call = artifact_pb2_grpc.ArtifactServiceStub(channel).Download(
            artifact_pb2.DownloadArtifactRequest(digest=artifact.digest)
        )
        return b"".join([chunk.data async for chunk in call])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FarmProcess]:
    with FarmProcess(tmp_path) as running:
        yield running.start(agents=0)


async def test_an_agent_fetches_before_the_next_server_knows_its_connection(
    server: FarmProcess, credentials: Credentials
) -> None:
    path, rack = program("add").path, credentials.access(server.address, RACK)
    async with open_channel(rack) as channel:
        agent = Agent(channel, "board")
        assert (await agent.stream.read()).HasField("welcome")
        with server.client() as farm:
            job = await asyncio.to_thread(farm.bench, str(path))
            start = await agent.started()
        agent.close()
    server.kill9()
    await asyncio.to_thread(server.restart)
    artifact = start.candidates[0].program.pte
    assert await fetch(rack, artifact) == path.read_bytes()
    assert (await refusal(fetch(credentials.access(server.address, OTHER), artifact))).reason == "ARTIFACT_NOT_OF_ATTEMPT"
    async with open_channel(rack) as channel:
        again = Agent(channel, "board", active=[start.attempt_id])
        again.ended(start, "OUT_OF_LUCK", common_pb2.FAULT_USER)
        with server.client() as farm:
            (report,) = await asyncio.to_thread(lambda: farm.job(job.id).result().reports)
        again.close()
    assert report.error is not None and report.error.reason == "OUT_OF_LUCK"
