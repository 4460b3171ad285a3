"""Wall clocks that jump, of the server and of an agent, in the middle of runs and between two servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from etfarm.v1 import agent_pb2, farm_pb2, job_pb2
from etfarm.wire.status import from_rpc_error
from tests.support import invariants
from tests.support.clock import WallClock
from tests.support.credentials import ADMIN
from tests.support.farm import FarmProcess
from tests.support.farm_calls import FarmCalls, farm_calls
from tests.support.programs import program
from tests.support.runner import runner_archive
from tests.support.simulated_agent import Act, SimulatedAgent

pytestmark = pytest.mark.slow(reason="starts servers whose clocks jump")

ACTS_AS = ADMIN

HOUR_S = 3600
DAY_S = 24 * HOUR_S
RUN_S = 1.5
LONG_S = 6.0
"""More than the server's tolerance: the result is only plausible if the attempt lasted."""


@pytest.fixture
def clock(tmp_path: Path) -> WallClock:
    return WallClock(tmp_path / "clock")


@pytest.fixture
async def farm(tmp_path: Path, clock: WallClock) -> AsyncIterator[FarmProcess]:
    """A server with the clock, without agents."""
    running = FarmProcess(tmp_path, bundle=False, within=clock.within)
    try:
        yield await asyncio.to_thread(running.start, agents=0)
    finally:
        await asyncio.to_thread(running.stop)


@pytest.fixture
async def calls(farm: FarmProcess) -> AsyncIterator[FarmCalls]:
    async with farm_calls(farm.address) as opened:
        yield opened


async def submitted(calls: FarmCalls, measurement: job_pb2.Measurement | None = None) -> job_pb2.Job:
    candidate = await calls.program(program("add").bytes, "add")
    spec = job_pb2.JobSpec(candidates=[candidate], devices=[job_pb2.DeviceChoice()], measurement=measurement)
    return await calls.submit(spec)


async def require_success(calls: FarmCalls, job: job_pb2.Job) -> None:
    """Require that the job succeeded at the first attempt, and is recorded as every job."""
    events = await calls.watch(job.id)
    ended: job_pb2.Job = await calls.call(calls.jobs.Get, job_pb2.GetJobRequest(job_id=job.id))
    assert ended.state == job_pb2.JOB_STATE_SUCCEEDED, ended.cells[0].error
    assert len(ended.cells[0].attempts) == 1
    assert invariants.check_events(ended, events) == []
    assert invariants.check_reports(ended, await calls.reports_of(job.id)) == []


async def test_jumps_of_the_servers_clock_lose_neither_agents_nor_runs(
    farm: FarmProcess, calls: FarmCalls, clock: WallClock
) -> None:
    async with SimulatedAgent(farm.address, "board", run_s=RUN_S) as agent:
        for number, ahead_s in enumerate((DAY_S, -DAY_S), 1):
            job = await submitted(calls)
            await agent.until(lambda: len(agent.started) == number)  # noqa: B023 - awaited here
            clock.jump(ahead_s)
            await require_success(calls, job)
        assert agent.connections == 1


async def test_jumps_of_an_agents_clock_lose_neither_its_connection_nor_its_runs(
    farm: FarmProcess, calls: FarmCalls, tmp_path: Path
) -> None:
    agents_clock = WallClock(tmp_path / "agents_clock")
    with farm.client() as client:
        await asyncio.to_thread(client.add_bundle, runner_archive())
    agent = await asyncio.to_thread(farm.add_agent, environment=agents_clock.environment)
    for ahead_s in (DAY_S, -DAY_S):
        job = await submitted(calls, job_pb2.Measurement(iterations=20, min_time_s=RUN_S, no_profile=True))
        async for event in calls.jobs.Watch(job_pb2.WatchJobRequest(job_id=job.id)):
            if event.progress.phase == "TIMED":
                break
        agents_clock.jump(ahead_s)
        await require_success(calls, job)
    assert "Trying again" not in agent.log.read_text()


async def test_a_clock_that_was_set_back_between_two_servers_makes_no_result_implausible(
    farm: FarmProcess, calls: FarmCalls, clock: WallClock
) -> None:
    def cut(_: agent_pb2.StartRun) -> Act:
        return Act.CUT

    async with SimulatedAgent(farm.address, "board", run_s=LONG_S, act=cut) as agent:
        job = await submitted(calls, job_pb2.Measurement(iterations=20, min_time_s=LONG_S, no_profile=True))
        await agent.until(lambda: bool(agent.started))
        farm.kill9()
        clock.jump(-HOUR_S)
        await asyncio.to_thread(farm.restart)
        await require_success(calls, job)
        assert len(agent.started) == 1, "the run goes on over the restart"


async def test_a_wrong_clock_deletes_no_history(farm: FarmProcess, calls: FarmCalls, clock: WallClock) -> None:
    async with SimulatedAgent(farm.address, "board", run_s=RUN_S):
        job = await submitted(calls)
        await require_success(calls, job)

    async def deleted() -> int:
        """Return how many jobs a retention of a day deletes."""
        request = farm_pb2.ApplyRetentionRequest(keep=["jobs=1d"])
        answer = await calls.call(calls.farm.ApplyRetention, request)
        return next(int(row.deleted_count) for row in answer.results if row.name == "jobs")

    async def refusal() -> str:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await deleted()
        return from_rpc_error(refused.value, server=farm.address).reason

    clock.jump(365 * DAY_S)
    assert await deleted() == 0, "no year has passed"
    farm.kill9()
    await asyncio.to_thread(farm.restart)
    assert await refusal() == "CLOCK_IMPLAUSIBLE"
    clock.jump(0)
    assert await deleted() == 0
    await require_success(calls, job)
