"""Jobs that a server was handling when it died: one at a time after evidence, counted, and set aside at the third time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from etfarm.server.access.scope import EVERYTHING
from etfarm.server.compile.single_flight import Listener
from etfarm.server.jobs import model
from etfarm.server.jobs.cells.plausibility import Plan, check_attempt
from etfarm.server.jobs.takeups import IN_HAND, MOST, Hands, Takeups, find_left_in_hand, keep_uncounted, take_left_in_hand
from etfarm.v1 import agent_pb2, common_pb2, job_pb2
from tests.support.cells import STATES_TO_SUCCESS, WAIT_S, World
from tests.support.waiting import becomes


async def compiles(world: World, job: job_pb2.Job) -> None:
    """Wait until the compiler has the job."""
    async with asyncio.timeout(WAIT_S):
        async for event in world.journal.watch(job.id, 0):
            if event.progress.phase == "QUANTIZE":
                return
    raise AssertionError("the job ended before")


async def crashed(world: World, suspects: Mapping[str, int] | None = None, *, gate: bool = True) -> World:
    """Another server on the same database and folder, whose compiler stands still.

    Args:
        suspects: what the death counts for; what the dead server was handling, if None.
    """
    left = take_left_in_hand(world.folder)
    again = await world.restarted()
    again.compiler.gate = asyncio.Event() if gate else None
    await again.hands.begin(left if suspects is None else suspects)
    await again.conductor.resume()
    return again


async def compiling(world: World, count: int) -> list[job_pb2.Job]:
    """Jobs that the compiler has, which stands still."""
    world.compiler.gate = asyncio.Event()
    jobs = [await world.submit(on_device=False) for _ in range(count)]
    for job in jobs:
        await compiles(world, job)
    return jobs


async def counts(world: World) -> Mapping[str, int]:
    return await Takeups(world.database).counts()


@pytest.mark.remedy("SET_ASIDE")
async def test_the_job_that_kills_servers_is_set_aside_at_the_third_time_and_the_others_go_on(world: World) -> None:
    guilty, *others = await compiling(world, 3)
    for times in (1, 2):
        world = await crashed(world)
        await compiles(world, guilty)
        assert world.compiler.calls == 1, "the others wait until this one was handled"
        assert world.conductor.live == 3
        assert await counts(world) == {guilty.id: times} | {job.id: 1 for job in others}
    world = await crashed(world, gate=False)
    states, (report,) = await world.end(guilty)
    assert states == ["COMPILING", "FAILED"]
    assert (report.error.reason, report.error.fault) == ("SET_ASIDE", common_pb2.FAULT_FARM)
    for job in others:
        assert (await world.end(job))[0] == ["COMPILING", "SUCCEEDED"]
    assert world.compiler.calls == 2
    assert await counts(world) == {}
    assert (await world.end(await world.submit(on_device=False)))[0] == ["COMPILING", "SUCCEEDED"], "it is submitted again"


async def test_a_suspect_that_takes_long_holds_up_the_others_for_some_seconds_only(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etfarm.server.jobs.takeups.CARE_S", 0.0)
    jobs = await compiling(world, 2)
    again = await crashed(world)
    for job in jobs:
        await compiles(again, job)
    assert await counts(again) == {job.id: 1 for job in jobs}


async def test_a_job_is_only_set_aside_for_a_death_at_which_no_other_suspect_was_being_handled(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etfarm.server.jobs.takeups.CARE_S", 0.0)
    slow, guilty = await compiling(world, 2)
    world = await crashed(world)
    for job in (slow, guilty):
        await compiles(world, job)
    world = await crashed(world)
    assert await counts(world) == {slow.id: 2, guilty.id: 2}
    await compiles(world, slow)
    for _ in range(5):  # the compiler got the first job within fewer iterations
        await asyncio.sleep(0)
    assert world.compiler.calls == 1, "a job that the next death may set aside is handled alone to its end"
    gate, world.compiler.gate = world.compiler.gate, asyncio.Event()
    assert gate is not None
    gate.set()
    assert (await world.end(slow))[0] == ["COMPILING", "SUCCEEDED"]
    await compiles(world, guilty)
    world = await crashed(world)
    assert (await world.end(guilty))[1][0].error.reason == "SET_ASIDE"


async def test_what_other_servers_have_counted_does_not_set_a_job_aside_that_was_not_alone(world: World) -> None:
    (job,) = await compiling(world, 1)
    limits = take_left_in_hand(world.folder)
    for times in (1, 2, 2):
        await Takeups(world.database).count(limits)
        assert await counts(world) == {job.id: times}


async def test_a_job_that_waits_for_a_device_is_not_counted(world: World) -> None:
    job = await world.submit()
    await world.until(job, model.WAITING)
    await becomes(lambda: not list((world.folder / IN_HAND).iterdir()), pause_s=0)
    for _ in range(4):
        world = await crashed(world)
    assert await counts(world) == {}
    agent = await world.agent()
    agent.answer(await agent.started())
    assert (await world.end(job))[0] == STATES_TO_SUCCESS


async def test_a_running_suspect_is_adopted_at_once_and_its_result_is_checked_alone(world: World) -> None:
    agent = await world.agent()
    running = await world.submit()
    run = await agent.started()
    (compiled,) = await compiling(world, 1)
    again = await crashed(world, {running.id: MOST - 1, compiled.id: MOST - 1})
    await compiles(again, compiled)
    agent = type(agent)(again, "pi")
    await agent.connect(run.attempt_id)
    assert agent.answer(run)
    await becomes(lambda: again.hands.is_waiting(running.id), pause_s=0)
    assert await counts(again) == {running.id: 1, compiled.id: 1}
    assert again.compiler.gate is not None
    again.compiler.gate.set()
    assert (await again.end(running))[0] == STATES_TO_SUCCESS
    assert (await again.end(compiled))[0] == ["COMPILING", "SUCCEEDED"]
    assert await counts(again) == {}


async def test_a_result_that_is_being_checked_is_recorded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    left = []

    def look(answer: agent_pb2.RunResult, plan: Plan) -> None:
        left.append(take_left_in_hand(world.folder))
        check_attempt(answer, plan)

    monkeypatch.setattr("etfarm.server.jobs.cells.results.check_attempt", look)
    agent, job, run = await world.running()
    assert take_left_in_hand(world.folder) == {}, "a job that only runs on its device is not handled"
    agent.answer(run)
    assert (await world.end(job))[0] == STATES_TO_SUCCESS
    assert left == [{job.id: MOST - 1}]
    assert take_left_in_hand(world.folder) == {}


async def test_a_suspect_can_be_cancelled_before_its_turn(world: World) -> None:
    jobs = await compiling(world, 2)
    again = await crashed(world)
    await compiles(again, jobs[0])
    await again.conductor.cancel(await again.journal.get(jobs[1].id, EVERYTHING))
    assert (await again.end(jobs[1]))[0] == ["COMPILING", "CANCELLED"]


async def test_a_server_that_drains_leaves_suspects_that_wait_to_the_next_one(world: World) -> None:
    jobs = await compiling(world, 2)
    again = await crashed(world)
    await compiles(again, jobs[0])
    draining = asyncio.create_task(again.conductor.drain())
    assert again.compiler.gate is not None
    await asyncio.sleep(0)
    again.compiler.gate.set()
    await asyncio.wait_for(draining, WAIT_S)
    assert again.compiler.calls == 1
    assert (await again.end(jobs[0]))[0] == ["COMPILING", "SUCCEEDED"]
    assert await counts(again) == {jobs[1].id: 1}


async def test_a_server_that_lives_for_a_while_forgets_the_counts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etfarm.server.jobs.takeups.STABLE_S", 0.0)
    job = await world.submit()
    await world.until(job, model.WAITING)
    await Takeups(world.database).count({job.id: MOST})
    again = await crashed(world)
    assert await counts(again) == {job.id: 1}
    forgiving = asyncio.create_task(again.hands.forgive())
    async with asyncio.timeout(WAIT_S):
        while await counts(again):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
    forgiving.cancel()


async def test_a_compilation_that_only_waits_is_not_in_hand(world: World) -> None:
    await world.hands.begin({})
    async with world.hands.hold("a") as turn, world.hands.hold("a") as other:
        assert find_left_in_hand(world.folder) == {"a": MOST - 1}
        turn(False)
        turn(False)
        assert find_left_in_hand(world.folder) == {"a": MOST - 1}, "another cell goes on"
        other(False)
        assert find_left_in_hand(world.folder) == {}
        turn(True)
        assert find_left_in_hand(world.folder) == {"a": MOST - 1}
    assert find_left_in_hand(world.folder) == {}


async def test_a_compilation_without_a_worker_is_not_in_hand(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    left = []
    compile_cell = world.compiler.compile

    async def wait_and_compile(*arguments: Any, listener: Listener, **options: Any) -> Any:
        for has_turn in (False, True):
            listener.on_turn(has_turn)
            left.append(find_left_in_hand(world.folder))
        return await compile_cell(*arguments, listener=listener, **options)

    monkeypatch.setattr(world.compiler, "compile", wait_and_compile)
    job = await world.submit(on_device=False)
    assert (await world.end(job))[0] == ["COMPILING", "SUCCEEDED"]
    assert left == [{}, {job.id: MOST - 1}]


async def test_the_file_of_a_suspect_goes_with_it_though_its_count_was_cleared_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etfarm.server.jobs.takeups.STABLE_S", 0.0)
    job = await world.submit()
    await world.until(job, model.WAITING)
    await Takeups(world.database).count({job.id: MOST})
    await Takeups(world.database).count({job.id: MOST})
    clearing, may_clear = asyncio.Event(), asyncio.Event()

    class SlowTakeups(Takeups):
        async def clear(self) -> None:
            clearing.set()
            await may_clear.wait()
            await super().clear()

    hands = Hands(SlowTakeups(world.database), world.folder)
    await hands.begin({})
    forgiving = asyncio.create_task(hands.forgive())
    await clearing.wait()
    async with hands.hold(job.id):
        assert find_left_in_hand(world.folder) == {job.id: MOST}
        may_clear.set()
        async with asyncio.timeout(WAIT_S):
            while await counts(world) or hands._counts:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0)
    forgiving.cancel()
    assert find_left_in_hand(world.folder) == {}


async def test_deaths_are_kept_until_they_are_counted(world: World) -> None:
    (job,) = await compiling(world, 1)
    assert keep_uncounted(world.folder, {job.id: MOST - 1}) == {job.id: MOST - 1}
    assert keep_uncounted(world.folder, {}) == {job.id: MOST - 1}, "the server ended before it counted"
    await world.hands.begin(keep_uncounted(world.folder, {"of another": MOST}))
    assert await counts(world) == {job.id: 1}
    assert keep_uncounted(world.folder, {}) == {}
