"""Health runs that users request, and those that end because the server stops or the caller leaves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, timedelta

import pytest
from sqlalchemy import select

from etfarm.server.jobs import model
from etfarm.server.jobs.health import probing
from etfarm.server.jobs.health.run import HealthRunAborted
from etfarm.server.state import schema
from etfarm.server.workers.measurement_lock import MeasurementLock
from etfarm.v1.device_pb2 import Device, HealthEvent, HealthRunTrigger
from etfarm.wire.names import boot_id
from tests.support.cells import WAIT_S, Agent, World
from tests.support.health_runs import PROMPT, answer, events, lead, probed, settle
from tests.support.refusals import refuses
from tests.support.waiting import becomes


async def test_a_requested_run_waits_for_the_device_and_precedes_other_jobs(world: World) -> None:
    agent, job, users = await world.running()
    waiting = await world.submit()
    async with probed(world) as health:
        asked = asyncio.create_task(health.check(world.registry.get("pi"), caller="ann", is_admin=False))
        await asyncio.sleep(0)
        assert world.registry.get("pi").attempt_id == users.attempt_id
        with refuses("HEALTH_RUN_IMPOSSIBLE", match="in a health run already"):
            await health.check(world.registry.get("pi"), caller="ann", is_admin=True)
        await agent.settle(users)
        start = await agent.started()
        assert start.attempt_id == start.candidates[0].cell_id
        await settle(agent, start)
        event = await asked
        assert (event.run.passed, event.run.trigger) == (True, HealthRunTrigger.HEALTH_RUN_TRIGGER_REQUEST)
        assert agent.answer(await agent.started())
        for each in (job, waiting):
            states, _ = await world.end(each)
            assert states[-1] == "SUCCEEDED"


async def test_requested_runs_count_for_the_baseline_only_on_an_idle_device_and_once_in_a_while(world: World) -> None:
    agent = await world.agent()
    async with probed(world) as health:

        async def check(p50_ns: int) -> HealthEvent:
            asked = asyncio.create_task(health.check(world.registry.get("pi"), caller="ann", is_admin=False))
            await lead(agent, p50_ns)
            return await asked

        await lead(agent)
        for _ in range(20):
            event = await check(99_000)
            assert list(event.run.doubts) == ["UNSCHEDULED_RUN"] and event.run.p50_ns == pytest.approx(99_003)
        due = world.registry.get("pi").health.next_run_time.ToDatetime(UTC)
        world.at += timedelta(hours=13)
        await world.submit()
        users = await agent.started()
        asked = asyncio.create_task(health.check(world.registry.get("pi"), caller="ann", is_admin=False))
        await asyncio.sleep(0)
        await agent.settle(users)
        await lead(agent, 99_000)
        assert list((await asked).run.doubts) == ["DEVICE_NOT_IDLE"]
        assert world.registry.get("pi").health.next_run_time.ToDatetime(UTC) == due, "they put off nothing"
        assert not (await check(34_000)).run.doubts
        assert world.registry.get("pi").health.next_run_time.ToDatetime(UTC) == world.at + timedelta(days=1)
    events = schema.health_events.c
    query = select(events.p50_ns).where(events.series != "").order_by(events.number)
    paces = await world.database.read(lambda connection: connection.execute(query).scalars().all())
    assert paces == pytest.approx([33_003, 34_003])


async def test_a_requested_run_takes_the_place_of_a_due_one_in_progress(world: World) -> None:
    agent = await world.agent()
    async with probed(world, pauses=replace(PROMPT, aborted_s=WAIT_S)) as health:
        due = await agent.started()
        asked = asyncio.create_task(health.check(world.registry.get("pi"), caller="ann", is_admin=False))
        await agent.expect_message("cancel_run", due.attempt_id)
        await lead(agent)
        assert not (await asked).run.doubts
    assert [event.run.trigger for event in await events(world)] == [HealthRunTrigger.HEALTH_RUN_TRIGGER_REQUEST]


async def test_a_reserved_device_is_checked_for_its_holder_only(world: World) -> None:
    agent = await world.agent()
    async with probed(world) as health:
        await lead(agent)
        reserved = Device()
        reserved.CopyFrom(world.registry.get("pi"))
        reserved.reservation.owner = "bob"
        with refuses("HEALTH_RUN_IMPOSSIBLE", match="pi is reserved by bob"):
            await health.check(reserved, caller="ann", is_admin=False)
        asked = asyncio.create_task(health.check(reserved, caller="bob", is_admin=False))
        answer(agent, await agent.started())
        assert (await asked).run.passed


async def test_a_requested_run_for_which_somebody_waits_is_made_but_not_compared(world: World) -> None:
    agent = await world.agent()
    async with probed(world) as health:
        await lead(agent)
        world.at += timedelta(hours=13)
        asked = asyncio.create_task(health.check(world.registry.get("pi"), caller="ann", is_admin=False))
        start = await agent.started()
        job = await world.submit()
        await world.until(job, model.WAITING)
        await settle(agent, start)
        assert list((await asked).run.doubts) == ["DEVICE_NOT_IDLE"]
        assert agent.answer(await agent.started())


async def test_a_run_that_the_servers_own_work_holds_up_gives_up_and_holds_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = MeasurementLock()
    agent = Agent(world, "pi")
    agent.session.boot_id = boot_id()
    loop = asyncio.get_running_loop()
    clock = loop.time
    async with quiet.work(), probed(world, quiet) as health:
        await agent.connect()
        assert world.registry.is_on_this_machine("pi")
        asked = asyncio.create_task(health.check(world.registry.get("pi"), caller="ann", is_admin=False))
        await becomes(lambda: quiet.is_wanted)
        with monkeypatch.context() as later:
            later.setattr(loop, "time", lambda: clock() + PROMPT.busy_s)
            with pytest.raises(HealthRunAborted, match="on the same machine as pi, compiled or measured for 600 s"):
                await asked
        assert not world.runs.busy() and not quiet.is_wanted
        async with asyncio.timeout(WAIT_S), quiet.work():
            pass  # other compilations go on
    assert await events(world) == []


async def test_a_draining_server_ends_health_runs_and_begins_none(world: World) -> None:
    agent = await world.agent()
    async with probed(world) as health:
        start = await agent.started()
        await health.drain()
        await agent.expect_message("cancel_run", start.attempt_id)
        assert not world.runs.busy()
        with pytest.raises(HealthRunAborted, match="about to stop"):
            await health.check(world.registry.get("pi"), caller="ann", is_admin=True)
        world.at += timedelta(days=2)
        await asyncio.sleep(0.1)
        assert not world.runs.busy()
    assert await events(world) == []


async def test_requested_runs_that_wait_keep_no_due_one_from_its_turn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "MAX_RUNS", 1)
    agent = await world.agent()
    await world.submit()
    await agent.started()
    async with probed(world) as health:
        asked = asyncio.create_task(health.check(world.registry.get("pi"), caller="ann", is_admin=False))
        await asyncio.sleep(0)
        other = await world.agent("xl")
        assert (await other.started()).device_id == "xl"
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def test_a_caller_who_leaves_ends_the_run_that_it_requested(world: World) -> None:
    agent = await world.agent()
    await world.health.clear("pi", "ann")
    async with probed(world, measurement_lock=MeasurementLock()) as health:
        await lead(agent)
        asked = asyncio.create_task(health.check(world.registry.get("pi"), caller="ann", is_admin=False))
        start = await agent.started()
        asked.cancel()
        await agent.expect_message("cancel_run", start.attempt_id)
        await becomes(lambda: not world.runs.busy())
