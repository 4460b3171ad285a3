"""PostgreSQL against SQLite: how long a job without a compilation takes beside its run, and how many jobs a second are accepted.

Two servers, one on each database, are measured in turns, on the disk of the temporary folder. Agents are simulated and answer at
once, so that a job is what the server does.

python -m tests.bench.database [--jobs N] [--rounds N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

import psycopg

from etfarm.v1 import job_pb2
from tests.support.farm import FarmProcess
from tests.support.farm_calls import FarmCalls, farm_calls
from tests.support.postgres import postgres_server
from tests.support.programs import program
from tests.support.simulated_agent import SimulatedAgent

AT_ONCE: Final = 16
"""Submissions under way at a time."""


async def _one_by_one(calls: FarmCalls, count: int) -> list[float]:
    """Return the seconds that each of some jobs takes from its submission to its end."""
    spec = await _spec(calls, "id=id-of-quick")
    seconds = []
    for _ in range(count):
        began_s = time.monotonic()
        job = await calls.submit(spec)
        await calls.watch(job.id)
        seconds.append(time.monotonic() - began_s)
    return seconds


async def _submitted(calls: FarmCalls, count: int) -> float:
    """Return how many jobs a second are accepted, which then wait for a device; they are cancelled afterwards."""
    spec = await _spec(calls, "id=id-of-busy")
    places, began_s = asyncio.Semaphore(AT_ONCE), time.monotonic()

    async def submit() -> str:
        async with places:
            return str((await calls.submit(spec)).id)

    ids = await asyncio.gather(*(submit() for _ in range(count)))
    rate = count / (time.monotonic() - began_s)
    for job_id in ids:
        await calls.call(calls.jobs.Cancel, job_pb2.CancelJobRequest(job_id=job_id))
    return rate


async def _spec(calls: FarmCalls, selector: str) -> job_pb2.JobSpec:
    candidate = await calls.program(program("add").bytes, "add")
    return job_pb2.JobSpec(candidates=[candidate], devices=[job_pb2.DeviceChoice(selector=selector)])


async def _measure(jobs: int, rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"sqlite": [], "postgresql": []}
    rates: dict[str, list[float]] = {"sqlite": [], "postgresql": []}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        postgres = stack.enter_context(postgres_server())
        postgres.execute("CREATE DATABASE {}", "farm")
        calls: dict[str, FarmCalls] = {}
        for name, options in (("sqlite", []), ("postgresql", ["--database", postgres.url("farm")])):
            (folder / name).mkdir()
            limits = ["--quota", "live_jobs_per_user=2000"]
            farm = FarmProcess(folder / name, bundle=False, serve=[*options, *limits, "--metrics", "127.0.0.1:0"])
            stack.callback(farm.stop)
            farm.start(agents=0)
            await stack.enter_async_context(SimulatedAgent(farm.address, "quick"))
            await stack.enter_async_context(SimulatedAgent(farm.address, "busy", run_s=3600.0))
            calls[name] = await stack.enter_async_context(farm_calls(farm.address))
            # It occupies the device that the submitted jobs wait for.
            await calls[name].submit(await _spec(calls[name], "id=id-of-busy"))
            await _one_by_one(calls[name], 5)
        before, round_trips = _transactions(postgres.url("farm")), await asyncio.to_thread(_round_trips, farm)
        for _ in range(rounds):
            for name in calls:
                seconds[name] += await _one_by_one(calls[name], jobs)
        per_job = (_transactions(postgres.url("farm")) - before) / (jobs * rounds)
        round_trips = (await asyncio.to_thread(_round_trips, farm) - round_trips) / (jobs * rounds)
        for _ in range(rounds):
            for name in calls:
                rates[name].append(await _submitted(calls[name], jobs))
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "job_ms": {name: round(median * 1e3, 2) for name, median in medians.items()},
        "job_ratio": round(medians["postgresql"] / medians["sqlite"], 2),
        "write_transactions_per_job": round(per_job, 1),
        "round_trips_per_job": round(round_trips, 1),
        "submitted_per_s": {name: round(statistics.median(each), 1) for name, each in rates.items()},
    }


def _round_trips(farm: FarmProcess) -> float:
    """Return the number of messages to the database that a server has waited for."""
    assert farm.server is not None
    address = next(line for line in farm.server.lines if "metrics on" in line).rpartition(" ")[2]
    with urlopen(f"http://{address}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("etfarm_database_round_trips_total "))


def _transactions(url: str) -> int:
    """Return the number of transactions in which the server has written."""
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT sum(number) FROM commits").fetchone()
        return int(row[0]) if row else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(_measure(arguments.jobs, arguments.rounds)), indent=2))


if __name__ == "__main__":
    main()
