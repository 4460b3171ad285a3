"""Agents that die, repeat themselves, lie or flap: every job ends once, and what they do wrong changes nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest

from etfarm.v1 import agent_pb2, common_pb2, device_pb2, job_pb2
from tests.support import invariants
from tests.support.farm import FarmProcess
from tests.support.farm_calls import FarmCalls, farm_calls
from tests.support.programs import program
from tests.support.proxy import link_to
from tests.support.simulated_agent import Act, SimulatedAgent

pytestmark = pytest.mark.slow(reason="breaks agents of a real server in the middle of jobs")

WAIT_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    """A server that waits for a minute for an agent that is away: an agent's pauses alone may take seconds."""
    with FarmProcess(tmp_path_factory.mktemp("fleet"), bundle=False) as running:
        yield running.start(agents=0)
        log = (running.folder / "serve.log").read_text()
        assert "Traceback" not in log, log


@pytest.fixture
async def calls(server: FarmProcess) -> AsyncIterator[FarmCalls]:
    async with farm_calls(server.address) as opened:
        yield opened


async def spec_for(calls: FarmCalls, *agents: SimulatedAgent, **more: object) -> job_pb2.JobSpec:
    """Return a job with one cell on each agent's first device."""
    devices = [job_pb2.DeviceChoice(selector=f"id={next(iter(agent.devices))}") for agent in agents]
    return job_pb2.JobSpec(candidates=[await calls.program(program("add").bytes, "add")], devices=devices, **more)  # type: ignore[arg-type]


async def end_of(calls: FarmCalls, job: job_pb2.Job) -> job_pb2.Job:
    """Wait for a job's end, check what holds of every job, and return it."""
    async with asyncio.timeout(WAIT_S):
        events = await calls.watch(job.id)
    ended: job_pb2.Job = await calls.call(calls.jobs.Get, job_pb2.GetJobRequest(job_id=job.id))
    assert invariants.check_events(ended, events) == []
    assert invariants.check_reports(ended, await calls.reports_of(job.id)) == []
    return ended


def agent_that(server: FarmProcess, name: str, *acts: Act) -> SimulatedAgent:
    """Return an agent that does these things, one for each attempt, and answers afterwards."""
    remaining = list(acts)

    def act(_: agent_pb2.StartRun) -> Act:
        return remaining.pop(0) if remaining else Act.ANSWER

    return SimulatedAgent(server.address, name, act=act)


@pytest.mark.parametrize(
    ("act", "reasons"),
    [
        (Act.CRASH, ["ATTEMPT_LOST", ""]),
        (Act.DEVICE_FAULT, ["RUNNER_BROKEN", ""]),
        (Act.IMPLAUSIBLE, ["RESULT_IMPLAUSIBLE", ""]),
        (Act.CUT, [""]),
        (Act.TWICE, [""]),
        (Act.STRANGE, [""]),
        (Act.LATE, [""]),
    ],
)
async def test_a_cell_ends_once_whatever_its_agent_does(
    server: FarmProcess, calls: FarmCalls, act: Act, reasons: list[str]
) -> None:
    async with agent_that(server, f"agent-that-{act.name.lower()}", act) as agent:
        measurement = job_pb2.Measurement(iterations=20, min_time_s=0, no_profile=True)
        job = await end_of(calls, await calls.submit(await spec_for(calls, agent, measurement=measurement)))
        assert job.state == job_pb2.JOB_STATE_SUCCEEDED
        assert [attempt.error.reason for attempt in job.cells[0].attempts] == reasons
        await agent.until(lambda: not agent.outbox)
        assert set(agent.started) == {attempt.id for attempt in job.cells[0].attempts}


async def test_a_late_result_of_a_cancelled_job_changes_nothing(server: FarmProcess, calls: FarmCalls) -> None:
    async with agent_that(server, "late", Act.LATE) as agent:
        job = await calls.submit(await spec_for(calls, agent))
        await agent.until(lambda: bool(agent.started))
        await calls.call(calls.jobs.Cancel, job_pb2.CancelJobRequest(job_id=job.id))
        cancelled = await end_of(calls, job)
        assert cancelled.state == job_pb2.JOB_STATE_CANCELLED
        # The device takes the next run although the agent still works on the former one.
        assert (await end_of(calls, await calls.submit(await spec_for(calls, agent)))).state == job_pb2.JOB_STATE_SUCCEEDED
        (attempt,) = cancelled.cells[0].attempts
        await agent.until(lambda: agent.acknowledged[attempt.id] > 0)
        assert await end_of(calls, job) == cancelled


@pytest.mark.parametrize("fault", ["stall", "slow", "cut"])
async def test_a_bad_link_delays_a_result_and_costs_no_attempt(server: FarmProcess, calls: FarmCalls, fault: str) -> None:
    with link_to(server.address) as link:
        async with SimulatedAgent(link.address, f"behind-a-link-{fault}", run_s=0.3) as agent:
            job = await calls.submit(await spec_for(calls, agent))
            await agent.until(lambda: bool(agent.started))
            {"stall": link.stall, "slow": lambda: link.limit(5_000), "cut": link.cut}[fault]()
            # The result is ready by then, and the server waits for the agent.
            await asyncio.sleep(1.0)
            if fault != "slow":
                (cell,) = (await calls.call(calls.jobs.Get, job_pb2.GetJobRequest(job_id=job.id))).cells
                assert cell.state == common_pb2.CELL_STATE_RUNNING
            link.heal()
            assert [attempt.error.reason for attempt in (await end_of(calls, job)).cells[0].attempts] == [""]
            await agent.until(lambda: not agent.outbox)


async def test_three_flapping_agents_lose_none_of_200_jobs(server: FarmProcess, calls: FarmCalls) -> None:
    async with AsyncExitStack() as closing:
        agents = [SimulatedAgent(server.address, f"flapping-{number}", run_s=0.02, pause_s=0.05) for number in range(3)]
        for agent in agents:
            await closing.enter_async_context(agent)
        ids = {device for agent in agents for device in agent.devices}
        spec = await spec_for(calls, agents[0])
        turns = asyncio.Semaphore(20)

        async def lead(number: int) -> job_pb2.Job:
            spec_of_job = job_pb2.JobSpec()
            spec_of_job.CopyFrom(spec)
            spec_of_job.devices[0].selector = f"id={sorted(ids)[number % 3]}"
            async with turns:
                return await end_of(calls, await calls.submit(spec_of_job))

        async def flap() -> None:
            while True:
                for number, agent in enumerate(agents):
                    # One dies, the others lose their connections and keep their runs.
                    agent.crash() if number == 0 else agent.cut()
                    await asyncio.sleep(0.25)

        flapping = asyncio.create_task(flap())
        jobs = await asyncio.gather(*(lead(number) for number in range(200)))
        flapping.cancel()
        await asyncio.gather(flapping, return_exceptions=True)
        assert len({job.id for job in jobs}) == 200
        assert sum(agent.connections for agent in agents) > 10
        ends = [cell.error.reason for job in jobs for cell in job.cells]
        # A cell that met three deaths of its device is given up; all others ran.
        assert set(ends) <= {"", "ATTEMPT_LOST"} and ends.count("") >= 190, ends
        assert invariants.check_attempts(jobs) == []
        for agent in agents:
            await agent.wait_connected()
            await agent.until(lambda: not agent.outbox and not agent.active)  # noqa: B023 - awaited here
        answer = await calls.call(calls.devices.List, device_pb2.ListDevicesRequest(page_size=500))
        states = {device.state for device in answer.devices if device.id in ids}
        assert states == {device_pb2.DEVICE_STATE_IDLE}
