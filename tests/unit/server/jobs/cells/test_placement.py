"""Waiting cells meet idle devices; whoever stops waiting leaves no trace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import Any

import pytest

from etfarm.server.access.scope import EVERYTHING, Scope
from etfarm.server.devices.runs import Runs
from etfarm.server.devices.scheduling.forecast import Workload
from etfarm.server.devices.scheduling.waiting import Waiting
from etfarm.server.jobs.cells.limits import DeadlineMissed
from etfarm.server.jobs.cells.placement import ANYTHING, Placement, Subject, Use
from etfarm.server.jobs.waiting_list import WaitingList
from etfarm.v1 import agent_pb2
from etfarm.v1.device_pb2 import Device, DeviceState
from etfarm.v1.job_pb2 import QueuedRun
from etfarm.wire import selectors
from tests.support.golden import Golden
from tests.support.refusals import refuses

WAIT_S = 60.0


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


class Devices:
    """As much of a registry as placement reads."""

    def __init__(self, runs: Runs, *names: str) -> None:
        self.runs = runs
        self.online = dict.fromkeys(names, True)
        self._changed: Callable[[Collection[str]], None] = lambda _: None

    def follow(self, follower: Callable[[Collection[str]], None]) -> None:
        self._changed = follower

    def switch(self, name: str, online: bool) -> None:
        self.online[name] = online
        self._changed([name])

    def known(self, names: Collection[str]) -> dict[str, Device]:
        return {device.id: device for device in self.devices() if device.id in names}

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
        self.seconds = 1000.0
        self.placement = Placement(self.devices, self.runs, lambda: at(self.seconds))  # type: ignore[arg-type]
        self.reasons: list[str] = []

    async def ask(
        self, cell: str, text: str = "", priority: int = 0, subject: Subject = ANYTHING, **more: Any
    ) -> asyncio.Task[Device]:
        """Return a task that waits for a device and has begun to."""
        waiting = Waiting(cell, selectors.parse(text), priority, (0, int(cell[1:])), **more)
        asking = self.placement.device(
            waiting, f"a-{cell}", lambda _: None, lambda why: self.reasons.append(f"{cell}: {why}"), subject
        )
        task = asyncio.create_task(asking)
        await asyncio.sleep(0)  # the task's first step, as far as its wait
        return task


async def placed(task: asyncio.Task[Device]) -> str:
    async with asyncio.timeout(WAIT_S):
        return (await task).id


async def test_an_idle_device_is_given_at_once_and_occupied() -> None:
    world = World("pi")
    assert await placed(await world.ask("c1")) == "pi"
    world.placement.free("a-never")
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


async def test_a_device_that_comes_online_is_given_and_the_reason_for_waiting_is_reported_only_when_it_changes() -> None:
    world = World("pi")
    world.devices.switch("pi", False)
    task = await world.ask("c1")
    world.placement.place()
    assert world.reasons == ["c1: pi is known but offline"]
    world.runs.begin("other", "pi", lambda _: None)
    world.devices.switch("pi", True)
    assert world.reasons == ["c1: pi is known but offline", "c1: pi is busy"]
    world.devices.switch("pi", False)
    world.placement.free("other")
    assert not task.done()
    world.devices.switch("pi", True)
    assert await placed(task) == "pi"


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


async def test_a_cell_that_waits_too_long_or_past_its_deadline_fails_with_the_reason(golden: Golden) -> None:
    world = World("pi")
    await placed(await world.ask("c1"))
    patient = await world.ask("c2", subject=Subject(max_wait_s=90.0))
    due = await world.ask("c3", deadline_s=1030.0)
    both = await world.ask("c4", deadline_s=1200.0, subject=Subject(max_wait_s=60.0, since=at(990.0)))
    assert world.reasons == [
        "c2: pi is busy; it waits until 1970-01-01 00:18:10 UTC at most",
        "c3: pi is busy; it must start by 1970-01-01 00:17:10 UTC, its deadline",
        "c4: pi is busy; it waits until 1970-01-01 00:17:30 UTC at most",
    ]
    for seconds, task, reason in (
        (1030.0, due, "DEADLINE_PASSED"),
        (1050.0, both, "MAX_WAIT_OVER"),
        (1090.0, patient, "MAX_WAIT_OVER"),
    ):
        world.seconds = seconds - 1
        world.placement.place()
        assert not task.done()
        world.seconds = seconds
        world.placement.place()
        with golden.refuses(reason):
            await placed(task)
    world.placement.free("a-c1")
    assert world.runs.busy() == {}, "what has given up gets no device"


@pytest.mark.remedy("MAX_WAIT_OVER")
async def test_the_limit_of_waiting_ends_by_itself() -> None:
    world = World("pi")
    await placed(await world.ask("c1"))
    task = await world.ask("c2", subject=Subject(max_wait_s=0.01))
    world.seconds += 1
    with refuses("MAX_WAIT_OVER"):
        await placed(task)
    longer = await world.ask("c3", subject=Subject(max_wait_s=60.0))
    world.placement.free("a-c1")
    await placed(longer)


@pytest.mark.remedy("DEADLINE_PASSED")
async def test_a_deadline_that_is_over_at_the_start_leaves_an_idle_device_alone() -> None:
    world = World("pi")
    with pytest.raises(DeadlineMissed):
        await placed(await world.ask("c1", deadline_s=999.0))
    assert world.runs.busy() == {}
    await placed(await world.ask("c2", deadline_s=2000.0))


async def test_the_limits_of_requests_that_have_ended_are_not_kept() -> None:
    world = World("pi")
    await placed(await world.ask("c0"))
    for number in range(1, 1_000):
        task = await world.ask(f"c{number}", deadline_s=1e9)
        task.cancel()
        await asyncio.wait([task])
    task = await world.ask("c1000", subject=Subject(max_wait_s=5.0))
    assert len(world.placement._expiring) <= 102, "of 1,000 requests, of which one waits"
    world.seconds += 6.0
    world.placement.place()
    with refuses("MAX_WAIT_OVER"):
        await placed(task)


async def test_devices_are_listed_by_name_for_those_who_may_use_them() -> None:
    world = World("pi-b", "pi-a", "desk")
    assert [device.id for device in world.placement.devices()] == ["desk", "pi-a", "pi-b"]
    assert [device.id for device in world.placement.devices_for(selectors.parse("name!=desk"), "vision")] == ["pi-a", "pi-b"]
    world.devices.switch("pi-a", False)
    assert world.placement.devices()[1].state == DeviceState.DEVICE_STATE_OFFLINE


def answer(world: World, attempt: str, device: str) -> None:
    """Let an attempt succeed, and free its device."""
    assert world.runs.deliver(agent_pb2.RunResult(attempt_id=attempt, device_id=device))
    world.placement.free(attempt)


async def test_the_queue_lists_who_waits_for_what_with_estimates_from_equal_runs() -> None:
    world = World("pi")
    work, unknown = Workload(program="p", model="m"), Workload(program="q")
    first = await world.ask("c1", subject=Subject(work=work), owner="ann", project="audio")
    assert await placed(first) == "pi"
    waiting = [
        await world.ask("c2", subject=Subject(QueuedRun(job_id="j2"), work, since=at(990.0)), owner="ann", project="audio"),
        await world.ask("c3", subject=Subject(QueuedRun(job_id="j3"), unknown), priority=3, owner="bob", project="vision"),
        await world.ask("c4", subject=Subject(QueuedRun(session_id="s4")), owner="bob", project="vision", deadline_s=5000.0),
    ]
    entries = world.placement.entries()
    assert [entry.job_id or entry.session_id for entry in entries] == ["s4", "j3", "j2"], "deadline, priority, less used"
    assert [entry.rank for entry in entries] == [1, 2, 3]
    assert not any(entry.HasField("start_estimate_time") for entry in entries), "no equal run has ended yet"
    assert entries[0].expire_time.seconds == 5000 and not entries[1].HasField("expire_time")
    assert entries[2].wait_start_time.seconds == 990 and entries[2].waiting_for == "pi is busy"
    assert entries[2].share_penalty > 0 == entries[1].share_penalty
    assert entries[1].aged_priority == pytest.approx(3 + 1000 / 600)
    world.seconds = 1040.0
    answer(world, "a-c1", "pi")  # it took 40 s
    assert await placed(waiting[2]) == "pi"
    third, _ = world.placement.entries()
    assert not third.HasField("start_estimate_time"), "nothing is known of the session before it"
    answer(world, "a-c4", "pi")
    assert await placed(waiting[1]) == "pi"
    world.placement.free("a-c3")
    assert await placed(waiting[0]) == "pi"
    next_one = await world.ask("c5", subject=Subject(work=work))
    (entry,) = world.placement.entries()
    assert entry.start_estimate_time.seconds == 1080, "the run before takes 40 s again"
    world.seconds = 1040.0 + 3 * 40 + 1
    (entry,) = world.placement.entries()
    assert not entry.HasField("start_estimate_time"), "the run before takes much longer than equal ones did"
    next_one.cancel()


async def test_only_the_callers_projects_are_listed_and_others_are_counted() -> None:
    world = World("pi")
    await placed(await world.ask("c1"))
    tasks = [await world.ask(f"c{number}", project="audio" if number % 2 else "vision") for number in range(2, 9)]
    listing = WaitingList(world.placement, lambda: world.seconds)
    page = listing.page(0, 2, Scope(frozenset({"audio"})))
    assert {run.project for run in page.runs} == {"audio"} and (len(page.runs), page.other_runs) == (2, 4)
    rest = listing.page(int(page.next_page_token), 2, Scope(frozenset({"audio"})))
    assert len(rest.runs) == 1 and not rest.next_page_token
    assert len(listing.page(0, 50, EVERYTHING).runs) == 7
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert len(listing.page(0, 50, EVERYTHING).runs) == 7, "a list is valid for a moment"
    world.seconds += 2
    assert listing.page(0, 50, EVERYTHING).other_runs == 0 == len(listing.page(0, 50, EVERYTHING).runs)


async def test_what_an_earlier_server_placed_counts() -> None:
    world = World("pi", "xl")
    world.placement.remember(Use(("default", "ann"), "xl", 0.0, 900.0, Workload(model="m"), ("p1",)))
    tasks = [await world.ask("c1", "id=pi", owner="ann"), await world.ask("c2", program="p1", owner="bob")]
    assert [await placed(task) for task in tasks] == ["pi", "xl"], "xl has the program already"
    waiting = [await world.ask("c3", owner="ann"), await world.ask("c4", owner="cid")]
    world.placement.free("a-c1")
    assert await placed(waiting[1]) == "pi", "ann has used devices lately"
    waiting[0].cancel()
