"""Waiting cells meet idle devices; whoever stops waiting leaves no trace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from etfarm.server.devices.runs import Runs
from etfarm.server.devices.schedule import Waiting
from etfarm.server.jobs.cells.placement import Placement
from etfarm.v1.device_pb2 import Device, DeviceState
from etfarm.wire import selectors

WAIT_S = 60.0


class Devices:
    """As much of a registry as placement reads."""

    def __init__(self, runs: Runs, *names: str) -> None:
        self.runs = runs
        self.online = dict.fromkeys(names, True)
        self._changed: Callable[[], None] = lambda: None

    def on_change(self, listener: Callable[[], None]) -> None:
        self._changed = listener

    def switch(self, name: str, online: bool) -> None:
        self.online[name] = online
        self._changed()

    def get(self, name: str) -> Device:
        return next(device for device in self.devices() if device.id == name)

    def devices(self) -> list[Device]:
        busy = self.runs.busy()
        return [
            Device(
                id=name, name=name,
                state=(DeviceState.DEVICE_STATE_BUSY if name in busy else DeviceState.DEVICE_STATE_IDLE)
                if online else DeviceState.DEVICE_STATE_OFFLINE,
            )
            for name, online in self.online.items()
        ]  # fmt: skip


class World:
    def __init__(self, *devices: str) -> None:
        self.runs = Runs(3600)
        self.devices = Devices(self.runs, *devices)
        self.placement = Placement(self.devices, self.runs)  # type: ignore[arg-type]
        self.reasons: list[str] = []

    async def ask(self, cell: str, text: str = "", priority: int = 0) -> asyncio.Task[Device]:
        """Return a task that waits for a device and has begun to."""
        waiting = Waiting(cell, selectors.parse(text), priority, (0, int(cell[1:])))
        asking = self.placement.device(waiting, f"a-{cell}", lambda _: None, lambda why: self.reasons.append(f"{cell}: {why}"))
        task = asyncio.create_task(asking)
        await asyncio.sleep(0)  # the task's first step, as far as its wait
        return task


async def placed(task: asyncio.Task[Device]) -> str:
    async with asyncio.timeout(WAIT_S):
        return (await task).id


async def test_an_idle_device_is_given_at_once_and_occupied() -> None:
    world = World("pi")
    assert await placed(await world.ask("c1")) == "pi"
    assert world.runs.busy() == {"pi": "a-c1"}
    assert world.reasons == []


async def test_a_freed_device_goes_to_the_next_by_priority() -> None:
    world = World("pi")
    await placed(await world.ask("c1"))
    low, high = await world.ask("c2"), await world.ask("c3", priority=1)
    assert world.reasons == ["c2: pi is busy", "c3: pi is busy"]
    world.placement.free("a-c1")
    assert await placed(high) == "pi"
    assert not low.done()
    world.placement.free("a-c3")
    assert await placed(low) == "pi"


async def test_a_device_that_comes_online_is_given() -> None:
    world = World("pi")
    world.devices.switch("pi", False)
    task = await world.ask("c1")
    assert world.reasons == ["c1: pi is known but offline"]
    world.devices.switch("pi", True)
    assert await placed(task) == "pi"


async def test_the_reason_for_waiting_is_reported_only_when_it_changes() -> None:
    world = World("pi")
    world.devices.switch("pi", False)
    task = await world.ask("c1")
    world.placement.place()
    world.placement.place()
    assert world.reasons == ["c1: pi is known but offline"]
    world.runs.begin("other", "pi", lambda _: None)
    world.devices.switch("pi", True)
    assert world.reasons == ["c1: pi is known but offline", "c1: pi is busy"]
    task.cancel()


async def test_a_cell_cancelled_while_waiting_gets_no_device() -> None:
    world = World("pi")
    await placed(await world.ask("c1"))
    second, third = await world.ask("c2"), await world.ask("c3")
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    world.placement.free("a-c1")
    assert await placed(third) == "pi"
    assert world.runs.busy() == {"pi": "a-c3"}


async def test_a_cell_cancelled_while_it_is_placed_passes_its_device_on() -> None:
    world = World("pi")
    await placed(await world.ask("c1"))
    second, third = await world.ask("c2"), await world.ask("c3")
    world.placement.free("a-c1")
    assert world.runs.busy() == {"pi": "a-c2"}
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert await placed(third) == "pi"
    assert world.runs.busy() == {"pi": "a-c3"}


async def test_freeing_what_has_no_device_changes_nothing() -> None:
    world = World("pi")
    await placed(await world.ask("c1"))
    world.placement.free("a-never")
    assert world.runs.busy() == {"pi": "a-c1"}


async def test_many_cells_share_the_devices_that_they_match() -> None:
    world = World("d1", "d2")
    tasks = [await world.ask("c1", "id=d2"), await world.ask("c2", "id=d2"), await world.ask("c3")]
    assert await placed(tasks[0]) == "d2"
    assert await placed(tasks[2]) == "d1"
    world.placement.free("a-c3")
    assert not tasks[1].done()
    world.placement.free("a-c1")
    assert await placed(tasks[1]) == "d2"
