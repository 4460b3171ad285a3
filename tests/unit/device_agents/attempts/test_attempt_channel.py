"""The channel of an attempt to the farm, which is opened as persistently as artifacts are transferred."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from etfarm.device_agents.attempts.transfers import attempt_channel
from etfarm.device_agents.config import AgentConfig
from etfarm.v1.farm_pb2 import GetServerInfoRequest
from etfarm.v1.farm_pb2_grpc import FarmServiceStub
from tests.support.farm_servers import FarmServer, Site
from tests.support.refusals import refuses


async def test_a_server_that_proves_nothing_is_asked_again_until_the_farm_is_back(tmp_path: Path) -> None:
    site = Site(tmp_path)
    other, own = FarmServer(site, token="etf_of-another"), FarmServer(site)

    async def ask() -> str:
        config = AgentConfig(site.access(other.address), "board", tmp_path, retry_first_s=0.01, retry_last_s=0.05)
        async with attempt_channel(config, 30, 60) as own:
            return (await FarmServiceStub(own.channel).GetServerInfo(GetServerInfoRequest(), timeout=20)).version

    async with other.running() as address:
        asking = asyncio.create_task(ask())
        while not other.proofs and not asking.done():  # noqa: ASYNC110 - the change has no event
            await asyncio.sleep(0.01)
    own.address = address
    async with own.running():
        assert await asking == address
    assert other.proofs and not other.tokens


@pytest.mark.remedy("TRANSFER_TIMED_OUT")
async def test_the_time_of_an_attempt_ends_as_that_of_a_transfer(tmp_path: Path) -> None:
    site = Site(tmp_path)
    async with FarmServer(site, token="etf_of-another").running() as address:
        config = AgentConfig(site.access(address), "board", tmp_path, retry_first_s=0.01, retry_last_s=0.05)
        with refuses("TRANSFER_TIMED_OUT"):
            async with attempt_channel(config, 0.2, 60):
                pass
    async with FarmServer(site).running() as address:  # over a link that leads to its farm
        config = AgentConfig(site.access(address), "board", tmp_path, retry_first_s=0.01, retry_last_s=0.05)
        async with attempt_channel(config, 30, 60) as own:
            assert own.channel
