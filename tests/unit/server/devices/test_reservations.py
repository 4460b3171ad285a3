"""Reservations of devices: who gets which, until when, over renewals, expiry and restarts."""

from __future__ import annotations

import asyncio
import itertools
from datetime import UTC, timedelta
from pathlib import Path
from typing import Any

import pytest

from etfarm.server.access.ownership import NotYours
from etfarm.server.access.scope import EVERYTHING, Scope
from etfarm.server.devices import reservations
from etfarm.server.devices.errors import ReservationEnded, ReservationNotFound
from etfarm.server.devices.registry import Registry
from etfarm.server.devices.reservations import Holder, Request, Reservations
from etfarm.server.devices.runs import Runs
from etfarm.server.devices.scheduling.waiting import Waiting
from etfarm.server.jobs.cells.device_attempts import DeviceAttempts
from etfarm.server.jobs.cells.placement import Placement
from etfarm.server.state.engine import Database, DatabaseFull
from etfarm.v1.device_pb2 import Device, DeviceHealth, HealthState, Reservation
from etfarm.wire import selectors
from tests.support.refusals import refuses
from tests.support.registries import NOON, RegistryWorld, board

ANN, BOB, ADMIN = (
    Holder("ann", scope=Scope(frozenset({"vision"}))), Holder("bob", scope=Scope(frozenset({"audio"}))), Holder("root", True)
)  # fmt: skip


class World(RegistryWorld):
    """A registry with reservations."""

    def __init__(self, folder: Path, database: Database) -> None:
        self.database = database
        self.ids = map("r{}".format, itertools.count(1))
        super().__init__(folder, database)

    def new_registry(self) -> Registry:
        """Return a registry as a server has it at its start, with reservations, without what an earlier one had in memory."""
        self.runs = Runs(3600)
        self.reservations = Reservations(self.database, self.now, self.ids.__next__, 3600.0)
        registry = Registry(self.database, self.bundles, self.runs, self.now, reservation_of=self.reservations.of_device)
        self.changes: list[list[str]] = []
        self.reservations.on_change(lambda device_ids: registry.changed(*device_ids))
        registry.follow(lambda ids: self.changes.append(sorted(ids)))
        self.placement = Placement(registry, self.runs)
        attempts = map("a{}".format, itertools.count(1))
        self.attempts = DeviceAttempts(registry, self.runs, self.placement, self.bundles, attempts.__next__, self.reservations)
        return registry

    async def reserve(
        self, selector: str = "", seconds: float = 60, *, owner: str = "ann", project: str = "vision", **more: object
    ) -> Reservation:
        request = Request(selector, seconds, owner, project, **more)  # type: ignore[arg-type]
        return await self.reservations.reserve(request, lambda: self.registry.devices(Scope(frozenset({project}))))

    def place(self, reservation: str = "", project: str = "vision") -> asyncio.Task[tuple[Device, str]]:
        waiting = Waiting("cell", selectors.parse(""), 0, (1, 0), project=project, reservation=reservation)
        return asyncio.create_task(self.attempts.place(waiting, lambda _: None, lambda _: None))


@pytest.fixture
def world(tmp_path: Path, database: Database) -> World:
    return World(tmp_path, database)


@pytest.mark.remedy("DEVICES_UNAVAILABLE")
async def test_devices_are_reserved_all_or_none(world: World) -> None:
    await world.connect(board("a"), board("b"), board("c", arch="armv7l"))
    reserved = await world.reserve("arch=aarch64", count=2, reason="a demo")
    assert list(reserved.device_ids) == ["a", "b"] and reserved.device_id == "a"
    assert reserved.expire_time.ToDatetime(UTC) == NOON + timedelta(seconds=60)
    assert world.changes[-1] == ["a", "b"]
    shown = world.registry.get("b").reservation
    assert (shown.id, shown.device_id, shown.owner, shown.reason, list(shown.device_ids)) == ("r1", "b", "ann", "a demo", [])
    with refuses("DEVICES_UNAVAILABLE") as refused:
        await world.reserve("", count=2)
    assert refused.value.message == (
        "3 devices match '', 1 can be reserved now, and 2 are wanted: "
        "board-a is reserved by ann until 2026-06-01 12:01 UTC; board-b is reserved by ann until 2026-06-01 12:01 UTC."
    )
    assert not world.registry.get("c").HasField("reservation")
    assert (await world.reserve("", count=1)).device_id == "c"
    with refuses("NO_SUCH_DEVICE"):
        await world.reserve("arch=riscv64")


def test_healthy_real_and_idle_devices_are_chosen_first() -> None:
    busy, idle = 2, 1
    devices = [
        board("suspect", state=idle, health=DeviceHealth(state=HealthState.HEALTH_STATE_SUSPECT)),
        board("emulated", state=idle, emulated=True),
        board("busy", state=busy),
        board("y", state=idle),
        board("x", state=idle),
    ]
    order = [device.id for device in reservations.choose(devices, 5, "")]
    assert order == ["x", "y", "busy", "emulated", "suspect"]
    assert [device.id for device in reservations.choose(devices[::-1], 2, "")] == ["x", "y"]


def test_devices_that_cannot_be_used_are_not_reserved() -> None:
    devices = [
        board("a", state=3),
        board("b", state=4, drain={"reason": "new battery"}),
        board("c", state=1, health=DeviceHealth(state=HealthState.HEALTH_STATE_QUARANTINED)),
        board("d", state=5),
    ]
    with refuses("DEVICES_UNAVAILABLE") as refused:
        reservations.choose(devices, 1, "arch=aarch64")
    assert refused.value.message.endswith(
        "0 can be reserved now, and 1 is wanted: board-a is offline; board-b is drained: new battery; "
        "board-c is quarantined; board-d cannot be used."
    )


@pytest.mark.remedy("BAD_RESERVATION")
@pytest.mark.parametrize(("seconds", "count"), [(0.5, 1), (3601, 1), (60, 0), (60, 1001), (60, -1), (float("nan"), 1)])
async def test_durations_and_counts_have_bounds(world: World, seconds: float, count: int) -> None:
    await world.connect("a")
    with refuses("BAD_RESERVATION"):
        await world.reserve("", seconds, count=count)
    assert world.registry.get("a").reservation.id == ""
    await world.reserve("", 60, count=1)
    assert world.registry.get("a").reservation.id


async def test_a_repeated_request_returns_the_same_reservation(world: World) -> None:
    await world.connect("a", "b")
    first = await world.reserve(request_id="once")
    assert await world.reserve(request_id="once") == first
    assert (await world.reserve(owner="cleo", request_id="once")).id != first.id


@pytest.mark.remedy("REQUEST_ID_USED")
@pytest.mark.parametrize(
    "change",
    [{"selector": "arch=aarch64"}, {"seconds": 61}, {"count": 2}, {"reason": "another"}, {"project": "audio"}],
    ids=lambda change: "".join(change),
)
@pytest.mark.parametrize("is_over", [False, True], ids=["current", "over"])
async def test_a_request_id_is_of_one_request(world: World, change: dict[str, Any], is_over: bool) -> None:
    await world.connect("a", "b")
    first = await world.reserve(request_id="once")
    if is_over:
        await world.reservations.release(first.id, ANN)
    with refuses("REQUEST_ID_USED", match=first.id) as refused:
        await world.reserve(**change, request_id="once")
    assert refused.value.metadata == {"reservation": first.id}
    # The remedy.
    assert (await world.reserve(**({"count": 1} | change | {"count": 1}), request_id="another")).id != first.id
    if not is_over:
        assert await world.reserve(request_id="once") == first


async def test_a_repeated_request_after_a_renewal_of_another_duration_is_the_same_one(world: World) -> None:
    await world.connect("a")
    first = await world.reserve(request_id="once")
    world.later(1)
    await world.reservations.renew(first.id, 600, ANN)
    assert (await world.reserve(request_id="once")).id == first.id


async def test_an_owner_has_a_limited_number_of_reservations(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservations, "MAX_OF_OWNER", 1)
    await world.connect("a", "b", "c")
    await world.reserve()
    with refuses("QUOTA_EXCEEDED"):
        await world.reserve()
    await world.reserve(owner="bob")


@pytest.mark.remedy("RESERVATION_ENDED")
async def test_renewals_extend_and_expiry_releases(world: World) -> None:
    await world.connect("a")
    reserved = await world.reserve("", 60)
    world.later(50)
    renewed = await world.reservations.renew(reserved.id, None, ANN)
    assert renewed.expire_time.ToDatetime(UTC) == NOON + timedelta(seconds=110)
    longer = await world.reservations.renew(reserved.id, 600, ADMIN)
    assert longer.expire_time.ToDatetime(UTC) == NOON + timedelta(seconds=650)
    with refuses("BAD_RESERVATION"):
        await world.reservations.renew(reserved.id, 3601, ANN)
    world.at = NOON + timedelta(seconds=650)
    assert not world.registry.get("a").HasField("reservation"), "it has ended, also before anyone has noticed"
    await world.reservations.expire()
    assert world.changes[-1] == ["a"]
    with pytest.raises(ReservationEnded, match="has expired, since it was not renewed in time"):
        await world.reservations.renew(reserved.id, None, ANN)
    await world.reservations.release(reserved.id, ANN)  # nothing to do
    again = await world.reserve("", 60)
    assert (await world.reservations.renew(again.id, None, ANN)).id == again.id


async def test_only_the_owner_and_admins_change_a_reservation(world: World) -> None:
    await world.connect("a")
    reserved = await world.reserve()
    member = Holder("cleo", scope=ANN.scope)
    with pytest.raises(NotYours):
        await world.reservations.renew(reserved.id, None, member)
    with pytest.raises(NotYours):
        await world.reservations.release(reserved.id, member)
    for do in (world.reservations.renew(reserved.id, None, BOB), world.reservations.release(reserved.id, BOB)):
        with pytest.raises(ReservationNotFound):
            await do
    await world.reservations.release(reserved.id, ADMIN)
    assert world.reservations.current(EVERYTHING) == []
    with pytest.raises(ReservationEnded, match="was released by root"):
        await world.reservations.renew(reserved.id, None, ANN)


async def test_other_projects_see_until_when_a_device_is_reserved_and_no_more(world: World) -> None:
    await world.connect("a")
    await world.reserve("arch=aarch64", reason="a demo")
    theirs = world.registry.get("a", BOB.scope).reservation
    names = {field.name for field, _ in theirs.ListFields()}
    assert names == {"device_id", "create_time", "expire_time", "duration_s"} and theirs.device_id == "a"
    with refuses("DEVICES_UNAVAILABLE") as refused:
        await world.reserve("id=a", owner="bob", project="audio")
    assert "board-a is reserved by another project until 2026-06-01 12:01 UTC" in refused.value.message
    assert "ann" not in refused.value.message
    assert world.reservations.current(BOB.scope) == []
    assert [each.id for each in world.reservations.current(ANN.scope)] == ["r1"]


async def test_a_reservation_outlives_the_server_but_not_its_time(world: World) -> None:
    await world.connect("a", "b")
    short, long = await world.reserve("id=a", 10), await world.reserve("id=b", 100)
    world.later(20)
    await world.restart()
    await world.reservations.load()
    assert world.registry.get("b").reservation.id == long.id
    assert not world.registry.get("a").HasField("reservation")
    with pytest.raises(ReservationEnded):
        await world.reservations.require(short.id, "vision")


async def test_a_clock_that_was_ahead_prolongs_no_reservation_beyond_its_duration(world: World) -> None:
    await world.connect("pi")
    world.at += timedelta(days=365)
    await world.reserve(seconds=60)
    world.at = NOON
    await world.restart()
    await world.reservations.load()
    (reservation,) = world.reservations.current(EVERYTHING)
    assert reservation.expire_time.ToDatetime(UTC) == NOON + timedelta(seconds=60)


async def test_tending_expires_in_time(world: World) -> None:
    await world.connect("a")
    tending = asyncio.create_task(world.reservations.tend())
    try:
        await world.reserve("", 1)
        blocked = world.place(project="audio")
        await asyncio.sleep(0)
        assert not blocked.done()
        world.later(1)
        assert (await asyncio.wait_for(blocked, 15))[0].id == "a"
    finally:
        tending.cancel()
    assert world.reservations.current(EVERYTHING) == []


async def test_a_full_disk_ends_no_reservation_late_and_leaves_no_device_reserved(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.connect("a", "b")
    await world.reserve("id=a", 1)
    blocked = world.place(project="audio")
    assert (await asyncio.wait_for(blocked, 60))[0].id == "b"

    async def write(*_: object, **__: object) -> None:
        world.changes.append(["a write"])
        raise DatabaseFull("The server's disk is full.")

    with monkeypatch.context() as full:
        full.setattr(world.database, "write", write)
        world.later(1)
        tending = asyncio.create_task(world.reservations.tend())
        try:
            assert (await asyncio.wait_for(world.place(project="audio"), 15))[0].id == "a"
            assert not tending.done(), "it goes on"
        finally:
            tending.cancel()
        world.changes.clear()
        with pytest.raises(DatabaseFull):
            await world.reserve("id=a", 1)
        assert world.changes == [["a"], ["a write"], ["a"]], "no run is placed during the write, and afterwards runs are again"


async def test_a_cancelled_wait_leaves_the_device_free(world: World) -> None:
    await world.connect("a")
    _, occupying = await world.place()
    waiting = world.place((await world.reserve()).id)
    for _ in range(5):
        await asyncio.sleep(0)
    world.placement.free(occupying)
    waiting.cancel()  # in the moment in which the device was chosen
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert world.registry.get("a").attempt_id == ""


@pytest.mark.remedy("DEVICE_NOT_RESERVED", "RESERVATION_NOT_FOUND")
async def test_a_selector_must_match_a_device_of_the_reservation(world: World) -> None:
    await world.connect(board("a"), board("b", arch="armv7l"))
    reserved = await world.reserve("id=a")
    devices = world.registry.devices()
    held = await world.reservations.require_device(reserved.id, "vision", ["", "arch=aarch64"], devices)
    assert [device.id for device in held] == ["a"]
    with refuses("DEVICE_NOT_RESERVED") as refused:
        await world.reservations.require_device(reserved.id, "vision", ["arch=armv7l"], devices)
    assert refused.value.message == "No device of the reservation r1 matches 'arch=armv7l'."
    assert refused.value.remedy == "It has board-a."
    assert await world.reservations.require_device(reserved.id, "vision", ["name=board-a"], devices)
    with pytest.raises(ReservationNotFound):
        await world.reservations.require_device(reserved.id, "audio", [""], devices)
    (listed,) = world.reservations.current(ANN.scope)
    assert await world.reservations.require_device(listed.id, "vision", [""], devices)
