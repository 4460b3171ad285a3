"""Watches of devices: a snapshot, then the latest state of what has changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from etfarm.server.access.projects import Projects
from etfarm.server.access.scope import EVERYTHING, Scope
from etfarm.server.devices.session import AgentSession
from etfarm.server.devices.watch import DeviceWatch, Watcher
from etfarm.server.state.engine import Database
from etfarm.v1.agent_pb2 import Heartbeat, RunnerBundle
from etfarm.v1.common_pb2 import RunnerKind
from etfarm.v1.device_pb2 import Device, DeviceEvent, DeviceRunner, DeviceState, DeviceTelemetry
from etfarm.wire import selectors
from tests.support.registries import RegistryWorld, board

IDLE, BUSY, OFFLINE = DeviceState.DEVICE_STATE_IDLE, DeviceState.DEVICE_STATE_BUSY, DeviceState.DEVICE_STATE_OFFLINE
WAIT_S = 60.0
Events = AsyncGenerator[DeviceEvent]


class World(RegistryWorld):
    """A registry with a watch."""

    def __init__(self, folder: Path, database: Database) -> None:
        super().__init__(folder, database)
        self.watch = DeviceWatch(self.registry, self.runs)

    async def connect_usable(self, *names: str) -> AgentSession:
        """Connect an agent whose devices have a runner."""
        runner = DeviceRunner(kind=RunnerKind.RUNNER_KIND_OWN)
        return await self.connect(*[board(name, own_runners=[runner]) for name in names])

    def events(self, selector: str = "", scope: Scope = EVERYTHING, *, telemetry: bool = False) -> Events:
        return self.watch.events(selectors.parse(selector), scope, telemetry=telemetry)

    async def heartbeat(self, session: AgentSession, **degrees: float) -> None:
        self.later(5)
        readings = {device: DeviceTelemetry(temperature_c=value) for device, value in degrees.items()}
        await self.registry.heartbeat(session, Heartbeat(telemetry=readings))


@pytest.fixture
def world(tmp_path: Path, database: Database) -> World:
    return World(tmp_path, database)


async def following(events: Events) -> DeviceEvent:
    async with asyncio.timeout(WAIT_S):
        return await anext(events)


async def snapshot(events: Events) -> dict[str, int]:
    """Return the states of the devices of a snapshot, which ends with its mark."""
    states: dict[str, int] = {}
    while not (event := await following(events)).snapshot_complete:
        states[event.device.id] = event.device.state
    return states


async def is_quiet(events: Events) -> bool:
    """Return whether no event follows. The iteration cannot be used afterwards."""
    try:
        async with asyncio.timeout(0.05):
            await anext(events)
    except TimeoutError:
        return True
    return False


async def test_a_snapshot_is_followed_by_each_change(world: World) -> None:
    session = await world.connect_usable("a", "b")
    events = world.events()
    assert await snapshot(events) == {"a": IDLE, "b": IDLE}
    world.runs.begin("x", "b", lambda _: None)
    event = await following(events)
    assert (event.device.id, event.device.state, event.device.attempt_id) == ("b", BUSY, "x")
    world.runs.end("x")
    assert (await following(events)).device.state == IDLE
    await world.registry.label("a", {"rack": "3"}, [])
    assert dict((await following(events)).device.labels) == {"rack": "3"}
    await world.registry.drain("a", "new battery", "ann")
    assert (await following(events)).device.drain.reason == "new battery"
    await world.registry.disconnect(session)
    gone = [await following(events), await following(events)]
    assert {event.device.id: event.device.state for event in gone} == {"a": OFFLINE, "b": OFFLINE}
    await world.registry.forget("b")
    assert (await following(events)).removed_device_id == "b"
    assert await is_quiet(events)


async def test_only_devices_that_match_and_that_the_caller_sees_are_sent(world: World) -> None:
    await Projects(world.database, lambda: datetime.now(UTC)).create("vision", [], None, by="root")
    await world.connect_usable("a", "b", "c")
    await world.registry.label("a", {"rack": "3"}, [])
    await world.registry.restrict("c", ["vision"])
    rack, audio = world.events("label.rack=3"), world.events(scope=Scope(frozenset({"audio"})))
    assert (await snapshot(rack), await snapshot(audio)) == ({"a": IDLE}, {"a": IDLE, "b": IDLE})
    await world.registry.label("b", {"rack": "3"}, [])
    assert (await following(rack)).device.id == "b" == (await following(audio)).device.id
    await world.registry.label("a", {}, ["rack"])
    assert (await following(rack)).removed_device_id == "a"
    assert (await following(audio)).device.id == "a"
    world.runs.begin("x", "c", lambda _: None)
    await world.registry.restrict("b", ["vision"])
    assert (await following(audio)).removed_device_id == "b"
    await world.registry.restrict("c", [])
    event = await following(audio)
    # The attempt belongs to `default`, which the caller does not see.
    assert (event.device.id, event.device.state, event.device.attempt_id) == ("c", BUSY, "")


async def test_telemetry_is_sent_to_those_who_want_it(world: World) -> None:
    session = await world.connect_usable("a")
    states, readings = world.events(), world.events(telemetry=True)
    await snapshot(states)
    await snapshot(readings)
    await world.heartbeat(session, a=41.5)
    event = await following(readings)
    assert (event.device.id, event.device.telemetry.temperature_c) == ("a", 41.5)
    world.registry.changed()
    await world.heartbeat(session, a=42.5)
    assert (await following(readings)).device.telemetry.temperature_c == 42.5
    assert await is_quiet(states)


async def test_a_change_of_unknown_devices_is_found(world: World) -> None:
    session = await world.connect_usable("a")
    await world.registry.update(session, Device(id="b", name="board-b", arch="armv7l"))
    events = world.events()
    assert await snapshot(events) == {"a": IDLE, "b": DeviceState.DEVICE_STATE_UNUSABLE}
    world.bundles.use(RunnerBundle(arch="armv7l"))
    world.registry.changed()
    event = await following(events)
    assert (event.device.id, event.device.state) == ("b", IDLE)
    assert await is_quiet(events)


async def test_a_slow_watcher_gets_the_latest_state_only(world: World) -> None:
    await world.connect_usable("a", "b")
    events = world.events()
    await snapshot(events)
    for number in range(1000):
        world.runs.begin(f"x{number}", "a", lambda _: None)
        if number < 999:
            world.runs.end(f"x{number}")
    assert (await following(events)).device.attempt_id == "x999"
    assert await is_quiet(events)


async def test_the_memory_of_a_watcher_is_bounded_by_the_number_of_devices() -> None:
    watcher = Watcher(telemetry=True)
    for _ in range(10_000):
        watcher.mark(["a", "b"])
    assert await watcher.take() == ["a", "b"]
    watcher.mark(["b"])
    assert await watcher.take() == ["b"]
