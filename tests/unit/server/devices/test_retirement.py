"""A retired device does not come back, and what it runs ends first."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from etfarm.server.access.identities import Identities
from etfarm.server.access.tokens import TokenTable, key_of
from etfarm.server.devices.errors import DeviceNotFound
from etfarm.server.devices.registry import Registry
from etfarm.server.devices.retirement import Retired, Retirement
from etfarm.server.devices.runs import AttemptLost
from etfarm.server.devices.session import AgentSession
from etfarm.server.state.engine import Database
from etfarm.v1.agent_pb2 import Hello
from etfarm.v1.common_pb2 import ROLE_ADMIN, ROLE_AGENT, Principal
from tests.support.golden import Golden
from tests.support.refusals import refuses
from tests.support.registries import RegistryWorld, board
from tests.support.waiting import becomes

RACK = Principal(name="rack", role=ROLE_AGENT)
SOON_S = 10.0


class World(RegistryWorld):
    """The parts of a server that a retirement changes."""

    def __init__(self, folder: Path, database: Database) -> None:
        self.tokens = TokenTable(database, self.now)
        self.identities = Identities(database, lambda agent_id: self.registry.is_agent_known(agent_id), self.now)
        super().__init__(folder, database)
        self.retirement = Retirement(self.registry, self.runs, self.identities, self.tokens)

    def new_registry(self) -> Registry:
        return Registry(self.database, self.bundles, self.runs, self.now, self.identities.principal_of)

    async def enrol(self, agent: str, *, is_known: bool = False) -> bytes:
        """Exchange a one-time token of the rack; return the key of the agent's own token."""
        _, secret = await self.tokens.create("rack", ROLE_AGENT, by="root", enrolment=True)
        enrolment = self.tokens.find(key_of(secret))
        assert enrolment is not None
        own = await self.tokens.enroll(enrolment, agent, is_known=is_known)
        self.identities.enrolled(agent, "rack")
        return key_of(own)

    async def admit(self, agent: str, *devices: str, **hello: list[str]) -> AgentSession:
        await self.identities.admit(agent, RACK)
        return await self.connect(*devices, agent=agent, principal="rack", **hello)

    async def running(self) -> tuple[bytes, AgentSession]:
        """Connect an agent with a device that runs something; return the key of its token, and its connection."""
        own = await self.enrol("a1")
        session = await self.admit("a1", "pi")
        self.runs.begin("run", "pi", lambda _: None, sent=True)
        return own, session

    async def retire(self, key: str, *, at_once: bool = False, drain_s: float = 60.0) -> Retired:
        return await self.retirement.retire(key, at_once=at_once, drain_s=drain_s, principal="root")


@pytest.fixture
def world(tmp_path: Path, database: Database) -> World:
    return World(tmp_path, database)


async def test_a_retirement_waits_for_the_runs_then_refuses_the_agent_with_its_token(golden: Golden, world: World) -> None:
    own, session = await world.running()
    retiring = asyncio.create_task(world.retire("pi"))
    done, _ = await asyncio.wait([retiring], timeout=0.2)
    assert not done and world.registry.get("pi").drain.principal == "root"
    assert world.tokens.find(own) is not None and session.is_alive()
    world.runs.end("run")
    async with asyncio.timeout(SOON_S):
        retired = await retiring
    assert (retired.device.id, len(retired.revoked), retired.others, retired.ended) == ("pi", 1, [], [])
    assert world.tokens.find(own) is None and not session.is_alive()
    with pytest.raises(DeviceNotFound):
        world.registry.get("pi")
    for farm in (world.identities, Identities(world.database, lambda _: False, world.now)):
        await farm.load()  # also after a restart
        for caller in (RACK, Principal(name="root", role=ROLE_ADMIN)):
            with refuses("AGENT_RETIRED") as refused:
                await farm.admit("a1", caller)
    golden.check(refused.value)


@pytest.mark.remedy("AGENT_RETIRED")
@pytest.mark.parametrize("how", ["bound", "enrolled"])
async def test_a_retired_agent_is_admitted_again_once_an_admin_wants_it(world: World, how: str) -> None:
    await world.enrol("a1")
    await world.admit("a1", "pi")
    await world.retire("pi")
    with refuses("AGENT_RETIRED"):
        await world.admit("a1", "pi")
    if how == "bound":
        assert (await world.identities.bind("a1", "rack", by="root")).is_retired  # the answer says that it was
        assert not (await world.identities.bind("a1", "rack", by="root")).is_retired
    else:
        await world.enrol("a1")
    await world.identities.load()
    await world.admit("a1", "pi")
    assert not world.registry.get("pi").HasField("drain")


async def test_at_once_ends_the_runs_and_asks_the_agent_to_cancel_them(world: World) -> None:
    _, session = await world.running()
    retiring = asyncio.create_task(world.retire("pi", at_once=True))
    async with asyncio.timeout(SOON_S):
        with pytest.raises(AttemptLost, match="was retired"):
            await world.runs.result("run")
        world.runs.end("run")
        assert (await retiring).ended == ["run"]
        sent = [message async for message in session.outgoing()]
    assert [message.cancel_run.attempt_id for message in sent] == ["run"]


async def test_a_device_whose_runs_do_not_end_stays_drained(golden: Golden, world: World) -> None:
    own, _ = await world.running()
    with golden.refuses("DEVICES_BUSY"):
        await world.retire("pi", drain_s=0.0)
    assert world.registry.get("pi").HasField("drain") and world.tokens.find(own) is not None


@pytest.mark.remedy("DEVICES_BUSY")
async def test_a_device_that_ends_nothing_at_once_is_not_forgotten_yet(golden: Golden, world: World) -> None:
    await world.running()
    with golden.refuses("DEVICES_BUSY"):
        await world.retire("pi", at_once=True, drain_s=0.0)
    # The remedy: the command again.
    world.runs.end("run")
    assert (await world.retire("pi", at_once=True)).device.id == "pi"


async def test_the_agent_that_a_device_has_in_the_end_is_retired(world: World) -> None:
    former, session = await world.running()
    retiring = asyncio.create_task(world.retire("pi"))
    await becomes(lambda: world.registry.get("pi").HasField("drain"), pause_s=0)
    session.end()
    await world.registry.disconnect(session)
    own = await world.enrol("a2")
    moved = await world.admit("a2", "pi", active_attempts=["run"])
    world.runs.end("run")
    async with asyncio.timeout(SOON_S):
        assert (await retiring).device.agent_id == "a2"
    assert world.tokens.find(own) is None and world.tokens.find(former) is not None and not moved.is_alive()


async def test_an_agent_that_is_retired_while_it_waits_to_be_accepted_is_not_registered(world: World) -> None:
    await world.enrol("a1")
    await world.admit("a1", "pi")
    await world.retire("pi")
    session, hello = world.session("a1", principal="rack"), Hello(agent_id="a1", devices=[board("pi")])
    with refuses("AGENT_RETIRED"):
        await world.registry.connect(session, hello, lambda: world.identities.require_not_retired("a1"))
    assert world.registry.session_of_agent("a1") is None
    with pytest.raises(DeviceNotFound):
        world.registry.get("pi")


async def test_an_agent_with_other_devices_keeps_them_and_its_token(world: World) -> None:
    own = await world.enrol("a1")
    session = await world.admit("a1", "pi", "xl")
    retired = await world.retire("pi")
    assert (retired.revoked, retired.others) == ([], ["xl"])
    assert world.tokens.find(own) is not None and session.is_alive()
    assert [device.id for device in world.registry.devices()] == ["xl"]


async def test_an_offline_device_of_an_unbound_agent_is_retired(world: World) -> None:
    session = world.session("a1", is_admin=True)
    await world.registry.connect(session, Hello(agent_id="a1", devices=[board("pi")]))
    await world.registry.disconnect(session)
    assert (await world.retire("pi")).revoked == []
    with refuses("AGENT_RETIRED"):
        await world.identities.admit("a1", RACK)


@pytest.mark.remedy("AGENT_HAS_DEVICES")
async def test_only_an_agent_without_devices_is_removed(golden: Golden, world: World) -> None:
    own = await world.enrol("a1")
    await world.admit("a1", "pi")
    with golden.refuses("AGENT_HAS_DEVICES"):
        await world.retirement.remove_agent("rack")
    assert len((await world.retire("pi")).revoked) == 1
    identity, _ = await world.retirement.remove_agent("rack")
    assert identity.agent_id == "a1"
    assert world.tokens.find(own) is None and world.identities.list({}) == []
    with refuses("AGENT_NOT_FOUND"):
        await world.retirement.remove_agent("rack")


@pytest.mark.remedy("AGENT_AMBIGUOUS")
async def test_a_principal_with_several_agents_names_none(golden: Golden, world: World) -> None:
    for agent in ("a1", "a2"):
        await world.admit(agent)
    with golden.refuses("AGENT_AMBIGUOUS"):
        await world.retirement.remove_agent("rack")
    assert (await world.retirement.remove_agent("a2"))[0].agent_id == "a2"
    assert [identity.agent_id for identity in world.identities.list({})] == ["a1"]
