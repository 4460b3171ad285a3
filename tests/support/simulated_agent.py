"""Agents without runners: the real protocol over the real stubs, results that the server accepts, and faults on demand.

`python -m tests.support.simulated_agent SERVER PREFIX COUNT` serves COUNT agents until its stdin ends; it prints a line once all
of them have been connected.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import enum
import platform
import sys
import uuid
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import grpc

from etfarm.device_agents.attempts.transfers import Transfers
from etfarm.device_agents.config import AgentConfig
from etfarm.v1 import agent_pb2, artifact_pb2_grpc, common_pb2, device_pb2
from etfarm.wire import tensors
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.chunks import download_bytes
from etfarm.wire.failover import settle
from etfarm.wire.names import PROTOCOL_VERSION
from etfarm.wire.status import from_rpc_error
from tests.support.agent_stream import AgentStream
from tests.support.credentials import RACK, Credentials

WAIT_S: Final = 60.0
"""For what must come, on a busy machine."""
HEARTBEAT_S: Final = 5.0
"""As `Welcome.heartbeat_interval_s`."""
SAMPLE_NS: Final = 1_000
"""The duration of an iteration where the job requests no minimum duration."""
LATE_S: Final = 1.0
"""How long after its end a late result is sent."""
SELECTOR: Final = "label.simulated=yes"
"""Matches the devices of simulated agents."""


class Act(enum.Enum):
    """What an agent does about an attempt."""

    ANSWER = "answer"
    """Send the result."""
    TWICE = "send the result twice"
    STRANGE = "send results of unknown attempts and devices before its own"
    LATE = "send the result late, even if the attempt was cancelled or the device taken away in the meantime"
    HANG = "never answer"
    CRASH = "die before the result is written; start again without the attempt"
    CUT = "lose the connection before the result; keep running, and send it after the next connect"
    DEVICE_FAULT = "report a device fault, as one that lacks what its inventory has"
    IMPLAUSIBLE = "send samples that contradict the duration"
    USER_FAULT = "report a fault of the program"


def answer_all(_: agent_pb2.StartRun) -> Act:
    """Answer every attempt."""
    return Act.ANSWER


def simulated_device(name: str, *, arch: str = platform.machine()) -> device_pb2.Device:
    """Return a device with a runner of its own, so that the farm sends none."""
    runner = device_pb2.DeviceRunner(kind=common_pb2.RUNNER_KIND_OWN, executorch="1.5.1", backends=["XnnpackBackend"])
    return device_pb2.Device(
        id=f"id-of-{name}", name=name, arch=arch, soc="Simulated", os="Linux", cores=4, memory_bytes=8 << 30,
        labels={"simulated": "yes"}, own_runners=[runner],
    )  # fmt: skip


class SimulatedAgent:
    """An agent that serves devices until it is stopped, over as many connections as necessary.

    Args:
        devices: names of its devices; one with the agent's name if empty.
        act: returns what to do about an attempt.
        run_s: seconds that each attempt takes.
        pause_s: seconds before each further connection; None for a real agent's pauses.
        token: of an agent, for servers with tokens; without, that of the credentials in use or of the environment.
    """

    def __init__(
        self,
        server: str,
        name: str,
        *,
        devices: Sequence[str] = (),
        act: Callable[[agent_pb2.StartRun], Act] = answer_all,
        run_s: float = 0.0,
        pause_s: float | None = None,
        token: str = "",
    ) -> None:
        self.name = name
        self.act = act
        self.run_s = run_s
        self.is_mute = False
        """Whether it sends no heartbeats."""
        self.devices = {device.id: device for device in map(simulated_device, devices or [name])}
        self.connected = asyncio.Event()
        self.connections = 0
        """Number of Welcomes."""
        self.started: Counter[str] = Counter()
        """StartRun messages by attempt."""
        self.acknowledged: Counter[str] = Counter()
        """Acks by attempt."""
        self.outbox: dict[str, agent_pb2.RunResult] = {}
        """Results that the server has not acknowledged; they survive a crash, as on a disk."""
        self.refusals: list[str] = []
        """Reasons of the connections that the server refused."""
        in_use = Credentials.in_use
        own = Access(server, token) if token else Access.of(server)
        self._access = own if token or in_use is None else in_use.access(server, RACK)
        self._pause_s = pause_s
        self._pauses = AgentConfig(self._access, name, Path()).pauses
        self._runs: dict[str, asyncio.Task[None]] = {}
        self.failures: list[BaseException] = []
        """What ended a run's task; a bug of this module."""
        self._places: dict[str, str] = {}
        """The devices of attempts."""
        self._late: set[str] = set()
        self._programs: set[str] = set()
        self._stream: AgentStream | None = None
        self._changed = asyncio.Event()
        self._cut = asyncio.Event()
        self._stopped = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._transfer_channel: grpc.aio.Channel | None = None

    @property
    def active(self) -> list[str]:
        """Attempts that run, and those that hang."""
        return [attempt for attempt in self._runs if attempt not in self.outbox]

    def start(self) -> SimulatedAgent:
        """Start connecting."""
        self._serving = asyncio.create_task(self._serve(), name=f"simulated-{self.name}")
        return self

    async def stop(self) -> None:
        """Say goodbye, and end."""
        self._stopped.set()
        assert self._serving is not None
        await self._serving
        self._forget_runs()
        if self._transfer_channel is not None:
            await self._transfer_channel.close()
        assert not self.failures, self.failures

    async def __aenter__(self) -> SimulatedAgent:
        self.start()
        await self.wait_connected()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def wait_connected(self) -> None:
        """Wait until it is connected."""
        async with asyncio.timeout(WAIT_S):
            await self.connected.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on the agent holds."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def cut(self) -> None:
        """Break the connection; another one follows."""
        self._cut.set()

    def crash(self) -> None:
        """Forget what runs and break the connection, as a killed process does; another one follows."""
        self._forget_runs()
        self.cut()

    def take_away(self, device_id: str) -> None:
        """Tell the server that a device was detached."""
        self._send(agent_pb2.AgentMessage(device_gone=agent_pb2.DeviceGone(device_id=device_id, reason="a test")))

    def bring_back(self, device_id: str) -> None:
        """Announce a device, as after it was attached again."""
        self._send(agent_pb2.AgentMessage(device_update=agent_pb2.DeviceUpdate(device=self.devices[device_id])))

    def report(self, progress: agent_pb2.RunProgress) -> None:
        """Send an attempt's progress."""
        self._send(agent_pb2.AgentMessage(run_progress=progress))

    def _forget_runs(self) -> None:
        for task in self._runs.values():
            task.cancel()
        self._runs.clear()

    def _send(self, message: agent_pb2.AgentMessage) -> None:
        """Send a message, or drop it while there is no connection."""
        if self._stream is not None and self.connected.is_set():
            self._stream.send(message)

    def _hello(self) -> agent_pb2.Hello:
        # Without a boot id: the server does not stay quiet while a simulated device measures.
        return agent_pb2.Hello(
            agent_id=f"agent-{self.name}", protocol_version=PROTOCOL_VERSION, agent_version="simulated", host=self.name,
            devices=self.devices.values(), active_attempts=self.active, unacknowledged_attempts=self.outbox,
        )  # fmt: skip

    def _beat(self) -> agent_pb2.Heartbeat | None:
        if self.is_mute:
            return None
        telemetry = device_pb2.DeviceTelemetry(
            cpu_share=0.1, load_1m=0.2, memory_available_bytes=6 << 30, temperature_c=41.5, frequency_hz=1_800_000_000
        )
        return agent_pb2.Heartbeat(telemetry=dict.fromkeys(self.devices, telemetry))

    async def _serve(self) -> None:
        pauses = self._pauses()
        while not self._stopped.is_set():
            before = self.connections
            async with open_channel(self._access) as channel:
                await settle(channel)
                self._cut.clear()
                self._stream = stream = AgentStream(channel, self._hello(), beat=self._beat, beat_s=HEARTBEAT_S)
                await self._attend(stream)
                self._stream = None
                self.connected.clear()
            if self.connections > before:
                pauses = self._pauses()
            pause_s = next(pauses) if self._pause_s is None else self._pause_s
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), pause_s)

    async def _attend(self, stream: AgentStream) -> None:
        """Serve one stream until it ends, is cut, or the agent is stopped."""
        reader = asyncio.create_task(self._read(stream))
        waits = [asyncio.create_task(event.wait()) for event in (self._cut, self._stopped)]
        try:
            await asyncio.wait({reader, *waits}, return_when=asyncio.FIRST_COMPLETED)
            if self._stopped.is_set() and self.connected.is_set() and not reader.done():
                stream.send(agent_pb2.AgentMessage(goodbye=agent_pb2.Goodbye(reason="a test")))
                stream.outgoing.put_nowait(None)
                await asyncio.wait({reader}, timeout=1.0)
        finally:
            stream.close()
            for task in (reader, *waits):
                task.cancel()
            await asyncio.gather(reader, *waits, return_exceptions=True)

    async def _read(self, stream: AgentStream) -> None:
        try:
            async for message in stream.stream:
                self._take(message)
                self._notify()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                self.refusals.append(from_rpc_error(error, server=self._access.server).reason)
                self._notify()

    def _take(self, message: agent_pb2.ServerMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "welcome":
            self.connections += 1
            self.connected.set()
            for result in list(self.outbox.values()):
                self._send(agent_pb2.AgentMessage(run_result=result))
            if (heartbeat := self._beat()) is not None:
                self._send(agent_pb2.AgentMessage(heartbeat=heartbeat))
        elif kind == "start_run":
            start = message.start_run
            self.started[start.attempt_id] += 1
            self._places[start.attempt_id] = start.device_id
            if start.attempt_id not in self._runs and start.attempt_id not in self.outbox:
                task = asyncio.create_task(self._run(start), name=f"run-{start.attempt_id}")
                task.add_done_callback(self._run_ended)
                self._runs[start.attempt_id] = task
        elif kind == "cancel_run":
            self._cancel(message.cancel_run.attempt_id)
        elif kind == "ack":
            self.acknowledged[message.ack.attempt_id] += 1
            self.outbox.pop(message.ack.attempt_id, None)

    def _cancel(self, attempt_id: str) -> None:
        """End an attempt as a real agent does: a run is answered with an error, a result that waits is dropped."""
        if attempt_id in self._late:
            return
        if self.outbox.pop(attempt_id, None) is None and (task := self._runs.pop(attempt_id, None)) is not None:
            task.cancel()
            error = common_pb2.Error(fault=common_pb2.FAULT_USER, reason="CANCELLED", message="The attempt was cancelled.")
            self._finish(agent_pb2.RunResult(attempt_id=attempt_id, device_id=self._places[attempt_id], error=error))

    def _finish(self, result: agent_pb2.RunResult, times: int = 1) -> None:
        """Keep a result until it is acknowledged, and send it."""
        self.outbox[result.attempt_id] = result
        for _ in range(times):
            self._send(agent_pb2.AgentMessage(run_result=result))

    def _run_ended(self, task: asyncio.Task[None]) -> None:
        self._notify()
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append(error)

    async def _run(self, start: agent_pb2.StartRun) -> None:
        act = self.act(start)
        progress = agent_pb2.RunProgress(attempt_id=start.attempt_id, device_id=start.device_id, phase="TIMED")
        self._send(agent_pb2.AgentMessage(run_progress=progress))
        if act is Act.LATE:
            self._late.add(start.attempt_id)
        elif act is Act.HANG:
            await asyncio.Event().wait()
        await asyncio.sleep(self.run_s + (LATE_S if act is Act.LATE else 0.0))
        if act is Act.CRASH:
            del self._runs[start.attempt_id]  # the current task goes on to its end
            self.crash()
            return
        result = await self._result(start, act)
        if act is Act.CUT:
            self.cut()
            self.connected.clear()
        if act is Act.STRANGE:
            strange = agent_pb2.RunResult(attempt_id=f"unknown-{uuid.uuid4().hex}", device_id=start.device_id)
            self._send(agent_pb2.AgentMessage(run_result=strange))
            strange = agent_pb2.RunResult(attempt_id=start.attempt_id, device_id="a device of nobody")
            self._send(agent_pb2.AgentMessage(run_result=strange))
        self._finish(result, 2 if act is Act.TWICE else 1)
        self._late.discard(start.attempt_id)
        self._runs.pop(start.attempt_id, None)

    async def _result(self, start: agent_pb2.StartRun, act: Act) -> agent_pb2.RunResult:
        result = agent_pb2.RunResult(attempt_id=start.attempt_id, device_id=start.device_id)
        error = None
        if act is Act.DEVICE_FAULT:
            what = "The runner has no backend XnnpackBackend, which the inventory lists."
            error = common_pb2.Error(fault=common_pb2.FAULT_DEVICE, reason="RUNNER_BROKEN", message=what)
        elif act is Act.USER_FAULT or start.HasField("session"):
            error = common_pb2.Error(fault=common_pb2.FAULT_USER, reason="PROGRAM_FAILED", message="The program failed.")
        for candidate in start.candidates:
            result.candidates.append(
                agent_pb2.CandidateResult(cell_id=candidate.cell_id, error=error)
                if error is not None
                else await self._candidate(start, candidate, is_plausible=act is not Act.IMPLAUSIBLE)
            )
        return result

    async def _candidate(
        self, start: agent_pb2.StartRun, candidate: agent_pb2.RunCandidate, *, is_plausible: bool
    ) -> agent_pb2.CandidateResult:
        """Return the result of a program, its artifacts uploaded."""
        if self._transfer_channel is None:
            self._transfer_channel = open_channel(self._access)
        artifacts = artifact_pb2_grpc.ArtifactServiceStub(self._transfer_channel)
        transfers = Transfers(artifacts, self._pauses)
        await self._fetch(artifacts, candidate.program.pte)
        outputs = tensors.encode([tensors.Tensor("0", "float32", (2, 3), bytes(24))])
        result = agent_pb2.CandidateResult(
            cell_id=candidate.cell_id, threads=candidate.threads or 1, outputs=await transfers.upload(outputs), outputs_equal=True
        )
        result.runner.kind, result.runner.executorch = common_pb2.RUNNER_KIND_OWN, "1.5.1"
        result.phases.add(actor=common_pb2.ACTOR_DEVICE, phase="TIMED", start_ms=0.0, duration_ms=1e3 * self.run_s)
        if start.HasField("measurement"):
            measurement = start.measurement
            result.iterations = measurement.iterations if measurement.HasField("iterations") else 100
            sample_ns = max(SAMPLE_NS, -(-int(measurement.min_time_s * 1e9) // result.iterations))
            result.duration_ns = sample_ns * result.iterations
            result.stop_reason = common_pb2.STOP_REASON_ENOUGH
            samples = array("q", [sample_ns if is_plausible else 1]) * result.iterations
            if not is_plausible:
                result.duration_ns = 3_600_000_000_000
            result.samples.CopyFrom(await transfers.upload(samples.tobytes()))
        return result

    async def _fetch(self, artifacts: artifact_pb2_grpc.ArtifactServiceAsyncStub, program: common_pb2.Artifact) -> None:
        """Download a program that it has not run before."""
        pauses = self._pauses()
        while program.digest not in self._programs:
            try:
                await download_bytes(artifacts, program)
                self._programs.add(program.digest)
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                    raise
                await asyncio.sleep(next(pauses))


async def _main(server: str, prefix: str, count: int) -> None:
    agents = [SimulatedAgent(server, f"{prefix}-{number:04}").start() for number in range(count)]
    await asyncio.gather(*(agent.connected.wait() for agent in agents))
    print(f"connected {count}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await asyncio.gather(*(agent.stop() for agent in agents))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.support.simulated_agent", description=__doc__)
    parser.add_argument("server")
    parser.add_argument("prefix")
    parser.add_argument("count", type=int)
    options = parser.parse_args()
    asyncio.run(_main(options.server, options.prefix, options.count))
