"""Several servers of one farm: what the death of one costs, and what forwarding costs. Agents are simulated.

The servers have TLS and tokens, and jobs are those of two users in two projects.

python -m tests.bench.cluster [killed] [stopped] [watching] [submitting] [--agents N] [--jobs N]

killed:     2 servers, 200 agents, the leader killed with -9 during 500 jobs, and started again: no job is lost, recorded twice or
            failed, no client sees another error than UNAVAILABLE, agents are back.
stopped:    2 servers, 20 agents, the leader stopped with SIGSTOP: how long users and agents wait for the other one.
watching:   1,000 agents over 2 servers: from an agent's change of state to a watcher at the other server.
submitting: jobs submitted per second at the leader, and at the other server, which forwards them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from etfarm.client import AsyncFarm
from etfarm.client.models import CellChanged, CellState
from etfarm.v1 import device_pb2, job_pb2
from etfarm.wire.channel import Access
from tests.bench.fleet import agents_in_processes, trivial_spec
from tests.support import invariants
from tests.support.credentials import USERS, Credentials
from tests.support.farm_calls import FarmCalls, farm_calls
from tests.support.postgres import QUICK, postgres_server
from tests.support.servers import LEADING, Servers
from tests.support.simulated_agent import SimulatedAgent
from tests.support.takeovers import lead_job

AGENTS, JOBS, AT_ONCE = 200, 500, 100
AGENTS_OF_STOPPED: Final = 20
FLEET, CHANGES, PAUSE_S = 1_000, 200, 0.05
SUBMITTED, SUBMITTED_AT_ONCE = 400, 16
LIMITS: Final = {
    "killed": {"lost": 0, "twice": 0, "wrong": 0, "failed": 0, "errors": 0, "back_s": 5.0},
    "stopped": {"call_s": 6.0, "new_client_s": 6.0, "watch_s": 6.0, "agents_s": 6.0},
    "watching": {"p99_ms": 100.0},
    "submitting": {},
}
"""The results are at most these."""


def user_accesses(servers: Servers) -> list[Access]:
    """Return the accesses of the users."""
    assert Credentials.in_use is not None
    return [Credentials.in_use.access(servers.addresses, name) for name in USERS]


async def bench_killed(servers: Servers, agents: int, jobs: int) -> dict[str, Any]:
    """Kill the leader in the middle of jobs."""
    leader, other = servers.add(), servers.add()
    async with AsyncExitStack() as closing:
        fleet = [SimulatedAgent(servers.addresses, f"sim-{number}", run_s=1.0).start() for number in range(agents)]
        for agent in fleet:
            closing.push_async_callback(agent.stop)
        await asyncio.gather(*(agent.wait_connected() for agent in fleet))
        users = [await closing.enter_async_context(farm_calls(servers.addresses, access)) for access in user_accesses(servers)]
        specs, turns = [await trivial_spec(calls) for calls in users], asyncio.Semaphore(AT_ONCE)
        owners = [number % len(users) for number in range(jobs)]
        tasks = [asyncio.create_task(lead_job(users[owner], specs[owner], turns)) for owner in owners]
        while sum(task.done() for task in tasks) < jobs // 4:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.05)
        before, running = [agent.connections for agent in fleet], [set(agent.active) for agent in fleet]
        began = time.monotonic()
        leader.kill9()
        restarting = asyncio.create_task(asyncio.to_thread(leader.start))
        back: list[float] = []
        for agent, connections in zip(fleet, before, strict=True):
            await agent.until(lambda agent=agent, connections=connections: agent.connections > connections)
            back.append(time.monotonic() - began)
        ended = await asyncio.gather(*tasks)
        followed = {job_id: (users[owner], events) for owner, (job_id, events) in zip(owners, ended, strict=True)}
        await restarting
        known = {job.id for calls in users for job in await calls.all_jobs()}
        wrong, states, attempts = list[str](), Counter[str](), Counter[str]()
        for job_id, (calls, events) in followed.items():
            job = await calls.call(calls.jobs.Get, job_pb2.GetJobRequest(job_id=job_id))
            wrong += invariants.check_events(job, events) + invariants.check_reports(job, await calls.reports_of(job_id))
            states[job_pb2.JobState.Name(job.state)] += 1
            attempts.update(attempt.id for cell in job.cells for attempt in cell.attempts)
    repeated = sum((calls.repeated for calls in users), Counter[str]())
    adopted = [agent.started[attempt] for agent, held in zip(fleet, running, strict=True) for attempt in held]
    return {
        "agents": agents, "jobs": len(followed), "lost": jobs - len(followed.keys() & known),
        "twice": len(known - followed.keys()), "wrong": len(wrong), "examples": wrong[:3], "states": dict(states),
        "failed": len(followed) - states["JOB_STATE_SUCCEEDED"], "repeated": dict(repeated),
        "errors": repeated.total() - repeated["UNAVAILABLE"],
        "attempts": len(attempts), "running_when_killed": len(adopted), "restarted": sum(number > 1 for number in adopted),
        "back_s": max(back), "back_median_s": statistics.median(back), "new_leader": LEADING in other.log,
    }  # fmt: skip


async def bench_stopped(servers: Servers, agents: int, _: int) -> dict[str, Any]:
    """Stop the leader's process, whose kernel goes on to acknowledge packets, while a job runs that takes a second."""
    leader, other = servers.add(), servers.add()
    async with AsyncExitStack() as closing:
        closing.callback(leader.signal, signal.SIGCONT)
        fleet = [SimulatedAgent(servers.addresses, f"sim-{number}", run_s=1.0).start() for number in range(agents)]
        for agent in fleet:
            closing.push_async_callback(agent.stop)
        await asyncio.gather(*(agent.wait_connected() for agent in fleet))
        calls = await closing.enter_async_context(farm_calls(servers.addresses))
        spec = await trivial_spec(calls)
        farm = await closing.enter_async_context(AsyncFarm(servers.addresses))
        job = await farm.job((await calls.submit(spec)).id)
        events = job.watch()

        async def until(*states: CellState) -> None:
            async for event in events:
                if isinstance(event, CellChanged) and event.cell.state in states:
                    return

        await until(CellState.RUNNING)
        before = [agent.connections for agent in fleet]
        began = time.monotonic()
        leader.signal(signal.SIGSTOP)

        async def taken(work: Awaitable[object]) -> float:
            await work
            return time.monotonic() - began

        async def connect() -> None:
            async with AsyncFarm(servers.addresses):
                pass

        results = await asyncio.gather(
            taken(asyncio.to_thread(other.wait_until_leading)), taken(farm.jobs(1)), taken(connect()),
            taken(until(CellState.ANALYZING, CellState.SUCCEEDED)),
            *(
                taken(agent.until(lambda agent=agent, connections=connections: agent.connections > connections))
                for agent, connections in zip(fleet, before, strict=True)
            ),
        )  # fmt: skip
    leads_s, call_s, new_client_s, watch_s, *back = results
    return {
        "agents": agents, "leads_s": leads_s, "call_s": call_s, "new_client_s": new_client_s, "watch_s": watch_s,
        "agents_s": max(back), "agents_median_s": statistics.median(back),
    }  # fmt: skip


async def bench_watching(servers: Servers, agents: int, _: int) -> dict[str, Any]:
    """Measure how long a change takes from an agent at one server to a watcher at the other, which forwards."""
    leader, other = servers.add(), servers.add()
    half = agents // 2
    async with (
        agents_in_processes(leader.address, half, prefix="at-leader"),
        agents_in_processes(other.address, agents - half - 2, prefix="at-standby"),
        SimulatedAgent(leader.address, "here") as here, SimulatedAgent(other.address, "there") as there,
        farm_calls(other.address) as calls, farm_calls(leader.address) as direct,
    ):  # fmt: skip
        await direct.until_online(agents)
        result: dict[str, float] = {"agents": agents}
        for name, agent, watcher in (
            ("leader_to_leader", here, direct), ("leader_to_standby", here, calls), ("standby_to_leader", there, direct),
            ("standby_to_standby", there, calls),
        ):  # fmt: skip
            result |= {f"{name}_{part}": value for part, value in (await changes(agent, watcher)).items()}
        result["p99_ms"] = max(result["leader_to_standby_p99_ms"], result["standby_to_leader_p99_ms"])
        return result


async def changes(agent: SimulatedAgent, calls: FarmCalls) -> dict[str, float]:
    """Return the times of changes of an agent's device until a watcher has them, in milliseconds."""
    (device_id,) = agent.devices
    seen: asyncio.Queue[float] = asyncio.Queue()
    offline, watched = False, asyncio.Event()

    async def watch() -> None:
        nonlocal offline
        async for event in calls.devices.Watch(device_pb2.WatchDevicesRequest()):
            watched.set()
            if event.device.id == device_id:
                is_offline = event.device.state == device_pb2.DEVICE_STATE_OFFLINE
                if is_offline is not offline:
                    offline = is_offline
                    seen.put_nowait(time.perf_counter())

    watching = asyncio.create_task(watch())
    await watched.wait()
    await asyncio.sleep(1.0)
    taken: list[float] = []
    for number in range(CHANGES):
        began = time.perf_counter()
        (agent.bring_back if number % 2 else agent.take_away)(device_id)
        taken.append(1e3 * (await asyncio.wait_for(seen.get(), 30) - began))
        await asyncio.sleep(PAUSE_S)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    ordered = sorted(taken)
    return {"median_ms": statistics.median(taken), "p99_ms": ordered[int(0.99 * len(ordered))]}


async def bench_submitting(servers: Servers, _: int, __: int) -> dict[str, Any]:
    """Measure the rate of submissions, in turns, so that other load of the machine falls on both."""
    leader, other = servers.add(), servers.add()
    rates: dict[str, list[float]] = {"direct_per_s": [], "forwarded_per_s": []}
    async with (
        SimulatedAgent(leader.address, "idle", devices=["waits"]) as agent, farm_calls(leader.address) as direct,
        farm_calls(other.address) as forwarded,
    ):  # fmt: skip
        spec = await trivial_spec(direct)
        spec.devices[0].selector = "id=id-of-waits"
        agent.take_away("id-of-waits")
        for _round in range(3):
            for name, calls in (("direct_per_s", direct), ("forwarded_per_s", forwarded)):
                turns = asyncio.Semaphore(SUBMITTED_AT_ONCE)

                async def submit(calls: FarmCalls = calls, turns: asyncio.Semaphore = turns) -> None:
                    async with turns:
                        await calls.submit(spec)

                began = time.perf_counter()
                await asyncio.gather(*(submit() for _ in range(SUBMITTED // 4)))
                rates[name].append(SUBMITTED // 4 / (time.perf_counter() - began))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return medians | {"ratio": medians["forwarded_per_s"] / medians["direct_per_s"]}


BENCHES: Final = {"killed": bench_killed, "stopped": bench_stopped, "watching": bench_watching, "submitting": bench_submitting}


def main() -> int:
    """Run the benches, and print their results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("benches", nargs="*")
    parser.add_argument("--agents", type=int)
    parser.add_argument("--jobs", type=int, default=JOBS)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name in options.benches or BENCHES:
        agents = options.agents or {"watching": FLEET, "stopped": AGENTS_OF_STOPPED}.get(name, AGENTS)
        with postgres_server(QUICK) as database, tempfile.TemporaryDirectory() as folder, Credentials(Path(folder)).used():
            servers = Servers(Path(folder), database.url("postgres"))
            try:
                results[name] = asyncio.run(BENCHES[name](servers, agents, options.jobs))
            finally:
                servers.stop()
        results[name]["within_limits"] = all(results[name][key] <= most for key, most in LIMITS[name].items())
        print(json.dumps({name: results[name]}, indent=1), flush=True)
    return 0 if all(result["within_limits"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
