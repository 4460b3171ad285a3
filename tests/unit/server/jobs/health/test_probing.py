"""Health runs: which device gets one when, what its result does to the device, and who comes first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, timedelta

import pytest

from etfarm.server.access.scope import FARM_HOLDER, Scope, agent_holder
from etfarm.server.devices.health.book import HealthBook
from etfarm.server.devices.health.standing import GOOD, QUARANTINED, SUSPECT, UNKNOWN
from etfarm.server.jobs.health import program
from etfarm.server.jobs.health.run import HealthRunAborted
from etfarm.server.sessions.leasing import Leasing
from etfarm.server.sessions.session import Session, lost_error
from etfarm.v1 import agent_pb2, artifact_pb2, common_pb2, session_pb2
from etfarm.v1.common_pb2 import Error
from etfarm.v1.device_pb2 import Device
from etfarm.wire import selectors
from tests.support.cells import WAIT_S, World, artifact_of
from tests.support.health_runs import (
    AFTER_FAULT,
    BROKEN,
    DEVICE,
    ENROLMENT,
    FAULT,
    PERIODIC,
    RUN,
    answer,
    deliver,
    events,
    lead,
    probed,
    settle,
    state,
)
from tests.support.refusals import refuses
from tests.support.waiting import becomes


async def test_a_new_device_is_checked_alone_and_measured(world: World) -> None:
    agent = await world.agent()
    assert state(world) == UNKNOWN
    assert world.registry.get("pi").health.next_run_time.ToDatetime(UTC) == world.at
    async with probed(world):
        start = await agent.started()
        assert start.HasField("measurement") and start.candidates[0].threads == 1
        for wanted in (start.candidates[0].program.pte, start.candidates[0].inputs):
            assert world.store.path(wanted.digest).stat().st_size == wanted.size_bytes
            assert await world.runs.is_permitted(wanted.digest, lambda device_id: device_id == "pi")
        assert world.registry.get("pi").attempt_id == start.attempt_id
        assert world.registry.get("pi", Scope(frozenset({"default"}))).attempt_id == "", "the farm's own attempt"
        await settle(agent, start)
    assert state(world) == GOOD
    (event,) = await events(world)
    assert (event.kind, event.run.trigger, event.run.passed, event.run.program) == (RUN, ENROLMENT, True, "xnnpack")
    assert event.run.p50_ns == pytest.approx(33_003) and not event.run.doubts
    assert world.registry.get("pi").attempt_id == "", "it is free"


async def test_the_farm_holds_a_health_program_that_a_user_has_uploaded(world: World) -> None:
    await world.store.put(program.PROGRAMS[0].path.read_bytes(), "ann")
    stored = await program.store(program.PROGRAMS[0], world.store)
    for artifact in stored.artifacts:
        assert await world.store.is_held(artifact.digest, [FARM_HOLDER])


async def test_an_agent_cannot_have_the_uploads_of_others_deleted(world: World) -> None:
    async def upload(data: bytes, holder: str) -> common_pb2.Artifact:
        async def chunks() -> AsyncIterator[artifact_pb2.Chunk]:
            yield artifact_pb2.Chunk(data=data)

        await world.store.receive(artifact_of(data), chunks(), holder, "ann")
        return artifact_of(data)

    own, others = await upload(b"own", agent_holder("rack")), await upload(b"a user's", "default")
    agent = await world.agent()
    async with probed(world):
        start = await agent.started()
        result = agent_pb2.RunResult(attempt_id=start.attempt_id, device_id=start.device_id)
        result.candidates.add(cell_id=start.candidates[0].cell_id, outputs=others, samples=own)
        assert world.runs.deliver(result, agent_holder("rack"))
        await agent.expect_message("ack", start.attempt_id)
    assert world.store.place(others.digest).exists()
    assert not world.store.place(own.digest).exists()


async def test_an_idle_device_is_checked_again_after_the_interval(world: World) -> None:
    agent = await world.agent()
    async with probed(world):
        await lead(agent)
        world.at += timedelta(seconds=86_399)
        await asyncio.sleep(0.1)
        assert not world.runs.busy()
        world.at += timedelta(seconds=1)
        await lead(agent)
    assert [event.run.trigger for event in await events(world)] == [PERIODIC, ENROLMENT]


async def test_wrong_outputs_quarantine_a_device_and_good_runs_readmit_it(world: World) -> None:
    agent = await world.agent()
    quarantined: list[str] = []
    world.health.on_quarantined(quarantined.append)
    async with probed(world):
        await lead(agent, wrong=True)
        assert (state(world), quarantined) == (QUARANTINED, ["pi"])
        reason = world.registry.get("pi").health.reason
        assert "1 of 32,768 elements of the health program's output are wrong" in reason
        job = await world.submit()
        for good in range(3):
            await asyncio.sleep(0.05)
            assert not world.runs.busy(), "before its time"
            world.at += timedelta(seconds=30)
            start = await agent.started()
            assert not start.HasField("measurement"), "only the outputs count"
            assert state(world) == QUARANTINED, good
            await settle(agent, start)
        assert state(world) == GOOD
        users = await agent.started()
        assert users.candidates[0].cell_id.startswith(job.id), "the job that waited"
        assert agent.answer(users)
        states, _ = await world.end(job)
    assert states[-1] == "SUCCEEDED"


@pytest.mark.parametrize(
    ("reason", "fault"),
    [("PROGRAM_CRASHED", common_pb2.FAULT_USER), ("NO_RUNNER", common_pb2.FAULT_FARM), ("BACKEND_MISSING", DEVICE)],
)
async def test_a_device_that_cannot_run_the_known_program_is_quarantined_whoever_it_blames(
    world: World, reason: str, fault: common_pb2.Fault.ValueType
) -> None:
    agent = await world.agent()
    async with probed(world):
        start = await agent.started()
        deliver(agent, start, agent_pb2.RunResult(error=Error(fault=fault, reason=reason, message="No.\x1b[2J")))
        await agent.expect_message("ack", start.attempt_id)
    assert state(world) == QUARANTINED
    (event,) = await events(world)
    assert event.reason == reason and "\x1b" not in event.message


async def test_a_program_that_the_server_lost_costs_its_device_nothing(world: World) -> None:
    agent = await world.agent()
    async with probed(world):
        start = await agent.started()
        lost = start.candidates[0].program.pte.digest
        world.store.place(lost).unlink()
        missing = Error(fault=common_pb2.FAULT_USER, reason="ARTIFACT_NOT_FOUND", message="The store does not hold it.")
        result = agent_pb2.CandidateResult(cell_id=start.candidates[0].cell_id, error=missing)
        deliver(agent, start, agent_pb2.RunResult(candidates=[result]))
        await agent.expect_message("ack", start.attempt_id)
        again = await agent.started()
        assert world.store.path(lost).exists(), "it is stored again"
        await settle(agent, again)
    assert state(world) == GOOD
    assert [(event.kind, event.run.passed) for event in await events(world)] == [(RUN, True)]


async def test_a_result_that_is_no_result_is_a_failure(world: World) -> None:
    agent = await world.agent()
    foreign = artifact_of(b"never uploaded")
    async with probed(world):
        start = await agent.started()
        result = agent_pb2.CandidateResult(cell_id=start.candidates[0].cell_id, outputs=foreign)
        deliver(agent, start, agent_pb2.RunResult(candidates=[result]))
        await agent.expect_message("ack", start.attempt_id)
    (event,) = await events(world)
    assert (event.reason, state(world)) == ("RESULT_IMPLAUSIBLE", QUARANTINED)


async def test_a_users_job_goes_first_and_interrupts_a_health_run_that_can_wait(world: World) -> None:
    agent = await world.agent()
    async with probed(world):
        start = await agent.started()
        job = await world.submit()
        await agent.expect_message("cancel_run", start.attempt_id)
        users = await agent.started()
        assert users.candidates[0].cell_id.startswith(job.id)
        await agent.settle(users)
        await lead(agent)
        await world.end(job)
    assert state(world) == GOOD
    assert [event.kind for event in await events(world)] == [RUN], "the interruption says nothing"


async def test_after_a_device_fault_the_health_run_precedes_the_next_attempt(world: World) -> None:
    agent = await world.agent()
    async with probed(world):
        await lead(agent)
        job = await world.submit()
        users = await agent.started()
        deliver(agent, users, agent_pb2.RunResult(error=BROKEN))
        await agent.expect_message("ack", users.attempt_id)
        health = await agent.started()
        assert health.candidates[0].cell_id == health.attempt_id, "not the job's next attempt"
        assert not health.HasField("measurement")
        assert state(world) == SUSPECT
        await settle(agent, health)
        retried = await agent.started()
        assert agent.answer(retried)
        states, _ = await world.end(job)
    assert states[-1] == "SUCCEEDED"
    kinds = [(event.kind, event.reason, event.run.trigger) for event in await events(world)]
    assert kinds[:2] == [(RUN, "", AFTER_FAULT), (FAULT, "DEVICE_SELF_TEST_FAILED", 0)]


async def test_a_cancelled_job_and_a_stopped_agent_cost_nothing(world: World) -> None:
    agent = await world.agent()
    world.health = HealthBook(world.database, world.now)
    job = await world.submit()
    start = await agent.started()
    await world.conductor.cancel(job)
    await agent.expect_message("cancel_run", start.attempt_id)
    await world.submit()
    await agent.started()
    world.registry.farewell(agent.session)
    await asyncio.sleep(0.05)
    assert await events(world) == []
    assert world.registry.absent_since() == {}, "its agent has said goodbye"


async def test_an_agent_that_is_stopped_during_a_session_costs_its_device_nothing(world: World) -> None:
    agent = await world.agent()
    session = Session("s1", "ann", "default", session_pb2.OpenSessionRequest(), order=(1, 0))

    def end_lost() -> None:
        if session.lease is not None and not world.registry.is_connected("pi"):
            session.lease.end(lost_error(session.lease))

    world.registry.on_change(end_lost)
    leading = asyncio.create_task(
        Leasing(world.attempts, world.requirements, world.health.record_fault).lead(session, selectors.parse(""), [])
    )
    await agent.started()
    assert session.lease is not None
    session.lease.ready.set_result(session_pb2.SessionReady())
    await asyncio.sleep(0.01)
    world.registry.farewell(agent.session)
    await asyncio.wait_for(leading, WAIT_S)
    assert session.over is not None and session.over.reason == "SESSION_LOST"
    assert await events(world) == []


@pytest.mark.remedy("HEALTH_RUN_IMPOSSIBLE")
async def test_drained_and_reserved_devices_are_left_alone_unless_they_are_quarantined(world: World) -> None:
    agent = await world.agent()
    await world.registry.drain("pi", "new cable", "ann")
    async with probed(world) as health:
        await asyncio.sleep(0.1)
        assert not world.runs.busy()
        with refuses("HEALTH_RUN_IMPOSSIBLE", match="pi is drained"):
            await health.check(world.registry.get("pi"), caller="ann", is_admin=False)
        asked = asyncio.create_task(health.check(world.registry.get("pi"), caller="ann", is_admin=True))
        start = await agent.started()
        answer(agent, start, wrong=True)
        assert not (await asked).run.passed
        await agent.expect_message("ack", start.attempt_id)
        world.at += timedelta(seconds=30)
        await lead(agent)


@pytest.mark.remedy("HEALTH_RUN_ABORTED")
async def test_an_agent_that_is_lost_in_a_health_run_gives_no_result_and_costs_little(world: World) -> None:
    agent = await world.agent()
    async with probed(world) as health:
        await lead(agent)
        asked = asyncio.create_task(health.check(world.registry.get("pi"), caller="ann", is_admin=True))
        await agent.started()
        world.registry.gone(agent.session, "pi", "it was unplugged")
        with pytest.raises(HealthRunAborted, match="left its agent"):
            await asked
        health_now = world.registry.get("pi").health
        assert (health_now.state, health_now.fault_score) == (GOOD, pytest.approx(0.3))
        await agent.leave()
        agent = await world.agent()
        asked = asyncio.create_task(health.check(world.registry.get("pi"), caller="ann", is_admin=True))
        await lead(agent)
        assert (await asked).run.passed


async def test_an_emulated_device_is_never_measured(world: World) -> None:
    agent = await world.agent(emulated=True)
    async with probed(world):
        start = await agent.started()
        assert not start.HasField("measurement")
        await settle(agent, start)
    assert state(world) == GOOD


async def test_a_device_that_becomes_slower_than_itself_is_suspect_until_an_admin_accepts_it(world: World) -> None:
    agent = await world.agent()
    async with probed(world):
        for day in range(30):
            await lead(agent, 33_000 if day < 20 else 41_200)
            await becomes(lambda: not world.runs.busy())
            assert state(world) == (GOOD if day < 24 else SUSPECT), day
            world.at += timedelta(days=1)
        reason = world.registry.get("pi").health.reason
        assert reason.startswith("slower than itself: 41.2 us against 33 us, since ")
        (last, *_) = await events(world)
        assert last.run.baseline_ns == pytest.approx(33_003)
        await world.health.clear("pi", "ann")
        assert state(world) == GOOD
        await lead(agent, 41_200)
        await becomes(lambda: not world.runs.busy())
        assert state(world) == GOOD, "a new baseline begins"


async def test_a_new_governor_begins_a_new_baseline(world: World) -> None:
    agent = await world.agent()

    async def measure(p50_ns: int) -> None:
        await lead(agent, p50_ns)
        await becomes(lambda: not world.runs.busy())
        world.at += timedelta(days=1)

    async with probed(world):
        for _ in range(15):
            await measure(33_000)
        changed = Device()
        changed.CopyFrom(agent.device)
        changed.clusters.add(part="Cortex-A76", governor="powersave")
        await world.registry.update(agent.session, changed)
        for _ in range(8):
            await measure(66_000)
    assert state(world) == GOOD


async def test_health_and_history_survive_a_restart_of_the_server(world: World) -> None:
    agent = await world.agent()
    async with probed(world):
        await lead(agent, wrong=True)
    before = world.registry.get("pi").health
    again = await world.restarted()
    await again.health.load()
    shown = again.registry.get("pi").health
    assert (shown.state, shown.reason, shown.start_time) == (before.state, before.reason, before.start_time)
    assert len(await events(again)) == 1
    await again.health.forget("pi")
    assert await events(again) == [] and again.registry.get("pi").health.state == UNKNOWN


async def test_a_runner_without_the_kernels_gets_no_health_run(bare_world: World) -> None:
    world = bare_world
    await world.agent(own_runners=[{"kind": common_pb2.RUNNER_KIND_OWN, "operators": ["aten::add.out"]}])
    async with probed(world) as health:
        with refuses("HEALTH_RUN_IMPOSSIBLE", match="lacks what the health program needs"):
            await health.check(world.registry.get("pi"), caller="ann", is_admin=True)
        await asyncio.sleep(0.05)
        assert not world.runs.busy()
