"""An agent is offered its upgrade once its devices run nothing, and its devices take runs again afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from etfarm.server.devices.session import AgentSession
from etfarm.server.devices.upgrades import Upgrades
from etfarm.server.state.engine import Database
from etfarm.v1 import agent_pb2, common_pb2
from etfarm.v1.agent_pb2 import Hello, RunResult, UpgradePhase
from etfarm.v1.device_pb2 import Device
from etfarm.wire.names import OLDEST_PROTOCOL_VERSION
from tests.support.refusals import refuses
from tests.support.registries import RegistryWorld

OFFER_0_2 = f"325a0a02753112440a40{'30' * 64}10011a05302e332e30210000000000004e40"
"""The Upgrade that a server of 0.2 sent for the upgrade "u1", a digest of zeros and version 0.3.0."""
INSTALLING_0_2 = "42060a0275311003"
"""The UpgradeProgress of an agent of 0.2."""
OUTCOME_0_2 = "5a0b0a0275311205302e332e30"
"""The end of a Hello of 0.2 after an upgrade."""


def test_the_messages_of_an_upgrade_are_those_of_0_2() -> None:
    wheel = common_pb2.Artifact(digest="0" * 64, size_bytes=1)
    offer = agent_pb2.Upgrade(upgrade_id="u1", wheel=wheel, version="0.3.0", time_limit_s=60)
    assert agent_pb2.ServerMessage(upgrade=offer).SerializeToString().hex() == OFFER_0_2
    installing = agent_pb2.AgentMessage.FromString(bytes.fromhex(INSTALLING_0_2)).upgrade_progress
    assert (installing.upgrade_id, installing.phase) == ("u1", UpgradePhase.UPGRADE_PHASE_INSTALLING)
    outcome = Hello.FromString(bytes.fromhex(OUTCOME_0_2)).upgrade
    assert (outcome.upgrade_id, outcome.version, outcome.HasField("error")) == ("u1", "0.3.0", False)


@pytest.mark.parametrize("is_outdated", [False, True])
async def test_an_upgrade_waits_for_the_runs_and_no_longer(tmp_path: Path, *, is_outdated: bool, database: Database) -> None:
    world = RegistryWorld(tmp_path, database)
    registry, runs = world.registry, world.runs
    upgrades = Upgrades(registry, runs, lambda: "u1")
    hello = Hello(agent_id="agent", devices=[Device(id="pi", name="pi")], allows_upgrade=True)
    version = OLDEST_PROTOCOL_VERSION - is_outdated
    session = world.session(principal="rack", hello=hello, protocol_version=version)
    await registry.connect(session, hello)
    assert (registry.get("pi").problem.reason == "AGENT_OUTDATED") is is_outdated
    runs.begin("a1", "pi", lambda _: None)
    wheel = common_pb2.Artifact(digest="0" * 64, size_bytes=1)
    messages = upgrades.upgrade("agent", wheel, "9.9", drain_s=60, limit_s=60, principal="root")
    async with asyncio.timeout(10):
        assert "1 run on pi" in (await anext(messages)).message
        assert registry.get("pi").HasField("drain")
        assert upgrades.wheels() == {wheel.digest} and upgrades.offers("rack", wheel.digest)
        assert not upgrades.offers("rack", "1" * 64) and not upgrades.offers("other", wheel.digest)
        runs.end("a1")
        assert (await anext(messages)).message == ""
        following = asyncio.ensure_future(anext(messages))
        offer = await anext(aiter(session.outgoing()))
        assert (offer.upgrade.upgrade_id, offer.upgrade.version) == ("u1", "9.9")
        upgrades.connected(Hello(agent_id="agent", upgrade=agent_pb2.UpgradeOutcome(upgrade_id="u1")))
        assert (await following).phase == UpgradePhase.UPGRADE_PHASE_DONE
        assert [message async for message in messages] == []
    assert not registry.get("pi").HasField("drain")
    assert not upgrades.wheels() and not upgrades.offers("rack", wheel.digest), "it is not held any longer"
    await registry.drain("pi", "upgrade of its agent to etfarm 9.9", "root")  # as a server that is killed leaves it
    await Upgrades(registry, runs, lambda: "u2").release()
    assert not registry.get("pi").HasField("drain")
    await registry.drain("pi", "its fan is broken", "root")
    await Upgrades(registry, runs, lambda: "u3").release()
    assert registry.get("pi").drain.reason == "its fan is broken"


@pytest.mark.remedy("AGENT_OUTDATED")
@pytest.mark.parametrize("comes_later", [False, True])
async def test_an_outdated_agent_delivers_no_result(tmp_path: Path, *, comes_later: bool, database: Database) -> None:
    world = RegistryWorld(tmp_path, database)
    registry, runs = world.registry, world.runs
    runs.begin("a1", "phone", lambda _: None, sent=True)
    phone = Device(id="phone", name="phone")
    hello = Hello(agent_id="agent", active_attempts=["a1"], devices=[] if comes_later else [phone])
    session = AgentSession("agent", "", lambda: 0.0, principal="rack", hello=hello, protocol_version=OLDEST_PROTOCOL_VERSION - 1)
    await registry.connect(session, hello)
    if comes_later:
        await registry.update(session, phone)
    assert registry.get("phone").problem.reason == "AGENT_OUTDATED"
    runs.deliver(RunResult(attempt_id="a1", device_id="phone"), "rack")
    with refuses("ATTEMPT_LOST"):
        await runs.result("a1")
    await registry.end_agent("agent")
    await world.connect(phone)
    assert registry.get("phone").problem.reason != "AGENT_OUTDATED", "an agent of the server's version serves it"


@pytest.mark.remedy("AGENT_OFFLINE", "UPGRADE_NOT_ALLOWED", "UPGRADE_RUNNING", "UPGRADE_FAILED")
async def test_an_upgrade_that_is_refused_is_accepted_once_its_remedy_was_applied(tmp_path: Path, database: Database) -> None:
    world = RegistryWorld(tmp_path, database)
    ids = map(str, range(9))
    upgrades = Upgrades(world.registry, world.runs, lambda: next(ids))

    def upgrade() -> AsyncIterator[agent_pb2.UpgradeAgentProgress]:
        wheel = common_pb2.Artifact(digest="0" * 64, size_bytes=1)
        return upgrades.upgrade("agent", wheel, "9.9", drain_s=60, limit_s=60, principal="root")

    async def start(*, allows: bool) -> None:
        hello = Hello(agent_id="agent", allows_upgrade=allows)
        await world.registry.connect(world.session(principal="rack", hello=hello), hello)

    async with asyncio.timeout(10):
        with refuses("AGENT_OFFLINE"):
            await anext(upgrade())
        await start(allows=False)
        with refuses("UPGRADE_NOT_ALLOWED"):
            await anext(upgrade())
        await world.registry.end_agent("agent")
        await start(allows=True)
        first = upgrade()
        await anext(first)
        with refuses("UPGRADE_RUNNING"):
            await anext(upgrade())
        following = asyncio.ensure_future(anext(first))
        await asyncio.sleep(0)
        failed = agent_pb2.UpgradeOutcome(upgrade_id="0", version="9.9", error=common_pb2.Error(message="No disk."))
        upgrades.connected(Hello(agent_id="agent", upgrade=failed))
        with refuses("UPGRADE_FAILED", match="No disk"):
            await following
        second = upgrade()
        await anext(second)
        following = asyncio.ensure_future(anext(second))
        await asyncio.sleep(0)
        upgrades.connected(Hello(agent_id="agent", upgrade=agent_pb2.UpgradeOutcome(upgrade_id="1")))
        assert (await following).phase == UpgradePhase.UPGRADE_PHASE_DONE
