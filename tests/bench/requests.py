"""How long others wait while one caller sends requests near the limits: jobs, answers about them, agents' messages, digests.

Another process calls GetServerInfo on schedule, so that a stall counts for every call that falls into it. Each attack follows a
measurement without one, which tells how loaded the machine is.

python -m tests.bench.requests [ATTACK...]
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import grpc

from etfarm.v1 import (
    agent_pb2,
    agent_pb2_grpc,
    artifact_pb2_grpc,
    common_pb2,
    device_pb2,
    device_pb2_grpc,
    farm_pb2,
    farm_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
)
from etfarm.wire import recipes
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.chunks import artifact_of, upload
from etfarm.wire.names import PROTOCOL_VERSION
from tests.support.contract import address_of
from tests.support.farm import Daemon
from tests.support.programs import program

INTERVAL_S, ALONE_S, ATTACK_S = 0.01, 2.0, 6.0
MOST_OPEN: Final = 200
"""Calls that are under way at a time, below what a connection may have."""
LIMIT_MS: Final = 100.0
STORED, SAMPLES, SPEC_SAMPLES, CELLS = 2_000, 10_000, 100_000, 1_000
PEOPLE = {"root": "admin", "ann": "user", "mallory": "user", "rack": "agent"}
TOKENS = {name: f"secret-of-{name}-0123456789" for name in PEOPLE}
SUBMIT, HELLO = "/etfarm.v1.JobService/Submit", "/etfarm.v1.AgentService/Connect"
FIND_MISSING = "/etfarm.v1.ArtifactService/FindMissing"
DEVICE, AGENT = "bench-device", str(uuid.uuid5(uuid.NAMESPACE_DNS, "agent"))


def channel(address: str, who: str) -> grpc.aio.Channel:
    return open_channel(Access(address, TOKENS[who]))


# The specs.


def sample(index: int) -> bytes:
    return f"sample {index}".encode()


def calibration(count: int) -> list[common_pb2.Artifact]:
    artifacts = [artifact_of(sample(index)) for index in range(STORED)]
    return list(itertools.islice(itertools.cycle(artifacts), count))


def model_candidate(folder: Path, name: str = "net", methods: Iterable[str] = ("forward",)) -> job_pb2.Candidate:
    candidate = job_pb2.Candidate(name=name, recipe=recipes.resolve("xnnpack_fp32", {}).json)
    model = artifact_of((folder / "model.pt2").read_bytes())
    for method in methods:
        candidate.model.methods[method].exported_program.CopyFrom(model)
    return candidate


def program_candidate(folder: Path, name: str = "net") -> job_pb2.Candidate:
    candidate = job_pb2.Candidate(name=name)
    candidate.program.pte.CopyFrom(artifact_of((folder / "program.pte").read_bytes()))
    return candidate


def calibrated(folder: Path) -> job_pb2.JobSpec:
    """As many calibration samples as a request may have, in one cell for each 10,000."""
    spec = job_pb2.JobSpec(name="calibrated")
    for index in range(SPEC_SAMPLES // SAMPLES):
        candidate = model_candidate(folder, f"net-{index}")
        candidate.model.methods["forward"].calibration.extend(calibration(SAMPLES))
        spec.candidates.append(candidate)
    return spec


def strangers(folder: Path) -> job_pb2.JobSpec:
    """Refuse samples that are not stored."""
    spec = calibrated(folder)
    for candidate in spec.candidates:
        for index, artifact in enumerate(candidate.model.methods["forward"].calibration):
            artifact.digest = hashlib.sha256(f"{candidate.name} {index}".encode()).hexdigest()
    return spec


def many_candidates(folder: Path) -> job_pb2.JobSpec:
    return job_pb2.JobSpec(name="candidates", candidates=[model_candidate(folder, f"net-{i}") for i in range(CELLS)])


def many_programs(folder: Path) -> job_pb2.JobSpec:
    return job_pb2.JobSpec(name="programs", candidates=[program_candidate(folder, f"net-{i}") for i in range(CELLS)])


def large_cells(folder: Path) -> job_pb2.JobSpec:
    """100 cells, each with its share of the largest spec."""
    spec = job_pb2.JobSpec(name="cells")
    for index in range(100):
        candidate = model_candidate(folder, f"net-{index}")
        candidate.model.methods["forward"].calibration.extend(calibration(SPEC_SAMPLES // 100))
        spec.candidates.append(candidate)
    return spec


def waiting_cells(folder: Path) -> job_pb2.JobSpec:
    """1,000 cells of one large candidate that wait for a device which is offline."""
    spec = job_pb2.JobSpec(name="waiting", threads=range(1, CELLS + 1))
    spec.devices.add(selector=f"id={DEVICE}")
    spec.measurement.iterations = 1
    candidate = model_candidate(folder)
    candidate.model.methods["forward"].calibration.extend(calibration(SAMPLES))
    spec.candidates.append(candidate)
    return spec


SPECS: dict[str, Callable[[Path], job_pb2.JobSpec]] = {
    "calibrated": calibrated, "strangers": strangers, "candidates": many_candidates, "programs": many_programs,
    "cells": large_cells, "waiting": waiting_cells,
}  # fmt: skip


# The attacks, each in a process of its own until it is killed.


async def submit(address: str, folder: Path, kind: str, at_once: int) -> None:
    body = job_pb2.SubmitJobRequest(protocol_version=PROTOCOL_VERSION, spec=SPECS[kind](folder)).SerializeToString()
    async with channel(address, "mallory") as opened:
        call = opened.unary_unary(SUBMIT)

        async def again() -> None:
            while True:
                request = job_pb2.SubmitJobRequest(request_id=str(uuid.uuid4())).SerializeToString() + body
                try:
                    await call(request, timeout=120)
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                        await asyncio.sleep(1)

        await asyncio.gather(*(again() for _ in range(at_once)))


async def look(address: str, how: str) -> None:
    """List, Get or Watch the jobs that were submitted before, four at a time."""
    async with channel(address, "mallory") as opened:
        jobs = job_pb2_grpc.JobServiceStub(opened)
        ids = [job_id async for job_id in job_ids(jobs)]
        random.Random(0).shuffle(ids)
        # Answers stay bytes: decoding them is this process's work, not the server's.
        listing = opened.unary_unary("/etfarm.v1.JobService/List")
        getting = opened.unary_unary("/etfarm.v1.JobService/Get")
        watching = opened.unary_stream("/etfarm.v1.JobService/Watch")

        async def again() -> None:
            for job_id in itertools.cycle(ids):
                if how == "list":
                    await listing(job_pb2.ListJobsRequest(page_size=500).SerializeToString())
                elif how == "get":
                    await getting(job_pb2.GetJobRequest(job_id=job_id).SerializeToString())
                else:
                    call = watching(job_pb2.WatchJobRequest(job_id=job_id).SerializeToString())
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(2):
                            async for _ in call:
                                pass
                    call.cancel()

        await asyncio.gather(*(again() for _ in range(4)))


def device(index: int, text: int) -> device_pb2.Device:
    return device_pb2.Device(
        id=f"{DEVICE}-{index}", name=f"phone-{index}", arch="aarch64", soc="soc", os="os", cores=8, memory_bytes=1 << 30,
        labels={f"label-{number}": "v" * text for number in range(64)}, features=[f"feature-{number}" for number in range(100)],
    )  # fmt: skip


async def greet(address: str, how: str) -> None:
    """Hellos with 1,000 devices, or updates of one device of them after the other, from four agents at a time."""

    async def again(agent: int) -> None:
        devices = [device(agent * 1_000 + index, 190 if how == "hellos" else 20) for index in range(1_000)]
        hello = agent_pb2.Hello(
            agent_id=str(uuid.uuid5(uuid.NAMESPACE_DNS, str(agent))), protocol_version=PROTOCOL_VERSION, devices=devices
        )
        first = agent_pb2.AgentMessage(hello=hello).SerializeToString()
        rest = [
            agent_pb2.AgentMessage(
                device_update=agent_pb2.DeviceUpdate(device=device(agent * 1_000 + i, 200))
            ).SerializeToString()
            for i in range(1_000)
        ]
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async with channel(address, "rack") as opened:
                    stream = opened.stream_stream(HELLO)()
                    await stream.write(first)
                    await stream.read()
                    if how == "updates":
                        for message in itertools.cycle(rest):
                            await stream.write(message)
                    await stream.done_writing()
                    while await stream.read() is not grpc.aio.EOF:
                        pass

    await asyncio.gather(*(again(agent) for agent in range(4)))


async def beat(address: str) -> None:
    """Messages of the largest size: heartbeats of 1,000 devices, and results of nothing with a million times."""
    async with channel(address, "rack") as opened:
        stream = opened.stream_stream(HELLO)()
        hello = agent_pb2.Hello(agent_id=AGENT, protocol_version=PROTOCOL_VERSION)
        await stream.write(agent_pb2.AgentMessage(hello=hello).SerializeToString())
        telemetry = device_pb2.DeviceTelemetry(cpu_share=0.5, load_1m=1.0, temperature_c=40.0, frequency_hz=10**9)
        heartbeat = agent_pb2.AgentMessage()
        for index in range(1_000):
            heartbeat.heartbeat.telemetry[f"{DEVICE}-{index}"].CopyFrom(telemetry)
        result = agent_pb2.AgentMessage()
        result.run_result.attempt_id, result.run_result.device_id = "0" * 16, DEVICE
        for _ in range(5):
            result.run_result.candidates.add().traced_ns.extend([10**9] * 1_000_000)
        messages = [heartbeat.SerializeToString(), result.SerializeToString()]
        reading = asyncio.create_task(drain(stream))
        for message in itertools.cycle(messages):
            await stream.write(message)
        await reading


async def drain(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


async def find(address: str, kind: str) -> None:
    """FindMissing of 10,000 digests, four at a time."""
    stored = kind == "stored"
    digests = [hashlib.sha256(sample(index % STORED) if stored else f"{index}".encode()).hexdigest() for index in range(10_000)]
    message = b"".join(b"\x0a\x40" + digest.encode() for digest in digests)
    async with channel(address, "mallory") as opened:
        call = opened.unary_unary(FIND_MISSING)

        async def again() -> None:
            while True:
                await call(message)

        await asyncio.gather(*(again() for _ in range(4)))


async def cancel(address: str) -> None:
    """Cancel all jobs of the attacker, four at a time."""
    async with channel(address, "mallory") as opened:
        jobs = job_pb2_grpc.JobServiceStub(opened)
        live = [job_id async for job_id in job_ids(jobs, only_live=True)]
        turns = asyncio.Semaphore(4)

        async def end(job_id: str) -> None:
            async with turns:
                await jobs.Cancel(job_pb2.CancelJobRequest(job_id=job_id), timeout=120)

        await asyncio.gather(*map(end, live))


async def job_ids(jobs: Any, *, only_live: bool = False) -> AsyncIterator[str]:
    token = ""
    while True:
        page = await jobs.List(job_pb2.ListJobsRequest(page_size=500, page_token=token))
        for job in page.jobs:
            if not (only_live and job.HasField("end_time")):
                yield job.id
        if not (token := page.next_page_token):
            return


ATTACKS: dict[str, Callable[[str, Path], Awaitable[None]]] = {
    **{f"submit_{kind}_{n}": lambda to, folder, kind=kind, n=n: submit(to, folder, kind, n) for kind in SPECS for n in (1, 4)},
    "list": lambda to, _: look(to, "list"),
    "get": lambda to, _: look(to, "get"),
    "watch": lambda to, _: look(to, "watch"),
    "cancel": lambda to, _: cancel(to),
    "hellos": lambda to, _: greet(to, "hellos"),
    "updates": lambda to, _: greet(to, "updates"),
    "results": lambda to, _: beat(to),
    "find_stored": lambda to, _: find(to, "stored"),
    "find_strangers": lambda to, _: find(to, "strangers"),
}  # fmt: skip

LOOKS: Final = frozenset({"list", "get", "watch", "cancel"})
"""Attacks on jobs that are there."""

LIMITS = {f"{name}_p99_ms": LIMIT_MS for name in ATTACKS}
"""The results stay below."""


# The others, and the server.


async def waits_ms(address: str, seconds: float) -> list[float]:
    """Return the time of each call from when it was due."""
    times: list[float] = []
    async with channel(address, "ann") as opened:
        stub = farm_pb2_grpc.FarmServiceStub(opened)
        await stub.GetServerInfo(farm_pb2.GetServerInfoRequest())

        turns = asyncio.Semaphore(MOST_OPEN)

        async def ask(due: float) -> None:
            async with turns:
                await stub.GetServerInfo(farm_pb2.GetServerInfoRequest(), timeout=120)
            times.append((time.perf_counter() - due) * 1e3)

        begin, calls = time.perf_counter(), []
        for index in range(int(seconds / INTERVAL_S)):
            due = begin + index * INTERVAL_S
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            calls.append(asyncio.create_task(ask(due)))
        await asyncio.gather(*calls)
    return times


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def figures(times: list[float]) -> tuple[float, float, float]:
    return statistics.median(times), statistics.quantiles(times, n=100)[98], max(times)


async def prepare(address: str, folder: Path) -> None:
    """Store and compile what the attacks need."""
    from etfarm.client import Farm  # torch: the attackers' processes go without
    from tests.support import models
    from tests.support.runner import runner_archive

    with Farm(address, token=TOKENS["root"]) as farm:
        farm.add_bundle(runner_archive())
    models.save(models.conv, folder / "model.pt2")
    (folder / "program.pte").write_bytes(program("add").bytes)
    async with channel(address, "mallory") as opened:
        stub, jobs = artifact_pb2_grpc.ArtifactServiceStub(opened), job_pb2_grpc.JobServiceStub(opened)
        turns = asyncio.Semaphore(32)

        async def store(data: bytes) -> None:
            async with turns:
                await upload(stub, artifact_of(data), data)

        files = [(folder / "model.pt2").read_bytes(), (folder / "program.pte").read_bytes()]
        await asyncio.gather(*map(store, [*files, *map(sample, range(STORED))]))
        for candidate in (model_candidate(folder), program_candidate(folder)):
            request = job_pb2.SubmitJobRequest(
                protocol_version=PROTOCOL_VERSION, request_id=str(uuid.uuid4()), spec=job_pb2.JobSpec(candidates=[candidate])
            )
            job = await jobs.Submit(request)
            async for event in jobs.Watch(job_pb2.WatchJobRequest(job_id=job.id)):
                state = event.job_state
            assert state == job_pb2.JobState.JOB_STATE_SUCCEEDED, state
    async with channel(address, "rack") as opened:
        stream = agent_pb2_grpc.AgentServiceStub(opened).Connect()
        known = device_pb2.Device(id=DEVICE, name=DEVICE, arch=platform.machine(), cores=CELLS)
        hello = agent_pb2.Hello(agent_id=AGENT, protocol_version=PROTOCOL_VERSION, devices=[known])
        await stream.write(agent_pb2.AgentMessage(hello=hello))
        await stream.read()
        async with channel(address, "root") as admin:
            devices = device_pb2_grpc.DeviceServiceStub(admin)
            while not (await devices.List(device_pb2.ListDevicesRequest())).devices:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)
        await stream.write(agent_pb2.AgentMessage(goodbye=agent_pb2.Goodbye()))


async def fill(address: str, folder: Path) -> None:
    """Submit jobs of each accepted kind, which are read later."""
    async with channel(address, "mallory") as opened:
        jobs = job_pb2_grpc.JobServiceStub(opened)
        for kind in ("calibrated", "cells", "waiting", "waiting", "waiting", "waiting"):
            await jobs.Submit(
                job_pb2.SubmitJobRequest(
                    protocol_version=PROTOCOL_VERSION, request_id=str(uuid.uuid4()), spec=SPECS[kind](folder)
                ),
                timeout=120,
            )


async def ready(address: str) -> None:
    """The compile workers have started, which takes all of a small machine's time."""
    async with channel(address, "ann") as opened:
        stub = farm_pb2_grpc.FarmServiceStub(opened)
        while not (await stub.GetServerInfo(farm_pb2.GetServerInfoRequest())).workers_ready:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.2)


@contextlib.contextmanager
def server(folder: Path, data: Path) -> Iterator[Daemon]:
    daemon = Daemon(
        ["serve", "--listen", "127.0.0.1:0", "--data", str(data), "--no-bundle", "--exit-with-stdin", "--tokens",
         str(folder / "tokens")],
        folder / "log",
    )  # fmt: skip
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.kill9()


async def measure(folder: Path, names: Iterable[str]) -> dict[str, float]:
    """Return the figures of each attack, each on a server of its own with the same data."""
    (folder / "tokens").touch(mode=0o600)
    (folder / "tokens").write_text("".join(f"{name} {role} {TOKENS[name]}\n" for name, role in PEOPLE.items()))
    result: dict[str, float] = {}
    with server(folder, folder / "empty") as daemon:
        await prepare(address_of(daemon), folder)
        daemon.stop()
    shutil.copytree(folder / "empty", folder / "full")
    if not LOOKS.isdisjoint(names):
        with server(folder, folder / "full") as daemon:
            await fill(address_of(daemon), folder)
            daemon.stop()
    for name in names:
        data = folder / f"data-{name}"
        shutil.copytree(folder / ("full" if name in LOOKS else "empty"), data)
        with server(folder, data) as daemon:
            address = address_of(daemon)
            await ready(address)
            result |= await attacked(daemon, address, folder, name)
        shutil.rmtree(data)
    return {key: round(value, 2) for key, value in result.items()}


async def attacked(daemon: Daemon, address: str, folder: Path, name: str) -> dict[str, float]:
    """Return the figures of an attack."""
    p50, p99, _ = figures(await waits_ms(address, ALONE_S))
    result = {"alone_p50_ms": p50, "alone_p99_ms": p99}
    attacker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.bench.requests", "--attack", name, address, str(folder)
    )
    try:
        print(f"attack {name} on {daemon.pid}", file=sys.stderr, flush=True)
        if name != "cancel":
            await asyncio.sleep(1)  # until it has made its requests
        used = cpu_s(daemon.pid)
        result["p50_ms"], result["p99_ms"], result["max_ms"] = figures(await waits_ms(address, ATTACK_S))
        result["server_cpus"] = (cpu_s(daemon.pid) - used) / ATTACK_S
    finally:
        with contextlib.suppress(ProcessLookupError):
            attacker.kill()
        await attacker.wait()
    print(name, *(f"{key}={value:.1f}" for key, value in result.items()), file=sys.stderr, flush=True)
    return {f"{name}_{key}": value for key, value in result.items()}


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--attack"]:
        _, name, address, folder = arguments
        asyncio.run(ATTACKS[name](address, Path(folder)))  # type: ignore[arg-type]
        return 0
    if unknown := set(arguments) - set(ATTACKS):
        print(f"unknown attacks: {', '.join(sorted(unknown))}; there are {', '.join(ATTACKS)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(Path(folder), arguments or ATTACKS))
    limits = {key: limit for key, limit in LIMITS.items() if key in result}
    passed = all(result[key] < limit for key, limit in limits.items())
    print(json.dumps({"result": result, "limits": limits, "passed": passed}, indent=1))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
