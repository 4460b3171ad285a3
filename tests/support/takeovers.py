"""Jobs and agents over takeovers of several servers of a farm, and what must be true of them afterwards."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from etfarm.v1 import job_pb2
from tests.support import invariants
from tests.support.farm_calls import FarmCalls
from tests.support.programs import program
from tests.support.simulated_agent import SELECTOR, SimulatedAgent

AGENTS: Final = 6


@asynccontextmanager
async def simulated_agents(addresses: str, count: int = AGENTS) -> AsyncIterator[list[SimulatedAgent]]:
    """Agents that have connected, each slower than the one before."""
    async with AsyncExitStack() as closing:
        agents = [SimulatedAgent(addresses, f"sim-{number}", run_s=0.05 * number) for number in range(count)]
        for agent in agents:
            await closing.enter_async_context(agent)
        yield agents


async def lead_job(calls: FarmCalls, spec: job_pb2.JobSpec, turns: asyncio.Semaphore) -> tuple[str, list[job_pb2.JobEvent]]:
    """Submit a job, and watch it to its end."""
    async with turns:
        job = await calls.submit(spec)
        return job.id, await calls.watch(job.id)


async def trivial_spec(calls: FarmCalls) -> job_pb2.JobSpec:
    """Return a job that needs no compilation, for any simulated device."""
    candidate = await calls.program(program("add").bytes, "add")
    return job_pb2.JobSpec(candidates=[candidate], devices=[job_pb2.DeviceChoice(selector=SELECTOR)])


async def wait_until_back(agents: list[SimulatedAgent], before: list[int]) -> float:
    """Wait until each agent has been welcomed again; return the seconds that it took."""
    began = time.monotonic()
    for agent, connections in zip(agents, before, strict=True):
        await agent.until(lambda agent=agent, connections=connections: agent.connections > connections)  # type: ignore[misc]
    return time.monotonic() - began


async def check(calls: FarmCalls, followed: dict[str, list[job_pb2.JobEvent]], others: Collection[str] = ()) -> None:
    """Require that no job is lost or recorded twice, that those that were followed succeeded, and that no event was missed.

    Args:
        others: jobs that were not followed.
    """
    known = [job.id for job in await calls.all_jobs()]
    assert sorted(known) == sorted([*followed, *others])
    wrong, attempts = [], Counter[str]()
    for job_id, events in followed.items():
        job = await calls.call(calls.jobs.Get, job_pb2.GetJobRequest(job_id=job_id))
        wrong += invariants.check_events(job, events) + invariants.check_reports(job, await calls.reports_of(job_id))
        attempts.update(attempt.id for cell in job.cells for attempt in cell.attempts)
        assert job.state == job_pb2.JOB_STATE_SUCCEEDED, job
    assert wrong == []
    assert set(attempts.values()) == {1}
