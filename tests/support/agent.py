"""`etfarm agent` as a real process, and a server of its contract that a test holds in its hands."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from etfarm.v1 import agent_pb2, agent_pb2_grpc, artifact_pb2, job_pb2
from etfarm.wire import status
from etfarm.wire.channel import SERVER_OPTIONS
from etfarm.wire.errors import EtfarmError
from etfarm.wire.names import TLS_CA_VARIABLE
from tests.support.attempts import Blobs
from tests.support.fake_servers import add_services
from tests.support.runner import know_own_runners

WAIT_S = 90.0
"""For what must come, on a busy machine."""
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
        """Return the first message after `after` others that `which` holds of."""
        async with asyncio.timeout(WAIT_S), self.changed:
            await self.changed.wait_for(lambda: any(which(message) for message in self.received[after:]))
            return next(message for message in self.received[after:] if which(message))

    async def result(self, attempt: str, after: int = 0) -> agent_pb2.RunResult:
        message = await self.until(lambda m: m.HasField("run_result") and m.run_result.attempt_id == attempt, after)
        return message.run_result

    async def run(self, *candidates: agent_pb2.RunCandidate, attempt: str = "a1", **more: Any) -> agent_pb2.CandidateResult:
        """Start a run, and return what became of its first candidate."""
        self.start(attempt, *candidates, **{"deadline_s": 60, **more})
        return (await self.result(attempt)).candidates[0]

    async def phase(self, name: str) -> agent_pb2.RunProgress:
        return (await self.until(lambda m: m.run_progress.phase == name)).run_progress

    def start(self, attempt: str, *candidates: agent_pb2.RunCandidate, **more: Any) -> None:
        device = more.pop("device_id", None) or self.hello.devices[0].id
        start = agent_pb2.StartRun(attempt_id=attempt, device_id=device, candidates=candidates, **more)
        self.outgoing.put_nowait(agent_pb2.ServerMessage(start_run=start))

    def cancel(self, attempt: str) -> None:
        self.outgoing.put_nowait(agent_pb2.ServerMessage(cancel_run=agent_pb2.CancelRun(attempt_id=attempt, reason="a test")))

    def ack(self, attempt: str) -> None:
        self.outgoing.put_nowait(agent_pb2.ServerMessage(ack=agent_pb2.Ack(attempt_id=attempt)))


class Server(agent_pb2_grpc.AgentServiceServicer, Blobs):
    """The server's end: blobs in memory, connections handed to the test."""

    def __init__(self) -> None:
        super().__init__()
        self.connections: asyncio.Queue[Connection] = asyncio.Queue()
        self.refusal: EtfarmError | None = None
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
        add_services(self._server, self)
        self._port = self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(None)

    async def connected(self) -> Connection:
        async with asyncio.timeout(WAIT_S):
            return await self.connections.get()

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

    async def FindMissing(
        self, request: artifact_pb2.FindMissingArtifactsRequest, context: Any
    ) -> artifact_pb2.FindMissingArtifactsResponse:
        if self.away:
            self.turned_away.set()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        return await super().FindMissing(request, context)


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

    async def start(
        *arguments: str, data: Path = tmp_path / "agent", within: Sequence[str] = (), **environment: str
    ) -> AgentProcess:
        """`within`: what stands before the command and becomes it, as a script of `sh -c` that ends in `exec "$@"`."""
        log = tmp_path / f"agent-{len(agents)}.log"
        command = [*within, sys.executable, "-m", "etfarm.wire.command", "agent", "--server", server.address, "--data", str(data)]
        command += ["--idle-wait", "0"]  # other tests may run
        know_own_runners(data)
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *command,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, TLS_CA_VARIABLE: "", **environment},  # this server has no TLS
            )
        agents.append(AgentProcess(process, log))
        return agents[-1]

    yield start
    for agent in agents:
        with contextlib.suppress(ProcessLookupError):
            agent.process.kill()
        await agent.process.wait()
        assert "asyncio" not in agent.log and "Traceback" not in agent.log, agent.log


@pytest.fixture
async def join(server: Server, launch: Launch) -> Launch:
    """Starts an agent, and gives it with its connection."""

    async def start(*arguments: str, **options: Any) -> tuple[AgentProcess, Connection]:
        return await launch(*arguments, **options), await server.connected()

    return start


async def gone(process: psutil.Process, within_s: float) -> None:
    """Wait until a process has ended."""
    until = time.monotonic() + within_s
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, f"{process} is still there"
        await asyncio.sleep(0.01)
