"""How long a change of state takes to 100 watchers, of devices and of jobs; and what watchers that do not read cost.

A simulated agent (the real protocol, no runner) changes its devices, and jobs are submitted and cancelled. Times are from the
agent's message, and from the time of a cell's change before it is written, to the receipt in the watchers' processes. The ends of
cells are listed apart: each waits until the disk has the change and the report.

    python -m tests.bench.watching [--watchers 100]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import uuid
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import psutil

from etfarm.client import AsyncFarm
from etfarm.v1 import agent_pb2, common_pb2, device_pb2, job_pb2
from etfarm.wire.names import PROTOCOL_VERSION
from tests.support.agent_stream import AgentStream
from tests.support.farm import FarmProcess
from tests.support.programs import program

PROCESSES = 2
DEVICES, CHANGES, CHANGES_PER_S = 20, 200, 20.0
JOBS = 60
SILENT, SILENT_CHANGES = 100, 300
LIMITS = {"devices_p99_ms": 50.0, "jobs_p99_ms": 50.0, "silent_mib": 50.0}
"""The results stay below."""

WATCH_DEVICES, WATCH_JOBS = "/etfarm.v1.DeviceService/Watch", "/etfarm.v1.JobService/WatchAll"


def raw(data: bytes) -> bytes:
    """Return a message as it is: it is decoded after the measurement."""
    return data


async def read_stream(channel: grpc.aio.Channel, rpc: str, received: list[tuple[float, bytes]], begun: asyncio.Event) -> None:
    """Record the messages of a watch with the times of their receipt."""
    call = channel.unary_stream(rpc, request_serializer=raw, response_deserializer=raw)(b"")
    async for message in call:
        received.append((time.time(), message))
        begun.set()


async def watch(address: str, rpc: str, count: int, pipe: Connection) -> None:
    """Open watches, say so, and send back what they received when asked."""
    streams: list[list[tuple[float, bytes]]] = [[] for _ in range(count)]
    async with grpc.aio.insecure_channel(address) as channel:
        begun = [asyncio.Event() for _ in streams]
        pairs = zip(streams, begun, strict=True)
        tasks = [asyncio.create_task(read_stream(channel, rpc, received, each)) for received, each in pairs]
        for each in begun:
            await each.wait()
        pipe.send("ready")
        await asyncio.to_thread(pipe.recv)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    pipe.send(streams)


def run_watchers(address: str, rpc: str, count: int, pipe: Connection) -> None:
    """Run watches in a process of their own."""
    asyncio.run(watch(address, rpc, count, pipe))


class Watchers:
    """Watches in several processes."""

    def __init__(self, address: str, rpc: str, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(PROCESSES):
            own, other = context.Pipe()
            share = count // PROCESSES + (number < count % PROCESSES)
            process = context.Process(target=run_watchers, args=(address, rpc, share, other), daemon=True)
            process.start()
            self._pipes.append(own)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def stop(self) -> list[list[tuple[float, bytes]]]:
        """Return what each watch received."""
        streams = []
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send("stop")
            streams += pipe.recv()
            process.join()
        return streams


class Agent:
    """An agent without a runner, whose devices have a problem, so that jobs wait for them."""

    def __init__(self) -> None:
        self._stream: AgentStream | None = None
        problem = common_pb2.Error(reason="SIMULATED", message="It runs nothing.", remedy="Wait.")
        self.devices = [
            device_pb2.Device(id=f"device-{index:04}", name=f"board-{index}", arch="x86_64", cores=2, problem=problem)
            for index in range(DEVICES)
        ]

    async def serve(self, address: str, connected: asyncio.Event) -> None:
        """Keep the connection."""
        hello = agent_pb2.Hello(
            agent_id=str(uuid.uuid4()), protocol_version=PROTOCOL_VERSION, agent_version="bench", devices=self.devices
        )
        async with grpc.aio.insecure_channel(address) as channel:
            self._stream = AgentStream(channel, hello)
            async for _ in self._stream.stream:
                connected.set()

    def change(self, number: int) -> float:
        """Change a device; return the time."""
        device = self.devices[number % DEVICES]
        device.labels["change"] = str(number)
        update = agent_pb2.DeviceUpdate(device=device)
        assert self._stream is not None
        sent = time.time()
        self._stream.send(agent_pb2.AgentMessage(device_update=update))
        return sent


def summary(latencies_ms: list[float], expected: int) -> dict[str, float]:
    """Return the percentiles of latencies, and the share of the expected messages that arrived."""
    cuts = statistics.quantiles(latencies_ms, n=100)
    return {"p50_ms": cuts[49], "p99_ms": cuts[98], "max_ms": max(latencies_ms), "received": len(latencies_ms) / expected}


async def measure_devices(address: str, agent: Agent, watchers: int) -> dict[str, float]:
    """Measure changes of devices, from the agent's message to the watchers."""
    watching = await asyncio.to_thread(Watchers, address, WATCH_DEVICES, watchers)
    sent = {}
    for number in range(CHANGES):
        sent[str(number)] = agent.change(number)
        await asyncio.sleep(1 / CHANGES_PER_S)
    await asyncio.sleep(1.0)
    latencies = []
    for stream in await asyncio.to_thread(watching.stop):
        for at, message in stream:
            device = device_pb2.DeviceEvent.FromString(message).device
            if (change := device.labels.get("change", "")) in sent and at >= sent[change]:
                latencies.append((at - sent[change]) * 1e3)
    return summary(latencies, CHANGES * watchers)


async def submit_and_cancel(farm: AsyncFarm) -> None:
    """Submit a job, and cancel it once it waits for a device."""
    job = await farm.run(program("add").path)
    async for event in job.watch():
        if getattr(getattr(event, "cell", None), "state", "") == "WAITING_FOR_DEVICE":
            break
    await job.cancel()


async def measure_jobs(address: str, watchers: int) -> tuple[dict[str, float], dict[str, float]]:
    """Measure changes of cells, from before they are written to the watchers: of live cells, and the cells' ends."""
    async with AsyncFarm(address) as farm:
        await submit_and_cancel(farm)  # the first one starts the process that inspects uploads
        watching = await asyncio.to_thread(Watchers, address, WATCH_JOBS, watchers)
        for _ in range(JOBS):
            await submit_and_cancel(farm)
    await asyncio.sleep(1.0)
    live: list[float] = []
    ends: list[float] = []
    for stream in await asyncio.to_thread(watching.stop):
        for at, message in stream:
            change = job_pb2.JobChange.FromString(message)
            if change.HasField("cell"):
                is_end = change.cell.state == common_pb2.CELL_STATE_CANCELLED
                (ends if is_end else live).append((at - change.cell.update_time.ToNanoseconds() / 1e9) * 1e3)
    # A cell is compiling, then it waits for a device.
    return summary(live, 2 * JOBS * watchers), summary(ends, JOBS * watchers)


async def measure_silent(address: str, server: psutil.Process, agent: Agent) -> dict[str, float]:
    """Measure the server's memory while watchers do not read."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.http2.bdp_probe", 0)]) as channel:
        calls = [channel.unary_stream(WATCH_DEVICES, raw, raw)(b"") for _ in range(SILENT)]
        for call in calls:
            await call.read()
        for device in agent.devices:
            device.labels["filling"] = "x" * 10_000
        before = server.memory_info().rss
        for number in range(SILENT_CHANGES):
            agent.change(number)
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)
        grown = server.memory_info().rss - before
        for call in calls:
            call.cancel()
    return {"watchers": SILENT, "changes": SILENT_CHANGES, "grown_mib": grown / (1 << 20)}


async def measure(watchers: int) -> dict[str, dict[str, float]]:
    """Run the bench on a farm of its own."""
    with tempfile.TemporaryDirectory() as name:
        farm = FarmProcess(Path(name))
        try:
            farm.start(agents=0)
            assert farm.server is not None
            agent, connected = Agent(), asyncio.Event()
            serving = asyncio.create_task(agent.serve(farm.address, connected))
            await connected.wait()
            devices = await measure_devices(farm.address, agent, watchers)
            jobs, ends = await measure_jobs(farm.address, watchers)
            results = {
                "devices": devices,
                "jobs": jobs,
                "job_ends": ends,
                "silent": await measure_silent(farm.address, psutil.Process(farm.server.pid), agent),
            }
            serving.cancel()
            await asyncio.wait([serving])
        finally:
            farm.stop()
    return results


def main() -> int:
    """Print the results as JSON; exit with 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--watchers", type=int, default=100)
    results = asyncio.run(measure(parser.parse_args().watchers))
    reached = {
        "devices_p99_ms": results["devices"]["p99_ms"], "jobs_p99_ms": results["jobs"]["p99_ms"],
        "silent_mib": results["silent"]["grown_mib"],
    }  # fmt: skip
    holds = {name: reached[name] < limit for name, limit in LIMITS.items()}
    print(json.dumps({"bench": "watching", **results, "limits": LIMITS, "holds": holds}, indent=1))
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
