"""The agent as a real process, with its real runner, against a server of its contract that the test holds in its hands."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from etfarm.v1 import agent_pb2, agent_pb2_grpc, artifact_pb2, artifact_pb2_grpc, common_pb2, compile_pb2, job_pb2
from etfarm.wire import digest, status, tensors
from etfarm.wire.channel import SERVER_OPTIONS
from etfarm.wire.chunks import artifact_of
from etfarm.wire.errors import EtfarmError, Fault, Kind, error_of
from tests.support.programs import program
from tests.support.runner import runner_archive

WAIT_S = 30.0
LONG = job_pb2.Measurement(min_time_s=60)


class Connection:
    """One Connect stream, seen from the server."""

    def __init__(self, hello: agent_pb2.Hello) -> None:
        self.hello = hello
        self.outgoing: asyncio.Queue[agent_pb2.ServerMessage] = asyncio.Queue()
        self.received: list[agent_pb2.AgentMessage] = []
        self.changed = asyncio.Condition()

    async def take(self, message: agent_pb2.AgentMessage) -> None:
        async with self.changed:
            self.received.append(message)
            self.changed.notify_all()

    async def until(self, which: Callable[[agent_pb2.AgentMessage], bool], after: int = 0) -> agent_pb2.AgentMessage:
        """The first message after `after` others that `which` holds of."""
        async with asyncio.timeout(WAIT_S), self.changed:
            await self.changed.wait_for(lambda: any(which(message) for message in self.received[after:]))
            return next(message for message in self.received[after:] if which(message))

    async def result(self, attempt: str, after: int = 0) -> agent_pb2.RunResult:
        message = await self.until(lambda m: m.HasField("run_result") and m.run_result.attempt_id == attempt, after)
        return message.run_result

    async def phase(self, name: str) -> agent_pb2.RunProgress:
        return (await self.until(lambda m: m.run_progress.phase == name)).run_progress

    def start(self, attempt: str, *candidates: agent_pb2.RunCandidate, **more: Any) -> None:
        device = more.pop("device_id", self.hello.devices[0].id)
        start = agent_pb2.StartRun(attempt_id=attempt, device_id=device, candidates=candidates, **more)
        self.outgoing.put_nowait(agent_pb2.ServerMessage(start_run=start))

    def cancel(self, attempt: str) -> None:
        self.outgoing.put_nowait(agent_pb2.ServerMessage(cancel_run=agent_pb2.CancelRun(attempt_id=attempt, reason="a test")))

    def ack(self, attempt: str) -> None:
        self.outgoing.put_nowait(agent_pb2.ServerMessage(ack=agent_pb2.Ack(attempt_id=attempt)))


class Server(agent_pb2_grpc.AgentServiceServicer, artifact_pb2_grpc.ArtifactServiceServicer):
    """The server's end: blobs in memory, connections handed to the test."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.connections: asyncio.Queue[Connection] = asyncio.Queue()
        self.refusal: EtfarmError | None = None
        self.downloads: list[str] = []
        self.away = False
        self.turned_away = asyncio.Event()
        self.heartbeat_s = 0.2
        self._port = 0
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    async def start(self) -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        agent_pb2_grpc.add_AgentServiceServicer_to_server(self, self._server)
        artifact_pb2_grpc.add_ArtifactServiceServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(None)

    async def connected(self) -> Connection:
        async with asyncio.timeout(WAIT_S):
            return await self.connections.get()

    def put(self, data: bytes) -> common_pb2.Artifact:
        artifact = artifact_of(data)
        self.blobs[artifact.digest] = data
        return artifact

    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[agent_pb2.ServerMessage]:
        if self.refusal is not None:
            self.turned_away.set()
            await context.abort_with_status(status.to_status(self.refusal))
        hello = await anext(request_iterator)
        connection = Connection(hello.hello)

        async def read() -> None:
            async for message in request_iterator:
                await connection.take(message)

        reader = asyncio.create_task(read())
        self.connections.put_nowait(connection)
        try:
            yield agent_pb2.ServerMessage(welcome=agent_pb2.Welcome(server_version="test", heartbeat_interval_s=self.heartbeat_s))
            while not reader.done():
                sending = asyncio.create_task(connection.outgoing.get())
                await asyncio.wait({reader, sending}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    yield sending.result()
                sending.cancel()
        finally:
            reader.cancel()

    async def FindMissing(self, request: artifact_pb2.FindMissingRequest, context: Any) -> artifact_pb2.FindMissingResponse:
        if self.away:
            self.turned_away.set()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        return artifact_pb2.FindMissingResponse(missing=[name for name in request.digests if name not in self.blobs])

    async def GetUploadStatus(self, request: artifact_pb2.GetUploadStatusRequest, context: Any) -> artifact_pb2.UploadStatus:
        return artifact_pb2.UploadStatus(digest=request.digest, complete=request.digest in self.blobs)

    async def Upload(self, request_iterator: Any, context: Any) -> artifact_pb2.UploadStatus:
        header = (await anext(request_iterator)).header
        data = b"".join([request.chunk.data async for request in request_iterator])
        assert self.put(data) == header.artifact
        return artifact_pb2.UploadStatus(digest=header.artifact.digest, committed_bytes=len(data), complete=True)

    async def Download(self, request: artifact_pb2.DownloadRequest, context: Any) -> AsyncIterator[artifact_pb2.Chunk]:
        self.downloads.append(request.digest)
        data = self.blobs[request.digest]
        for start in range(request.offset, len(data), 1 << 18):
            yield artifact_pb2.Chunk(offset=start, data=data[start : start + (1 << 18)])

    def candidate(self, name: str, cell: str = "cell", **more: Any) -> agent_pb2.RunCandidate:
        """A candidate of one of the tests' programs, its artifacts stored."""
        made = program(name)
        pte = self.put(made.bytes)
        given = compile_pb2.Program(pte=pte, digest=digest.of_program(pte.digest, {}))
        bundle = agent_pb2.RunnerBundle(artifact=self.put(runner_archive().read_bytes()))
        more.setdefault("inputs", self.put(tensors.encode(made.inputs)))
        return agent_pb2.RunCandidate(cell_id=cell, program=given, bundle=bundle, **more)


class AgentProcess:
    """`etfarm agent` as its own process."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            return (await self.process.stdout.readline()).decode().rstrip()

    async def ended(self) -> int:
        async with asyncio.timeout(WAIT_S):
            return await self.process.wait()

    def runners(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


Launch = Callable[..., Any]


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def launch(server: Server, tmp_path: Path) -> AsyncIterator[Launch]:
    """Starts agents of the test's data folder, which are gone after it."""
    agents: list[AgentProcess] = []

    async def start(*arguments: str, data: Path = tmp_path / "agent", **environment: str) -> AgentProcess:
        log = tmp_path / f"agent-{len(agents)}.log"
        command = [sys.executable, "-m", "etfarm.wire.command", "agent", "--server", server.address, "--data", str(data)]
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *command,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **environment},
            )
        agents.append(AgentProcess(process, log))
        return agents[-1]

    yield start
    for agent in agents:
        with contextlib.suppress(ProcessLookupError):
            agent.process.kill()
        await agent.process.wait()
        assert "asyncio" not in agent.log and "Traceback" not in agent.log, agent.log


def values(server: Server, artifact: common_pb2.Artifact) -> list[np.ndarray]:
    decoded = tensors.decode(server.blobs[artifact.digest])
    return [tensors.to_array(value) for value in decoded if isinstance(value, tensors.Tensor)]


def expected(name: str) -> list[np.ndarray]:
    return [tensors.to_array(value) for value in program(name).expected if isinstance(value, tensors.Tensor)]


async def gone(process: psutil.Process, within_s: float) -> None:
    """Waits until a process has ended."""
    until = time.monotonic() + within_s
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, f"{process} is still there"
        await asyncio.sleep(0.01)


async def test_an_agent_introduces_its_machine_and_beats(server: Server, launch: Launch) -> None:
    agent = await launch("--name", "board-7", "--label", "rack=3")
    connection = await server.connected()
    hello, device = connection.hello, connection.hello.devices[0]
    assert hello.protocol_version == 1
    assert (device.name, device.labels["rack"], device.agent_id) == ("board-7", "3", hello.agent_id)
    assert device.arch == os.uname().machine
    assert device.cores == len(os.sched_getaffinity(0))
    assert device.memory_bytes == psutil.virtual_memory().total
    assert sum(len(cluster.cpus) for cluster in device.clusters) == device.cores
    beat = await connection.until(lambda m: m.HasField("heartbeat") and len(connection.received) > 2)
    told = beat.heartbeat.telemetry[device.id]
    assert 0 < told.memory_available_bytes < device.memory_bytes
    assert 0 < told.agent_rss_bytes < 50 << 20, "the agent must stay small"
    assert await agent.line() == f"etfarm agent: connecting to {server.address}"
    assert await agent.line() == f"etfarm agent: connected to {server.address} as board-7 ({device.id})"


async def test_a_benchmark_gives_samples_outputs_a_trace_and_counters(server: Server, launch: Launch) -> None:
    await launch()
    connection = await server.connected()
    measurement = job_pb2.Measurement(warmup=3, iterations=20, min_time_s=0.1)
    connection.start("a1", server.candidate("conv"), measurement=measurement, deadline_s=60)
    result = await connection.result("a1")
    (cell,) = result.candidates
    assert not result.HasField("error") and not cell.HasField("error"), cell.error
    samples = server.blobs[cell.samples.digest]
    times = struct.unpack(f"<{cell.iterations}q", samples)
    assert cell.iterations >= 20 and min(times) > 0 and cell.warmup == 3 and cell.stop_reason == "ENOUGH"
    assert cell.duration_ns >= max(100_000_000, sum(times))
    assert cell.outputs_equal is True
    np.testing.assert_allclose(values(server, cell.outputs)[0], expected("conv")[0], rtol=1e-5, atol=1e-6)
    assert len(server.blobs[cell.etdump.digest]) > 100
    assert len(cell.traced_ns) == (100 if sorted(times)[len(times) // 2] < 20_000 else 10)
    assert [phase.phase for phase in cell.phases] == ["FETCH", "LOAD", "LOAD_METHOD", "WARMUP", "TIMED", "TRACED", "UPLOAD"]
    starts = [phase.start_ms for phase in cell.phases]
    assert starts == sorted(starts) and starts[0] >= 0
    assert cell.threads == connection.hello.devices[0].clusters[0].physical_cores
    assert cell.runner.kind == "native" and not cell.runner.HasField("cores")
    assert cell.memory.peak_rss_bytes > 1 << 20 and sum(cell.memory.planned_bytes) > 0
    assert cell.telemetry.cpu_time_ns > 0
    begun = [m.run_progress.phase for m in connection.received if m.HasField("run_progress")]
    assert list(dict.fromkeys(begun)) == [phase.phase for phase in cell.phases]


async def test_without_a_measurement_a_program_runs_once(server: Server, launch: Launch) -> None:
    await launch()
    connection = await server.connected()
    connection.start("a1", server.candidate("counter"), deadline_s=60)
    (cell,) = (await connection.result("a1")).candidates
    np.testing.assert_array_equal(values(server, cell.outputs)[0], expected("counter")[0])
    assert not cell.HasField("samples") and not cell.HasField("etdump") and not cell.HasField("outputs_equal")


async def test_a_program_with_state_is_judged_by_its_first_run(server: Server, launch: Launch) -> None:
    await launch()
    connection = await server.connected()
    for attempt, no_profile in (("traced", False), ("untraced", True)):
        measurement = job_pb2.Measurement(iterations=5, min_time_s=0, no_profile=no_profile)
        connection.start(attempt, server.candidate("counter"), measurement=measurement, deadline_s=60)
        (cell,) = (await connection.result(attempt)).candidates
        np.testing.assert_array_equal(values(server, cell.outputs)[0], expected("counter")[0])
        assert cell.HasField("outputs_equal") is (not no_profile)
        assert cell.outputs_equal is not no_profile


async def test_artifacts_are_fetched_once_also_by_the_next_process(server: Server, launch: Launch) -> None:
    for attempt in ("a1", "a2"):
        agent = await launch()
        connection = await server.connected()
        connection.start(attempt, server.candidate("add"), deadline_s=60)
        assert not (await connection.result(attempt)).candidates[0].HasField("error")
        agent.process.terminate()
        assert await agent.ended() == 0
    assert len(server.downloads) == len(set(server.downloads)) == 3


async def test_a_wrong_input_is_the_users_fault(server: Server, launch: Launch) -> None:
    await launch()
    connection = await server.connected()
    wrong = server.put(tensors.encode(program("add").inputs))
    connection.start("a1", server.candidate("conv", inputs=wrong), server.candidate("add", "second"), deadline_s=60)
    first, second = (await connection.result("a1")).candidates
    assert (first.error.fault, first.error.reason) == (common_pb2.FAULT_USER, "INPUT_MISMATCH")
    assert not second.HasField("error"), "the other candidates run all the same"


async def test_a_crash_is_the_programs_when_the_self_test_passes(server: Server, launch: Launch) -> None:
    agent = await launch()
    connection = await server.connected()
    connection.start("a1", server.candidate("conv"), measurement=LONG, deadline_s=60)
    await connection.phase("TIMED")
    os.kill(agent.runners()[0].pid, signal.SIGSEGV)
    struck_s = time.monotonic()
    error = (await connection.result("a1")).candidates[0].error
    assert time.monotonic() - struck_s < 1.0
    assert (error.fault, error.reason, error.stage) == (common_pb2.FAULT_USER, "PROGRAM_CRASHED", "TIMED")
    assert (error.metadata["signal"], error.metadata["self_test"]) == ("SIGSEGV", "passed")
    connection.start("a2", server.candidate("add"), deadline_s=60)
    assert not (await connection.result("a2")).candidates[0].HasField("error"), "the agent serves on"


async def test_a_crash_is_the_devices_when_the_self_test_fails_too(server: Server, launch: Launch, tmp_path: Path) -> None:
    agent = await launch()
    connection = await server.connected()
    connection.start("a1", server.candidate("conv"), server.candidate("add", "second"), measurement=LONG, deadline_s=60)
    await connection.phase("TIMED")
    for loader in (tmp_path / "agent" / "cache" / "bundles").glob("*/ld-linux*"):
        loader.chmod(0o644)
    os.kill(agent.runners()[0].pid, signal.SIGBUS)
    result = await connection.result("a1")
    assert result.error.fault == common_pb2.FAULT_DEVICE
    assert [c.error.reason for c in result.candidates] == ["DEVICE_SELF_TEST_FAILED"] * 2
    assert result.error.metadata["program_error"] == "PROGRAM_CRASHED"


async def test_a_hanging_program_is_killed_at_the_deadline(server: Server, launch: Launch) -> None:
    agent = await launch()
    connection = await server.connected()
    connection.start("a1", server.candidate("conv"), measurement=LONG, deadline_s=1.5)
    started_s = time.monotonic()
    await connection.phase("TIMED")
    (runner,) = agent.runners()
    runner.suspend()
    error = (await connection.result("a1")).candidates[0].error
    assert time.monotonic() - started_s < 3.0
    assert (error.fault, error.reason, error.stage) == (common_pb2.FAULT_USER, "PROGRAM_TIMED_OUT", "TIMED")
    assert error.metadata["self_test"] == "passed"
    assert not runner.is_running()


async def test_a_cancelled_run_frees_the_device_within_a_second(server: Server, launch: Launch) -> None:
    agent = await launch()
    connection = await server.connected()
    connection.start("a1", server.candidate("conv"), measurement=LONG, deadline_s=600)
    await connection.phase("TIMED")
    (runner,) = agent.runners()
    cancelled_s = time.monotonic()
    connection.cancel("a1")
    connection.start("a2", server.candidate("add"), deadline_s=60)
    result = await connection.result("a1")
    assert time.monotonic() - cancelled_s < 1.0
    assert result.error.reason == "CANCELLED"
    assert not runner.is_running()
    assert not (await connection.result("a2")).candidates[0].HasField("error"), "the next run need not wait to be sent"


async def test_a_busy_device_says_so_and_a_known_attempt_is_not_run_twice(server: Server, launch: Launch) -> None:
    agent = await launch()
    connection = await server.connected()
    candidate = server.candidate("conv")
    connection.start("a1", candidate, measurement=LONG, deadline_s=600)
    await connection.phase("TIMED")
    (runner,) = agent.runners()
    connection.start("a1", candidate, measurement=LONG, deadline_s=600)
    connection.start("a2", candidate, deadline_s=600)
    connection.start("a3", candidate, deadline_s=600, device_id="elsewhere")
    busy, wrong = await connection.result("a2"), await connection.result("a3")
    assert (busy.error.fault, busy.error.reason) == (common_pb2.FAULT_DEVICE, "DEVICE_BUSY")
    assert wrong.error.reason == "DEVICE_UNKNOWN"
    assert agent.runners() == [runner]
    assert not any(m.run_result.attempt_id == "a1" for m in connection.received)


async def test_a_run_survives_a_server_that_restarts(server: Server, launch: Launch) -> None:
    await launch()
    connection = await server.connected()
    connection.start("a1", server.candidate("conv"), measurement=job_pb2.Measurement(min_time_s=3), deadline_s=60)
    await connection.phase("TIMED")
    await server.stop()
    await server.start()
    again = await server.connected()
    assert again.hello.active_attempts == ["a1"]
    (cell,) = (await again.result("a1")).candidates
    assert not cell.HasField("error") and cell.samples.digest in server.blobs
    assert cell.iterations > 100


async def test_an_upload_waits_for_a_server_that_is_away(server: Server, launch: Launch) -> None:
    await launch()
    connection = await server.connected()
    server.away = True
    connection.start("a1", server.candidate("add"), deadline_s=60)
    async with asyncio.timeout(WAIT_S):
        await server.turned_away.wait()
    server.away = False
    (cell,) = (await connection.result("a1")).candidates
    assert cell.outputs.digest in server.blobs


async def test_an_upload_that_waits_too_long_is_the_devices_fault(server: Server, launch: Launch) -> None:
    await launch()
    connection = await server.connected()
    server.away = True
    connection.start("a1", server.candidate("add"), deadline_s=1.5)
    error = (await connection.result("a1")).candidates[0].error
    assert (error.fault, error.reason, error.stage) == (common_pb2.FAULT_DEVICE, "TRANSFER_TIMED_OUT", "UPLOAD")


async def test_damaged_bytes_never_reach_a_runner(server: Server, launch: Launch) -> None:
    await launch()
    connection = await server.connected()
    candidate = server.candidate("add")
    good = server.blobs[candidate.program.pte.digest]
    server.blobs[candidate.program.pte.digest] = good[:-1] + bytes([good[-1] ^ 1])
    connection.start("a1", candidate, deadline_s=60)
    error = (await connection.result("a1")).candidates[0].error
    assert (error.fault, error.reason, error.stage) == (common_pb2.FAULT_FARM, "DIGEST_MISMATCH", "FETCH")
    assert server.downloads.count(candidate.program.pte.digest) == 3


async def test_a_result_is_sent_again_until_it_is_acknowledged(server: Server, launch: Launch) -> None:
    agent = await launch()
    connection = await server.connected()
    connection.start("a1", server.candidate("add"), deadline_s=60)
    first = await connection.result("a1")
    await server.stop()
    await server.start()
    second = await server.connected()
    assert second.hello.unacknowledged_attempts == ["a1"] and not second.hello.active_attempts
    assert await second.result("a1") == first
    agent.process.kill()
    await agent.ended()
    agent = await launch()
    third = await server.connected()
    assert third.hello.agent_id == connection.hello.agent_id
    assert third.hello.devices[0].id == connection.hello.devices[0].id
    assert await third.result("a1") == first
    third.ack("a1")
    third.start("a1", server.candidate("add"), deadline_s=60)  # late, and known
    third.start("a2", server.candidate("add"), deadline_s=60)
    await third.result("a2")
    third.ack("a2")
    agent.process.terminate()
    await agent.ended()
    await launch()
    assert not (await server.connected()).hello.unacknowledged_attempts


async def test_cancelling_a_result_that_nobody_wants_ends_its_sending(server: Server, launch: Launch) -> None:
    await launch()
    connection = await server.connected()
    connection.start("a1", server.candidate("add"), deadline_s=60)
    await connection.result("a1")
    connection.cancel("a1")
    connection.start("a2", server.candidate("add"), deadline_s=60)
    await connection.result("a2")
    await server.stop()
    await server.start()
    assert (await server.connected()).hello.unacknowledged_attempts == ["a2"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Kind.UNAUTHENTICATED, "BAD_TOKEN"),
        (Kind.PERMISSION_DENIED, "FORBIDDEN"),
        (Kind.ALREADY_EXISTS, "AGENT_CONNECTED"),
        (Kind.FAILED_PRECONDITION, "PROTOCOL_UNSUPPORTED"),
    ],
)
async def test_a_refusal_is_one_sentence_and_exit_code_1(server: Server, launch: Launch, kind: Kind, reason: str) -> None:
    server.refusal = error_of(Fault.USER, reason, "The server does not want you.", "Ask why.", kind=kind)
    agent = await launch(ETFARM_TOKEN="wrong")
    assert await agent.ended() == 1
    assert agent.log.splitlines() == ["etfarm: The server does not want you. Ask why."]


async def test_a_stream_that_the_server_still_holds_does_not_end_a_known_agent(server: Server, launch: Launch) -> None:
    await launch()
    await server.connected()
    await server.stop()
    server.refusal = error_of(Fault.FARM, "AGENT_CONNECTED", "Connected already.", kind=Kind.ALREADY_EXISTS)
    await server.start()
    async with asyncio.timeout(WAIT_S):
        await server.turned_away.wait()
    server.refusal = None
    assert await server.connected()


async def test_an_agent_that_waited_for_the_server_has_one_connection(server: Server, launch: Launch) -> None:
    await server.stop()
    agent = await launch()
    assert await agent.line() == f"etfarm agent: connecting to {server.address}"
    await asyncio.sleep(2)  # a few tries
    assert "does not answer" in agent.log
    await server.start()
    connection = await server.connected()
    # gRPC itself comes back within two seconds where a channel was left over.
    await connection.until(lambda m: len([m for m in connection.received if m.HasField("heartbeat")]) > 15)
    open_ones = [c for c in psutil.Process(agent.process.pid).net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED]
    assert len(open_ones) == 1


async def test_two_agents_do_not_share_a_data_folder(server: Server, launch: Launch, tmp_path: Path) -> None:
    await launch()
    first = await server.connected()
    second = await launch()
    assert await second.ended() == 1
    assert second.log.startswith("etfarm: Another agent works in ") and second.log.count("\n") == 1
    await launch(data=tmp_path / "other")
    other = await server.connected()
    assert other.hello.agent_id != first.hello.agent_id
    assert other.hello.devices[0].id != first.hello.devices[0].id


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "stdin"])
async def test_an_agent_that_is_stopped_says_goodbye_and_leaves_nothing(server: Server, launch: Launch, how: str) -> None:
    agent = await launch("--exit-with-stdin")
    connection = await server.connected()
    connection.start("a1", server.candidate("conv"), measurement=LONG, deadline_s=600)
    await connection.phase("TIMED")
    (runner,) = agent.runners()
    stopped_s = time.monotonic()
    if how == "stdin":
        assert agent.process.stdin is not None
        agent.process.stdin.close()
    else:
        agent.process.send_signal(signal.Signals[how])
    assert await agent.ended() == 0
    assert time.monotonic() - stopped_s < 2.0
    await connection.until(lambda m: m.HasField("goodbye"))
    await gone(runner, 0.5)


async def test_no_runner_outlives_an_agent_that_is_killed(server: Server, launch: Launch) -> None:
    agent = await launch()
    connection = await server.connected()
    connection.start("a1", server.candidate("conv"), measurement=LONG, deadline_s=600)
    await connection.phase("TIMED")
    (runner,) = agent.runners()
    agent.process.kill()
    await gone(runner, 1.0)
    await launch()
    assert not (await server.connected()).hello.active_attempts


async def test_cores_restrict_what_is_offered_and_where_programs_run(server: Server, launch: Launch) -> None:
    core = str(min(os.sched_getaffinity(0)))
    await launch("--cores", core)
    connection = await server.connected()
    assert connection.hello.devices[0].cores == 1
    connection.start("a1", server.candidate("add", threads=2), server.candidate("add", "second"), deadline_s=60)
    asked, default = (await connection.result("a1")).candidates
    assert (asked.threads, default.threads) == (2, 1)
    assert asked.runner.cores == default.runner.cores == core
    measurement = job_pb2.Measurement(cores="4000")
    connection.start("a2", server.candidate("add"), measurement=measurement, deadline_s=60)
    (refused,) = (await connection.result("a2")).candidates
    assert (refused.error.fault, refused.error.reason) == (common_pb2.FAULT_USER, "CORES_UNKNOWN")
