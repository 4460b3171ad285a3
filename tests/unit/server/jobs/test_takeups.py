"""Jobs that were being handled when a server died: one at a time, counted, and set aside at the third time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from etfarm.server.access.scope import EVERYTHING
from etfarm.server.jobs import model
from etfarm.server.jobs.takeups import CleanEnd, Takeups
from etfarm.v1 import common_pb2, job_pb2
from tests.support.cells import STATES_TO_SUCCESS, WAIT_S, World

pytestmark = pytest.mark.usefixtures("each_database")


async def compiles(world: World, job: job_pb2.Job) -> None:
    """Wait until the compiler has the job."""
    async with asyncio.timeout(WAIT_S):
        async for event in world.journal.watch(job.id, 0):
            if event.progress.phase == "QUANTIZE":
                return
    raise AssertionError("the job ended before")


async def crashed(world: World, *, gate: bool = True) -> World:
    """Another server on the same database, whose compiler stands still."""
    again = await world.restarted()
    again.compiler.gate = asyncio.Event() if gate else None
    return again


async def test_the_job_that_kills_servers_is_set_aside_at_the_third_time_and_the_others_go_on(world: World) -> None:
    world.compiler.gate = asyncio.Event()
    guilty, *others = [await world.submit(on_device=False) for _ in range(3)]
    for job in (guilty, *others):
        await world.until(job, model.COMPILING)
    takeups = Takeups(world.database)
    for times in (1, 2):
        world = await crashed(world)
        await world.conductor.resume(takeups)
        await compiles(world, guilty)
        assert world.compiler.calls == 1, "the others wait until this one comes to rest"
        assert world.conductor.live == 3
        assert await takeups.counts() == {guilty.id: times} | {job.id: 0 for job in others}
    world = await crashed(world, gate=False)
    await world.conductor.resume(takeups)
    states, (report,) = await world.end(guilty)
    assert states == ["COMPILING", "FAILED"]
    assert (report.error.reason, report.error.fault) == ("SET_ASIDE", common_pb2.FAULT_FARM)
    for job in others:
        assert (await world.end(job))[0] == ["COMPILING", "SUCCEEDED"]
    assert world.compiler.calls == 2


async def test_a_job_that_does_not_come_to_rest_holds_up_the_others_for_some_seconds_only(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("etfarm.server.jobs.conductor.CARE_S", 0.1)
    world.compiler.gate = asyncio.Event()
    jobs = [await world.submit(on_device=False) for _ in range(2)]
    for job in jobs:
        await world.until(job, model.COMPILING)
    again = await crashed(world)
    takeups = Takeups(again.database)
    await again.conductor.resume(takeups)
    await compiles(again, jobs[1])
    assert await takeups.counts() == {job.id: 1 for job in jobs}
    await again.conductor.stop()


async def test_a_job_that_waits_for_a_device_is_not_counted(world: World) -> None:
    job = await world.submit()
    await world.until(job, model.WAITING)
    takeups = Takeups(world.database)
    for _ in range(4):
        world = await crashed(world)
        await world.conductor.resume(takeups)
    assert await takeups.counts() == {job.id: 0}
    agent = await world.agent()
    agent.answer(await agent.started())
    assert (await world.end(job))[0] == STATES_TO_SUCCESS
    await world.conductor.stop()


async def test_a_job_can_be_cancelled_before_its_turn_to_be_taken_up(world: World) -> None:
    world.compiler.gate = asyncio.Event()
    jobs = [await world.submit(on_device=False) for _ in range(2)]
    for job in jobs:
        await world.until(job, model.COMPILING)
    again = await crashed(world)
    await again.conductor.resume(Takeups(again.database))
    await compiles(again, jobs[0])
    await again.conductor.cancel(await again.journal.get(jobs[1].id, EVERYTHING))
    assert (await again.end(jobs[1]))[0] == ["COMPILING", "CANCELLED"]
    await again.conductor.stop()


async def test_a_server_that_lives_for_a_while_forgets_the_counts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etfarm.server.jobs.conductor.STABLE_S", 0.0)
    monkeypatch.setattr("etfarm.server.jobs.conductor.CARE_S", 0.0)
    world.compiler.gate = asyncio.Event()
    job = await world.submit(on_device=False)
    await world.until(job, model.COMPILING)
    takeups = Takeups(world.database)
    for _ in range(4):
        world = await crashed(world)
        await world.conductor.resume(takeups)
        async with asyncio.timeout(WAIT_S):
            while world.conductor._careful is not None and not world.conductor._careful.done():
                await asyncio.wait([world.conductor._careful])
        assert await takeups.counts() == {job.id: 0}
    await world.conductor.stop()


def test_a_server_that_was_killed_leaves_its_mark_and_one_that_ends_does_not(tmp_path: Path) -> None:
    assert CleanEnd(tmp_path).begin()
    assert not CleanEnd(tmp_path).begin()
    last = CleanEnd(tmp_path)
    assert not last.begin()
    last.end()
    assert CleanEnd(tmp_path).begin()


def test_a_server_that_could_not_start_leaves_the_mark_of_the_one_that_was_killed(tmp_path: Path) -> None:
    assert CleanEnd(tmp_path).begin()
    CleanEnd(tmp_path).end()
    assert not CleanEnd(tmp_path).begin()
