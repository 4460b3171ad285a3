"""What a fleet costs its server, and what its faults cost the fleet. Agents are simulated, but for `crash`.

python -m tests.bench.fleet [faults] [reconnect] [idle] [jobs] [crash] [--profile FILE]

faults:    1,000 jobs on 10 agents while agents die and servers are killed: none lost, none recorded twice.
reconnect: seconds from the start of a new server until 200 agents are connected again, after a kill and after an orderly end.
idle:      share of a core and memory of a server with 1,000 connected agents that have nothing to do.
jobs:      trivial jobs per second whose program and analysis are known, on 10 agents, and where their time goes.
crash:     time from the death of a program's runner until the device begins its next run; a real agent.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from etfarm.v1 import common_pb2, job_pb2
from tests.support import invariants
from tests.support.credentials import RACK, Credentials
from tests.support.farm import FarmProcess
from tests.support.farm_calls import FarmCalls, farm_calls
from tests.support.faults import faulty_archive, faulty_program
from tests.support.programs import program
from tests.support.simulated_agent import SELECTOR, Act, SimulatedAgent

JOBS, AGENTS, KILLS_S = 1_000, 10, (3.0, 6.0)
ODDS: Final = {Act.ANSWER: 90, Act.CRASH: 4, Act.CUT: 2, Act.TWICE: 2, Act.STRANGE: 2}
FLEET, RESTARTS = 200, 5
IDLE, IDLE_PROCESSES, IDLE_S = 1_000, 2, 30.0
TRIVIAL, AT_ONCE = 600, 20
CRASHES = 10
WAIT_S = 900.0
LIMITS: Final[dict[str, dict[str, float]]] = {
    "faults": {"lost": 0, "twice": 0, "wrong": 0},
    "reconnect": {"killed_s_max": 5.0, "stopped_s_max": 5.0},
    "idle": {"core_share": 0.10, "rss_mb": 200.0},
    "jobs": {},
    "crash": {"next_run_s_max": 1.0},
}
"""The results are at most these."""


@asynccontextmanager
async def running_farm(
    folder: Path, *, bundle: bool = False, within: Sequence[str] = ()
) -> AsyncIterator[tuple[FarmProcess, FarmCalls]]:
    """A server without agents, and calls to it."""
    farm = FarmProcess(folder, bundle=bundle, within=within)
    try:
        await asyncio.to_thread(farm.start, agents=0)
        async with farm_calls(farm.address) as calls:
            yield farm, calls
    finally:
        await asyncio.to_thread(farm.stop)


@asynccontextmanager
async def agents_in_processes(address: str, agents: int, processes: int = 1, prefix: str = "fleet") -> AsyncIterator[None]:
    """Simulated agents outside of this process, which connect while this goes on."""
    variables = {} if Credentials.in_use is None else Credentials.in_use.environment(RACK)
    running = [
        subprocess.Popen(  # noqa: ASYNC220 - a moment
            [sys.executable, "-m", "tests.support.simulated_agent", address, f"{prefix}-{index}", str(agents // processes)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=os.environ | variables,
        )
        for index in range(processes)
    ]  # fmt: skip
    try:
        yield
    finally:
        for process in running:
            assert process.stdin is not None
            process.stdin.close()
        for process in running:
            try:
                await asyncio.to_thread(process.wait, 60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def server_process(farm: FarmProcess) -> psutil.Process:
    """Return the server's process, without its children."""
    assert farm.server is not None
    return psutil.Process(farm.server.pid)


async def trivial_spec(calls: FarmCalls) -> job_pb2.JobSpec:
    """Return a job of one cell that runs a tiny program once, without a measurement."""
    candidate = await calls.program(program("add").bytes, "add")
    return job_pb2.JobSpec(candidates=[candidate], devices=[job_pb2.DeviceChoice(selector=SELECTOR)])


async def bench_faults(folder: Path) -> dict[str, Any]:
    """Count the jobs that were lost or recorded twice."""
    draws = random.Random(20)
    kills = crashes = 0

    def act(_: object) -> Act:
        nonlocal crashes
        drawn = draws.choices(list(ODDS), list(ODDS.values()))[0]
        crashes += drawn is Act.CRASH
        return drawn

    async with running_farm(folder) as (farm, calls), AsyncExitStack() as closing:
        agents = [SimulatedAgent(farm.address, f"sim-{n}", act=act, run_s=0.01 * n) for n in range(AGENTS)]
        for agent in agents:
            await closing.enter_async_context(agent)
        spec, turns = await trivial_spec(calls), asyncio.Semaphore(AT_ONCE * 2)

        async def lead() -> tuple[str, list[job_pb2.JobEvent]]:
            async with turns:
                job = await calls.submit(spec)
                return job.id, await calls.watch(job.id)

        async def kill() -> None:
            nonlocal kills
            while True:
                await asyncio.sleep(draws.uniform(*KILLS_S))
                farm.kill9()
                kills += 1
                await asyncio.to_thread(farm.restart)

        started = time.perf_counter()
        killing = asyncio.create_task(kill())
        followed = dict(await asyncio.gather(*(lead() for _ in range(JOBS))))
        seconds = time.perf_counter() - started
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        if server_process(farm).status() == psutil.STATUS_ZOMBIE:
            await asyncio.to_thread(farm.restart)
        known = {job.id for job in await calls.all_jobs()}
        wrong, ends, attempts = list[str](), Counter[str](), 0
        for job_id in followed:
            job = await calls.call(calls.jobs.Get, job_pb2.GetJobRequest(job_id=job_id))
            wrong += invariants.check_events(job, followed[job_id])
            wrong += invariants.check_reports(job, await calls.reports_of(job_id))
            ends.update(cell.error.reason or common_pb2.CellState.Name(cell.state) for cell in job.cells)
            attempts += sum(len(cell.attempts) for cell in job.cells)
    wrong += invariants.check_database(folder / "server" / "farm.sqlite")
    return {
        "jobs": len(followed), "lost": JOBS - len(followed.keys() & known), "twice": len(known - followed.keys()),
        "wrong": len(wrong), "examples": wrong[:5], "server_kills": kills, "agent_crashes": crashes, "attempts": attempts,
        "cells": dict(ends), "seconds": seconds,
    }  # fmt: skip


async def bench_reconnect(folder: Path) -> dict[str, Any]:
    """Measure the reconnection of a fleet to a new server."""
    taken: dict[str, list[float]] = {"killed_s": [], "stopped_s": [], "listening_s": [], "after_listening_s": []}
    async with running_farm(folder) as (farm, calls), agents_in_processes(farm.address, FLEET):
        await calls.until_online(FLEET)
        for how in ("killed_s", "stopped_s"):
            for _ in range(RESTARTS):
                if how == "killed_s":
                    farm.kill9()
                else:
                    assert farm.server is not None
                    await asyncio.to_thread(farm.server.stop)
                started = time.perf_counter()
                await asyncio.to_thread(farm.restart)
                taken["listening_s"].append(time.perf_counter() - started)
                await calls.until_online(FLEET)
                taken[how].append(time.perf_counter() - started)
                taken["after_listening_s"].append(taken[how][-1] - taken["listening_s"][-1])
    return {f"{name}_{part}": number(values) for name, values in taken.items() for part, number in PARTS.items()}


PARTS: Final[dict[str, Callable[[list[float]], float]]] = {"median": statistics.median, "max": max}


async def bench_idle(folder: Path) -> dict[str, Any]:
    """Measure what idle agents cost."""
    async with running_farm(folder) as (farm, calls):
        server = server_process(farm)
        alone_mb = server.memory_info().rss / 1e6
        started = time.perf_counter()
        async with agents_in_processes(farm.address, IDLE, IDLE_PROCESSES):
            await calls.until_online(IDLE)
            connected_s = time.perf_counter() - started
            await asyncio.sleep(10.0)
            before, began = server.cpu_times(), time.perf_counter()
            await asyncio.sleep(IDLE_S)
            after, seconds = server.cpu_times(), time.perf_counter() - began
            cpu_s = after.user - before.user + after.system - before.system
            memory = server.memory_info().rss / 1e6
            online, threads = await calls.online(), server.num_threads()
    return {
        "agents": online, "core_share": cpu_s / seconds, "rss_mb": memory, "rss_mb_without_agents": alone_mb, "threads": threads,
        "all_connected_s": connected_s,
    }  # fmt: skip


async def bench_jobs(folder: Path, within: Sequence[str] = ()) -> dict[str, Any]:
    """Measure the throughput of jobs whose compilation and analysis are cached."""
    async with running_farm(folder, within=within) as (farm, calls), agents_in_processes(farm.address, AGENTS):
        await calls.until_online(AGENTS)
        spec, turns = await trivial_spec(calls), asyncio.Semaphore(AT_ONCE)
        await calls.watch((await calls.submit(spec)).id)  # what is computed once
        submits: list[float] = []

        async def lead() -> list[job_pb2.JobEvent]:
            async with turns:
                began = time.perf_counter()
                job = await calls.submit(spec)
                submits.append(time.perf_counter() - began)
                return await calls.watch(job.id)

        server = server_process(farm)
        before, began = server.cpu_times(), time.perf_counter()
        followed = await asyncio.gather(*(lead() for _ in range(TRIVIAL)))
        seconds, after = time.perf_counter() - began, server.cpu_times()
    steps: dict[str, list[float]] = {}
    for events in followed:
        assert events[-1].job_state == job_pb2.JOB_STATE_SUCCEEDED
        for former, event in itertools.pairwise(events):
            name = "JOB" if event.HasField("job") else common_pb2.CellState.Name(event.cell.state).removeprefix("CELL_STATE_")
            steps.setdefault(f"until_{name}_ms", []).append((event.time.ToNanoseconds() - former.time.ToNanoseconds()) / 1e6)
    cpu_s = after.user - before.user + after.system - before.system
    return {
        "jobs_per_s": TRIVIAL / seconds, "server_cpu_ms_a_job": 1e3 * cpu_s / TRIVIAL, "server_core_share": cpu_s / seconds,
        "submit_ms": 1e3 * statistics.median(submits), **{name: statistics.median(values) for name, values in steps.items()},
    }  # fmt: skip


async def bench_crash(folder: Path) -> dict[str, Any]:
    """Measure how soon a real device begins its next run after a program has crashed."""
    waits, between = [], []
    async with running_farm(folder, bundle=True) as (farm, calls):
        with farm.client() as client:
            await asyncio.to_thread(client.add_bundle, faulty_archive())
        await asyncio.to_thread(farm.add_agent)
        good = await calls.program(program("add").bytes, "add")
        bad = await calls.program(faulty_program("ab1"), "crashes")

        def spec(candidate: job_pb2.Candidate) -> job_pb2.JobSpec:
            return job_pb2.JobSpec(candidates=[candidate], devices=[job_pb2.DeviceChoice()])

        for candidate in (good, bad):
            await calls.watch((await calls.submit(spec(candidate))).id)
        for _ in range(CRASHES):
            crashing, following = await calls.submit(spec(bad)), await calls.submit(spec(good))
            first, second = await asyncio.gather(calls.watch(crashing.id), calls.watch(following.id))
            assert (first[-1].job_state, second[-1].job_state) == (job_pb2.JOB_STATE_FAILED, job_pb2.JOB_STATE_SUCCEEDED)
            (cell,) = (await calls.call(calls.jobs.Get, job_pb2.GetJobRequest(job_id=crashing.id))).cells
            assert cell.error.reason == "PROGRAM_CRASHED", cell.error
            (run,) = (await calls.call(calls.jobs.Get, job_pb2.GetJobRequest(job_id=following.id))).cells
            (report,) = await calls.reports_of(crashing.id)
            # The runner dies after its last phase has begun, and the farm is told once the self-test has passed.
            ended = cell.attempts[-1].end_time.ToNanoseconds()
            loaded = [phase for phase in report.timeline if phase.phase == "LOAD"]
            died = (
                crashing.create_time.ToNanoseconds() + int(1e6 * (loaded[-1].start_ms + loaded[-1].duration_ms))
                if loaded
                else ended
            )
            begun = run.attempts[-1].start_time.ToNanoseconds()
            waits.append((begun - died) / 1e9)
            between.append((begun - ended) / 1e9)
    return {
        "next_run_s_median": statistics.median(waits), "next_run_s_max": max(waits),
        "after_the_result_ms_median": 1e3 * statistics.median(between),
    }  # fmt: skip


BENCHES: Final[dict[str, Callable[..., Awaitable[dict[str, Any]]]]] = {
    "faults": bench_faults, "reconnect": bench_reconnect, "idle": bench_idle, "jobs": bench_jobs, "crash": bench_crash,
}  # fmt: skip


def main() -> int:
    """Run benches; return 1 if a result exceeds its limit."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fleet", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all; {', '.join(BENCHES)}")
    parser.add_argument("--profile", type=Path, help="write a cProfile of the server's event loop in `jobs` to this file")
    options = parser.parse_args()
    holds = True
    program("add")
    # An installed server has its bytecode, without which its start takes half as long again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for name in options.names or BENCHES:
        within: dict[str, Any] = {}
        if name == "jobs" and options.profile is not None:
            script = f'shift; exec {sys.executable} -m cProfile -o {options.profile.resolve()} "$@"'
            within["within"] = ["sh", "-c", script, "sh"]
        with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
            os.environ["PYTHONPYCACHEPREFIX"] = f"{folder}/bytecode"
            result = asyncio.run(asyncio.wait_for(BENCHES[name](Path(folder), **within), WAIT_S))
        limits = {f"{key}_at_most_{limit:g}": result[key] <= limit for key, limit in LIMITS[name].items()}
        holds = holds and all(limits.values())
        print(json.dumps({"bench": f"fleet_{name}", **result, "holds": limits}, indent=1), flush=True)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
