"""The memory of a farm under steady work:

    python -m tests.bench.soak [--minutes 85] [--warm-up 25]

A server with TLS and tokens, one agent, and two users in two projects, who run a job a second in turns, and fewer where the
machine is too slow: a queue that grows takes memory, too. The memory of server and agent after the warm-up is compared with that
at the end: each may grow by 2 MB. The warm-up is longer than the 20 minutes for which the server keeps in memory when artifacts
were used. An error of a client, or of a job, is a failure.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import psutil

from etfarm.client import AsyncFarm
from etfarm.wire.errors import EtfarmError
from tests.support.credentials import USERS, Credentials
from tests.support.farm import FarmProcess
from tests.support.programs import program

JOB_EVERY_S, SAMPLE_EVERY_S = 1.0, 15.0
SAMPLES: Final = 8
"""Number of samples whose median is the memory before and after."""
MAX_GROWTH_MB: Final = 2.0
MOST_AT_ONCE: Final = 4


async def bench(folder: Path, minutes: float, warm_up_minutes: float) -> dict[str, Any]:
    """Return what the processes' memory was, in MB, and by how much it grew after the warm-up."""
    farm = FarmProcess(folder, executes=True)
    failures: list[str] = []
    async with AsyncExitStack() as closing:
        closing.push_async_callback(asyncio.to_thread, farm.stop)
        await asyncio.to_thread(farm.start)
        assert farm.server is not None and Credentials.in_use is not None
        libraries = []
        for name, project in USERS.items():
            access = Credentials.in_use.access(farm.address, name)
            library = AsyncFarm(farm.address, token=access.token, tls_ca=access.tls_ca, project=project)
            libraries.append(await closing.enter_async_context(library))

        async def run(library: AsyncFarm) -> None:
            try:
                job = await library.bench(program("add").path, iterations=5, warmup=1, min_time_s=0.0)
                failures.extend(str(report.error) for report in (await job.result()).reports if report.error is not None)
            except EtfarmError as error:
                failures.append(f"{error.reason}: {error}")

        processes = {"server": psutil.Process(farm.server.pid), "agent": psutil.Process(farm.agents[0].pid)}
        began = sampled = time.monotonic()
        used: dict[str, list[tuple[float, float]]] = {name: [] for name in processes}
        jobs, done = set[asyncio.Task[None]](), 0
        for number, library in enumerate(itertools.cycle(libraries)):
            now = time.monotonic()
            if now - began > 60 * minutes:
                break
            if now - sampled >= SAMPLE_EVERY_S:
                sampled = now
                for name, process in processes.items():
                    used[name].append((now - began, process.memory_info().rss / 1e6))
            if len(jobs) < MOST_AT_ONCE:
                task = asyncio.create_task(run(library))
                jobs.add(task)
                task.add_done_callback(jobs.discard)
                done += 1
            await asyncio.sleep(max(0.0, began + (number + 1) * JOB_EVERY_S - time.monotonic()))
        await asyncio.gather(*jobs)
    memory = {name: summary(values, 60 * warm_up_minutes) for name, values in used.items()}
    grows = [name for name, values in memory.items() if values["growth_mb"] > MAX_GROWTH_MB]
    return {"jobs": done, "failures": failures[:10], "memory": memory, "within_limits": not (failures or grows)}


def summary(values: Sequence[tuple[float, float]], warm_up_s: float) -> dict[str, Any]:
    """Return what the memory was after the warm-up and at the end, how fast it grew in between, and that of each 10 minutes."""
    kept = [(at_s, mb) for at_s, mb in values if at_s >= warm_up_s]
    before, after = (statistics.median(mb for _, mb in part) for part in (kept[:SAMPLES], kept[-SAMPLES:]))
    slope, _ = statistics.linear_regression(*zip(*kept, strict=True))
    tens = itertools.groupby(values, lambda sample: sample[0] // 600)
    return {
        "before_mb": before,
        "after_mb": after,
        "growth_mb": after - before,
        "kb_per_minute": 60e3 * slope,
        "each_10_minutes_mb": [statistics.median(mb for _, mb in part) for _, part in tens],
    }


def main() -> int:
    """Run the bench, and print its result as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=85.0)
    parser.add_argument("--warm-up", type=float, default=25.0, help="in minutes")
    options = parser.parse_args()
    if options.minutes < options.warm_up + SAMPLES * SAMPLE_EVERY_S / 30:
        parser.error("Let the bench run for at least 4 minutes more than its warm-up.")
    with tempfile.TemporaryDirectory(prefix="etfarm-soak-") as folder, Credentials(Path(folder)).used():
        result = asyncio.run(bench(Path(folder), options.minutes, options.warm_up))
    print(json.dumps(result, indent=1))
    return 0 if result["within_limits"] else 1


if __name__ == "__main__":
    sys.exit(main())
