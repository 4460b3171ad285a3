"""Labels and drains that admins set for devices, over reconnections and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from etfarm.server.artifacts.store import Store
from etfarm.server.devices.bundles import Bundles
from etfarm.server.devices.errors import DeviceNotFound
from etfarm.server.devices.registry import Registry
from etfarm.server.devices.runs import Runs
from etfarm.server.devices.session import AgentSession
from etfarm.server.devices.settings import MAX_LABELS
from etfarm.v1.agent_pb2 import Hello
from etfarm.v1.device_pb2 import Device, DeviceDrain, DeviceState
from etfarm.wire import selectors
from tests.support.databases import new_database
from tests.support.refusals import refuses

pytestmark = pytest.mark.usefixtures("each_database")

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
IDLE, DRAINING, OFFLINE = (
    DeviceState.DEVICE_STATE_IDLE, DeviceState.DEVICE_STATE_DRAINING, DeviceState.DEVICE_STATE_OFFLINE
)  # fmt: skip


class World:
    """A registry, and what a restarted server would know."""

    def __init__(self, folder: Path) -> None:
        self.database = new_database(folder / "farm.sqlite")
        self.runs = Runs(3600)
        self.bundles = Bundles(Store(folder, self.database), self.database, folder)
        self.registry = self.new_registry()
        self.changes = 0

    def new_registry(self) -> Registry:
        registry = Registry(self.database, self.bundles, self.runs, lambda: NOON)
        registry.on_change(self._count)
        return registry

    def _count(self) -> None:
        self.changes += 1

    async def restart(self) -> None:
        self.registry = self.new_registry()
        await self.registry.load()

    async def connect(self, **labels: str) -> AgentSession:
        session = AgentSession("agent", "", lambda: 0.0)
        device = Device(id="pi", name="board-pi", arch="aarch64", labels=labels)
        await self.registry.connect(session, Hello(agent_id="agent", devices=[device]))
        return session

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.registry.get("pi").labels)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    created = World(tmp_path)
    await created.database.open()
    yield created
    created.database.close()


async def test_labels_take_precedence_over_the_agents_and_stay(world: World) -> None:
    await world.connect(rack="1", lab="north")
    shown = await world.registry.label("board-pi", {"rack": "3", "owner": "ann"}, ["lab"])
    assert dict(shown.labels) == {"rack": "3", "owner": "ann"} == world.labels
    await world.restart()
    assert world.registry.get("pi").state == OFFLINE
    assert world.labels == {"rack": "3", "owner": "ann"}
    await world.connect(rack="2", lab="south", floor="4")
    assert world.labels == {"rack": "3", "owner": "ann", "floor": "4"}
    await world.registry.label("pi", {"lab": "east"}, ["owner", "absent"])
    assert world.labels == {"rack": "3", "floor": "4", "lab": "east"}
    devices, _ = await world.registry.page(selectors.parse("label.rack=3"), 0, 10, 1 << 20)
    assert [device.id for device in devices] == ["pi"]


@pytest.mark.parametrize(
    ("labels", "removed"),
    [({"a b": "1"}, []), ({"": "1"}, []), ({"k" * 101: "1"}, []), ({"k": "line\nline"}, []), ({"k": "1"}, ["k"]), ({}, ["a=b"])],
)
async def test_a_label_that_is_not_valid_changes_nothing(world: World, labels: dict[str, str], removed: list[str]) -> None:
    await world.connect(rack="1")
    changes = world.changes
    with refuses("BAD_LABEL"):
        await world.registry.label("pi", labels, removed)
    assert (world.labels, world.changes) == ({"rack": "1"}, changes)


@pytest.mark.remedy("BAD_LABEL")
async def test_a_device_has_a_limited_number_of_labels(world: World) -> None:
    await world.connect(rack="1")
    await world.registry.label("pi", {f"k{index}": "" for index in range(MAX_LABELS - 1)}, [])
    with refuses("BAD_LABEL", match="more than 64"):
        await world.registry.label("pi", {"another": ""}, [])
    await world.registry.label("pi", {"another": ""}, ["k0"])
    assert len(world.labels) == MAX_LABELS


async def test_labels_of_admins_can_be_set_and_removed_again_and_again(world: World) -> None:
    await world.connect(rack="1")
    for index in range(MAX_LABELS + 1):
        await world.registry.label("pi", {f"k{index}": ""}, [])
        await world.registry.label("pi", {}, [f"k{index}"])
    assert world.labels == {"rack": "1"}


async def test_a_change_that_a_forgotten_device_overtakes_leaves_nothing(world: World) -> None:
    session = await world.connect()
    await world.registry.disconnect(session)
    changes = [asyncio.create_task(world.registry.drain("pi", f"reason {index}", "ann")) for index in range(2)]
    await asyncio.sleep(0)  # both have found the device
    await world.registry.forget("pi")
    await asyncio.gather(*changes, return_exceptions=True)
    await world.connect()
    assert world.registry.get("pi").state == IDLE
    await world.restart()
    await world.connect()
    assert world.registry.get("pi").state == IDLE


async def test_a_drained_device_takes_nothing_new_until_it_is_undrained(world: World) -> None:
    session = await world.connect()
    world.runs.begin("a1", "pi", lambda _: None)
    changes = world.changes
    shown = await world.registry.drain("pi", "new cable", "ann")
    expected = DeviceDrain(reason="new cable", principal="ann")
    expected.start_time.FromDatetime(NOON)
    assert (shown.state, shown.drain, shown.attempt_id) == (DRAINING, expected, "a1"), "what it runs continues"
    assert world.changes > changes
    await world.registry.disconnect(session)
    await world.restart()
    assert (world.registry.get("pi").state, world.registry.get("pi").drain) == (OFFLINE, expected)
    await world.connect()
    assert world.registry.get("pi").state == DRAINING
    assert (await world.registry.drain("pi", "", "bob")).drain.principal == "bob", "the last reason counts"
    world.runs.end("a1")
    shown = await world.registry.undrain("pi")
    assert (shown.state, shown.HasField("drain")) == (IDLE, False)
    await world.restart()
    await world.connect()
    assert world.registry.get("pi").state == IDLE


async def test_an_agent_cannot_drain_its_device(world: World) -> None:
    session = AgentSession("agent", "", lambda: 0.0)
    await world.registry.connect(session, Hello(agent_id="agent", devices=[Device(id="pi", drain=DeviceDrain(reason="x"))]))
    assert (world.registry.get("pi").state, world.registry.get("pi").HasField("drain")) == (IDLE, False)


async def test_what_was_set_ends_with_a_forgotten_device(world: World) -> None:
    session = await world.connect()
    await world.registry.label("pi", {"rack": "3"}, [])
    await world.registry.drain("pi", "", "ann")
    await world.registry.disconnect(session)
    await world.registry.forget("pi")
    with pytest.raises(DeviceNotFound):
        await world.registry.undrain("pi")
    await world.restart()
    await world.connect()
    assert (world.labels, world.registry.get("pi").state) == ({}, IDLE)
