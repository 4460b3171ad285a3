"""Runs that share a device, and what a new server knows of the runs of an earlier one."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from etfarm.server.access.scope import EVERYTHING
from etfarm.server.jobs import model
from etfarm.server.jobs.cells.placement import Placement
from etfarm.server.jobs.cells.subjects import restore_use, workload_of
from etfarm.v1.device_pb2 import DeviceState
from etfarm.v1.job_pb2 import Measurement
from etfarm.wire.chunks import artifact_of
from tests.support.cells import STATES_TO_SUCCESS, Agent, World
from tests.support.jobs import AT


async def test_unmeasured_runs_are_sent_beside_each_other_and_a_measurement_alone(world: World) -> None:
    agent = await world.agent(concurrent_runs=2)
    jobs = [await world.submit(), await world.submit(), await world.submit(measurement=Measurement())]
    first, second = await agent.started(), await agent.started()
    assert not first.HasField("measurement") and not second.HasField("measurement")
    shown = world.registry.get("pi")
    assert sorted(shown.attempt_ids) == sorted([first.attempt_id, second.attempt_id])
    assert shown.state == DeviceState.DEVICE_STATE_BUSY
    late = await world.submit()
    await agent.settle(first)
    assert world.runs.exclusive_on("pi") == [False], "the measurement keeps the device for itself"
    await agent.settle(second)
    third = await agent.started()
    assert third.HasField("measurement") and world.runs.exclusive_on("pi") == [True]
    await agent.settle(third)
    fourth = await agent.started()
    agent.answer(fourth)
    for job in (*jobs, late):
        states, _ = await world.end(job)
        assert states == STATES_TO_SUCCESS


async def test_shared_runs_survive_a_restart_of_the_server(world: World) -> None:
    agent = await world.agent(concurrent_runs=2)
    jobs = [await world.submit(), await world.submit()]
    runs = [await agent.started(), await agent.started()]
    again = await world.resumed()
    assert again.runs.exclusive_on("pi") == [False, False]
    returned = await Agent(again, concurrent_runs=2).connect(*(run.attempt_id for run in runs))
    waiting = await again.submit()
    await again.until(waiting, model.WAITING)
    await asyncio.sleep(0)
    assert len(again.registry.get("pi").attempt_ids) == 2, "no slot is left"
    for run in runs:
        returned.answer(run)
    last = await returned.started_after_acks()
    returned.answer(last)
    for job in (*jobs, waiting):
        states, _ = await again.end(job)
        assert states[-1] == "SUCCEEDED"


async def test_a_new_server_knows_who_used_devices_for_how_long_and_for_what(world: World) -> None:
    agent = await world.agent("pi")
    measurement = Measurement(warmup=3)
    job = await world.submit(measurement=measurement)
    run = await agent.started()
    agent.answer(run)
    await world.end(job)
    again = await world.restarted()
    placement = Placement(again.registry, again.runs, world.now)
    await restore_use(placement, world.database, AT)
    assert placement._sent.of("pi") == {artifact_of(b"pte").digest}
    cell = (await world.journal.get(job.id, EVERYTHING)).cells[0]
    device = again.registry.get("pi")
    assert placement._durations.estimate_s(workload_of(measurement, [cell]), device) == 0.0, "the test's clock stands still"
    assert placement._durations.estimate_s(workload_of(Measurement(), [cell]), device) is None
    later = Placement(again.registry, again.runs, world.now)
    await restore_use(later, world.database, AT + timedelta(days=8))
    assert later._sent.of("pi") == frozenset(), "too long ago"
