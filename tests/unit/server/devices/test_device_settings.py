"""Labels and drains that admins set for devices, over reconnections and restarts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from etfarm.server.devices.directory import MAX_LABELS
from etfarm.server.devices.errors import DeviceNotFound
from etfarm.server.devices.registry import Registry
from etfarm.server.devices.session import AgentSession
from etfarm.server.state.engine import Database
from etfarm.v1.device_pb2 import DeviceDrain, DeviceState
from etfarm.wire import selectors
from tests.support.refusals import refuses
from tests.support.registries import NOON, RegistryWorld, board

IDLE, DRAINING, OFFLINE = (
    DeviceState.DEVICE_STATE_IDLE, DeviceState.DEVICE_STATE_DRAINING, DeviceState.DEVICE_STATE_OFFLINE
)  # fmt: skip


class World(RegistryWorld):
    """A registry whose changes are counted."""

    changes = 0

    def new_registry(self) -> Registry:
        registry = super().new_registry()
        registry.on_change(self._count)
        return registry

    def _count(self) -> None:
        self.changes += 1

    async def connect_pi(self, **labels: str) -> AgentSession:
        return await self.connect(board("pi", labels=labels))

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.registry.get("pi").labels)


@pytest.fixture
def world(tmp_path: Path, database: Database) -> World:
    return World(tmp_path, database)


async def test_labels_take_precedence_over_the_agents_and_stay(world: World) -> None:
    await world.connect_pi(rack="1", lab="north")
    shown = await world.registry.label("board-pi", {"rack": "3", "owner": "ann"}, ["lab"])
    assert dict(shown.labels) == {"rack": "3", "owner": "ann"} == world.labels
    await world.restart()
    assert world.registry.get("pi").state == OFFLINE
    assert world.labels == {"rack": "3", "owner": "ann"}
    await world.connect_pi(rack="2", lab="south", floor="4")
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
    await world.connect_pi(rack="1")
    changes = world.changes
    with refuses("BAD_LABEL"):
        await world.registry.label("pi", labels, removed)
    assert (world.labels, world.changes) == ({"rack": "1"}, changes)


@pytest.mark.remedy("BAD_LABEL")
async def test_a_device_has_a_limited_number_of_labels(world: World) -> None:
    await world.connect_pi(rack="1")
    await world.registry.label("pi", {f"k{index}": "" for index in range(MAX_LABELS - 1)}, [])
    with refuses("BAD_LABEL", match="more than 64"):
        await world.registry.label("pi", {"another": ""}, [])
    await world.registry.label("pi", {"another": ""}, ["k0"])
    assert len(world.labels) == MAX_LABELS


async def test_labels_of_admins_can_be_set_and_removed_again_and_again(world: World) -> None:
    await world.connect_pi(rack="1")
    for index in range(MAX_LABELS + 1):
        await world.registry.label("pi", {f"k{index}": ""}, [])
        await world.registry.label("pi", {}, [f"k{index}"])
    assert world.labels == {"rack": "1"}


async def test_a_change_that_a_forgotten_device_overtakes_leaves_nothing(world: World) -> None:
    session = await world.connect_pi()
    await world.registry.disconnect(session)
    changes = [asyncio.create_task(world.registry.drain("pi", f"reason {index}", "ann")) for index in range(2)]
    await asyncio.sleep(0)  # both have found the device
    await world.registry.forget("pi")
    await asyncio.gather(*changes, return_exceptions=True)
    await world.connect_pi()
    assert world.registry.get("pi").state == IDLE
    await world.restart()
    await world.connect_pi()
    assert world.registry.get("pi").state == IDLE


async def test_a_drained_device_takes_nothing_new_until_it_is_undrained(world: World) -> None:
    session = await world.connect_pi()
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
    await world.connect_pi()
    assert world.registry.get("pi").state == DRAINING
    assert (await world.registry.drain("pi", "", "bob")).drain.principal == "bob", "the last reason counts"
    world.runs.end("a1")
    shown = await world.registry.undrain("pi")
    assert (shown.state, shown.HasField("drain")) == (IDLE, False)
    await world.restart()
    await world.connect_pi()
    assert world.registry.get("pi").state == IDLE


async def test_what_was_set_ends_with_a_forgotten_device(world: World) -> None:
    session = await world.connect_pi()
    await world.registry.label("pi", {"rack": "3"}, [])
    await world.registry.drain("pi", "", "ann")
    await world.registry.disconnect(session)
    await world.registry.forget("pi")
    with pytest.raises(DeviceNotFound):
        await world.registry.undrain("pi")
    await world.restart()
    await world.connect_pi()
    assert (world.labels, world.registry.get("pi").state) == ({}, IDLE)
