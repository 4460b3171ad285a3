"""Damage to what the database stores of devices: it is named, and the server goes on without it until it is replaced."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Table, insert, select, update

from etfarm.server.access.scope import EVERYTHING, Scope
from etfarm.server.devices.bundles import Bundles
from etfarm.server.devices.errors import ReservationNotFound
from etfarm.server.devices.health.book import HealthRecords
from etfarm.server.devices.health.standing import Standing
from etfarm.server.devices.reservations import Holder, Request, Reservations
from etfarm.server.devices.telemetry import TelemetryLog
from etfarm.server.jobs.records.verification import find_damaged
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.v1.agent_pb2 import RunnerBundle
from etfarm.v1.device_pb2 import Device, DeviceTelemetry, HealthEvent, HealthEventKind
from tests.support.registries import NOON, RegistryWorld


def cut_first(body: bytes) -> bytes:
    """Damage that no parser accepts."""
    return b"\xff" * 4 + body[4:]


def flip(body: bytes) -> bytes:
    """Damage that is a message of its own."""
    return body[:-20] + bytes([body[-20] ^ 1]) + body[-19:]


class World(RegistryWorld):
    """A registry with its records, as a server has them at its start."""

    def __init__(self, folder: Path, database: Database) -> None:
        super().__init__(folder, database)
        self.bundles = self.new_bundles()

    def new_bundles(self) -> Bundles:
        return Bundles(self.store, self.database, self.folder, check=self._check)

    async def _check(self, path: Path) -> RunnerBundle:
        return RunnerBundle(**json.loads(path.read_text()))

    async def damage(self, table: Table, how: How, column: str = "id", value: object = "pi") -> None:
        is_it = table.c[column] == value
        body = await self.database.read(lambda c: c.execute(select(table.c.body).where(is_it)).scalars().first())
        assert body
        await self.database.write(lambda c: c.execute(update(table).where(is_it).values(body=how(body))))

    async def damaged(self) -> list[str]:
        return [name async for part in find_damaged(self.database) for name in part]


@pytest.fixture
def world(tmp_path: Path, database: Database) -> World:
    return World(tmp_path, database)


BOTH = pytest.mark.parametrize("how", [cut_first, flip])
How = Callable[[bytes], bytes]


@BOTH
async def test_a_damaged_device_has_its_id_until_its_agent_describes_it_again(
    world: World, how: How, capsys: pytest.CaptureFixture[str]
) -> None:
    await world.connect("pi", "pixel")
    project = insert(schema.projects).values(name="vision", created_at=NOON, created_by="root")
    await world.database.write(lambda connection: connection.execute(project))
    await world.registry.restrict("pi", {"vision"})
    await world.damage(schema.devices, how)
    assert await world.damaged() == ["the device pi"]
    registry = await world.restart()
    assert "the device pi" in capsys.readouterr().out
    assert [device.name for device in registry.devices(EVERYTHING)] == ["board-pixel", "pi"]
    assert [device.name for device in registry.devices(Scope(frozenset({"audio"})))] == ["board-pixel"]
    await world.connect("pi", "pixel")
    assert registry.get("pi").name == "board-pi" and list(registry.get("pi").projects) == ["vision"]
    assert await world.damaged() == []


async def test_a_damaged_device_that_does_not_return_can_be_forgotten(world: World) -> None:
    await world.connect("pi")
    await world.damage(schema.devices, cut_first)
    registry = await world.restart()
    await registry.forget("pi")
    assert await world.damaged() == [] and registry.devices(EVERYTHING) == []


@BOTH
async def test_damaged_settings_are_left_out_until_they_are_set_again(world: World, how: How) -> None:
    await world.connect("pi", "pixel")
    for name in ("pi", "pixel"):
        await world.registry.label(name, {"rack": "the third one from the left"}, ())
    await world.damage(schema.device_settings, how, "device_id")
    assert await world.damaged() == ["the settings of device pi"]
    registry = await world.restart()
    assert "rack" not in registry.get("pi").labels and registry.get("pixel").labels["rack"]
    await registry.label("pi", {"rack": "3"}, ())
    assert await world.damaged() == [] and (await world.restart()).get("pi").labels["rack"] == "3"


@BOTH
async def test_a_damaged_reservation_holds_no_device(world: World, how: How) -> None:
    await world.connect("pi", "pixel")
    ids = iter(("r1", "r2"))

    def new() -> Reservations:
        return Reservations(world.database, world.now, lambda: next(ids))

    held = new()
    for name in ("pi", "pixel"):
        await held.reserve(Request(f"name=board-{name}", 60, "ann", "vision"), lambda: world.registry.devices(EVERYTHING))
    await world.damage(schema.reservations, how, "id", "r1")
    assert await world.damaged() == ["the reservation r1"]
    again = new()
    await again.load()
    assert [each.id for each in again.current(EVERYTHING)] == ["r2"] and again.of_device("pi") is None
    with pytest.raises(ReservationNotFound):
        await again.renew("r1", None, Holder("ann"))


@BOTH
async def test_a_damaged_bundle_is_not_used_until_it_is_added_again(world: World, how: How) -> None:
    digests = []
    for arch in ("aarch64", "x86_64"):
        artifact = await world.store.put(json.dumps({"arch": arch, "executorch_version": "1.0.0"}).encode(), "ann")
        await world.bundles.add(artifact.digest)
        digests.append(artifact.digest)
    await world.damage(schema.bundles, how, "digest", digests[0])
    assert await world.damaged() == [f"the bundle {digests[0]}"]
    again = world.new_bundles()
    await again.load()
    assert [bundle.arch for bundle in again.list()] == ["x86_64"]
    await again.add(digests[0])
    assert await world.damaged() == [] and again.get("aarch64") is not None


@BOTH
async def test_damage_to_what_is_known_of_a_devices_past_is_left_out(world: World, how: How) -> None:
    log = TelemetryLog(world.database, world.now)
    reading = DeviceTelemetry(cpu_share=0.5, load_1m=0.25, memory_available_bytes=1 << 32, disk_free_bytes=1 << 40)
    reading.time.FromDatetime(NOON)
    log.record({"pi": reading, "pixel": reading})
    await log.flush()
    health = HealthRecords(world.database)
    for name in ("pi", "pixel"):
        event = HealthEvent(
            device_id=name, kind=HealthEventKind.HEALTH_EVENT_KIND_POWER_CYCLED, message="by the relay in the rack"
        )
        event.time.FromDatetime(NOON)
        await health.save(name, Standing(since=NOON), event)
    await world.damage(schema.device_telemetry, how, "device_id")
    await world.damage(schema.health_events, how, "device_id")
    assert await world.damaged() == ["a reading of device pi", "a health event of device pi"]
    assert [len((await log.page(name, None, None, 10, 0))[0]) for name in ("pi", "pixel")] == [0, 1]
    ((_, _, damaged),), ((_, _, whole),) = [await health.events(name, 0, 10) for name in ("pi", "pixel")]
    assert (damaged.device_id, damaged.kind, damaged.time) == ("pi", whole.kind, whole.time)
    assert "damaged" in damaged.message and whole.message == "by the relay in the rack"


async def test_values_of_releases_without_checksums_are_read(world: World) -> None:
    await world.connect("pi")
    device = Device(id="pi", name="from before")
    write = update(schema.devices).values(body=device.SerializeToString())
    await world.database.write(lambda connection: connection.execute(write))
    assert (await world.restart()).get("pi").name == "from before" and await world.damaged() == []
