"""What a scrape of the metrics costs a server: 1,000 devices, 50 projects with live cells, and calls meanwhile.

.venv/bin/python -m tests.bench.scrape
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from etfarm.server.artifacts.room import DiskSpace
from etfarm.server.operation.metrics import Metrics
from etfarm.server.operation.monitor import count_devices
from etfarm.server.operation.snapshot import Snapshot
from etfarm.v1.device_pb2 import Device
from tests.support.cells import BUNDLE, Agent, opened_world

DEVICES, PROJECTS, RPCS, ROUNDS = 1_000, 50, 60, 50
LIMIT_MS = 100.0
"""A scrape every 15 s then takes less than 1 % of a core."""


async def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        async with opened_world(Path(folder), BUNDLE) as world:
            agent = Agent(world, "rack")
            await agent.connect()
            for number in range(DEVICES - 1):
                device = Device(id=f"phone-{number}", name=f"phone-{number}", arch="x86_64", soc="soc", features=["a"] * 20)
                await world.registry.update(agent.session, device)
            metrics = Metrics("1", lambda _: "")
            for rpc in range(RPCS):
                metrics.began(f"Service.Rpc{rpc}")
                metrics.ended(f"Service.Rpc{rpc}", "OK", 0.01, is_stream=False)
            cells = {(state, f"p{number}"): 3 for number in range(PROJECTS) for state in ("RUNNING", "WAITING_FOR_DEVICE")}
            counted: list[float] = []
            rendered: list[float] = []
            lags: list[float] = []
            size = 0
            for _ in range(ROUNDS):
                ticking = asyncio.create_task(_longest_gap(lags))
                began_s = time.perf_counter()
                devices = await count_devices(world.registry)
                counted.append((time.perf_counter() - began_s) * 1e3)
                ticking.cancel()
                assert sum(devices.values()) == DEVICES
                metrics.snapshot = Snapshot(cells=cells, devices=devices, disk=DiskSpace(1, 1, False), stored=(1, 1))
                began_s = time.perf_counter()
                size = len(metrics.render("")[1])
                rendered.append((time.perf_counter() - began_s) * 1e3)
    print(f"devices      {_spread(counted)}  for {DEVICES} devices; longest wait of another task {max(lags) * 1e3:.1f} ms")
    print(f"rendering    {_spread(rendered)}  in a thread, {size / 1e3:.0f} kB")
    total_ms = statistics.median(counted) + statistics.median(rendered)
    print(f"a scrape     {total_ms:.1f} ms of CPU, {total_ms / 150:.2f} % of a core at one every 15 s")
    return 0 if total_ms < LIMIT_MS else 1


async def _longest_gap(gaps: list[float]) -> None:
    """Record how long the event loop does not run this task."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(0)
        gaps.append(time.perf_counter() - before)


def _spread(times_ms: Sequence[float]) -> str:
    return f"median {statistics.median(times_ms):.1f} ms, max {max(times_ms):.1f} ms"


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
