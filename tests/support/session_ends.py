"""Both ends of a session at a real server: an agent that does only what a test says, and the session's owner."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from etfarm.v1 import (
    agent_pb2,
    agent_pb2_grpc,
    common_pb2,
    compile_pb2,
    device_pb2,
    job_pb2,
    session_pb2,
    session_pb2_grpc,
)
from etfarm.wire import digest
from etfarm.wire.names import PROTOCOL_VERSION, boot_id
from tests.support.agent_stream import AgentStream
from tests.support.farm_calls import FarmCalls
from tests.support.programs import program

WAIT_S = 120.0
"""An answer may have to wait until the compile workers are warm, on a busy machine."""


class Agent(AgentStream):
    """An agent that does only what the test says.

    Args:
        channel: a connection with an agent's token.
        name: the agent's id.
        devices: its devices; None for two that could run programs of this machine.
        own_runners: runners that each of the two devices brings along.
        active: the attempts that it runs.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        name: str,
        *,
        devices: Sequence[device_pb2.Device] | None = None,
        own_runners: Sequence[device_pb2.DeviceRunner] = (),
        active: Sequence[str] = (),
    ) -> None:
        self.devices = (
            [
                device_pb2.Device(
                    id=f"{name}{index}" * 8,
                    name=f"{name}{index}",
                    arch=platform.machine(),
                    cores=2,
                    own_runners=own_runners,
                )
                for index in range(2)
            ]
            if devices is None
            else list(devices)
        )
        hello = agent_pb2.Hello(
            agent_id=name, protocol_version=PROTOCOL_VERSION, devices=self.devices, boot_id=boot_id(), active_attempts=active
        )
        super().__init__(channel, hello)

    async def started(self) -> agent_pb2.StartRun:
        """Return the next run that it is asked for."""
        async with asyncio.timeout(WAIT_S):
            while True:
                message = await self.stream.read()
                if message.WhichOneof("message") == "start_run":
                    start: agent_pb2.StartRun = message.start_run
                    return start

    def finish(self, start: agent_pb2.StartRun, candidate: agent_pb2.CandidateResult) -> None:
        """Report what became of a run's only candidate."""
        candidate.cell_id = start.candidates[0].cell_id
        result = agent_pb2.RunResult(attempt_id=start.attempt_id, device_id=start.device_id, candidates=[candidate])
        self.outgoing.put_nowait(agent_pb2.AgentMessage(run_result=result))

    async def has_read_all(self) -> None:
        """Wait until the server has taken all messages so far: it acknowledges a result of an unknown attempt."""
        self.outgoing.put_nowait(agent_pb2.AgentMessage(run_result=agent_pb2.RunResult(attempt_id="late")))
        async with asyncio.timeout(WAIT_S):
            assert (await self.stream.read()).ack.attempt_id == "late"

    def ended(self, start: agent_pb2.StartRun, reason: str, fault: common_pb2.Fault.ValueType) -> None:
        """Report how a run ended."""
        error = common_pb2.Error(fault=fault, reason=reason, message=f"{reason}.")
        result = agent_pb2.RunResult(attempt_id=start.attempt_id, device_id=start.device_id, error=error)
        self.outgoing.put_nowait(agent_pb2.AgentMessage(run_result=result))

    def serve(self, start: agent_pb2.StartRun) -> Serving:
        """Return a session's stream, ready."""
        return Serving(self.stub, start.attempt_id)


def session_on(agent: Agent, pte: common_pb2.Artifact) -> session_pb2.OpenSessionRequest:
    """Return a request for a session of an uploaded program on an agent's first device."""
    program = compile_pb2.Program(pte=pte, digest=digest.of_program(pte.digest, {}))
    return session_pb2.OpenSessionRequest(selector=f"id={agent.devices[0].id}", program=program)


async def welcomed(channel: grpc.aio.Channel, name: str, **more: Any) -> Agent:
    """Return an agent that the server has welcomed."""
    agent = Agent(channel, name, **more)
    async with asyncio.timeout(WAIT_S):
        message = await agent.stream.read()
    assert isinstance(message, agent_pb2.ServerMessage) and message.HasField("welcome"), message
    return agent


async def answered(
    owner: grpc.aio.Channel, agent: Agent, result: agent_pb2.CandidateResult, pause_s: float = 0.0, **spec: Any
) -> job_pb2.Job:
    """Have a program measured on an agent's device, which answers each of three attempts with a result after a pause.

    Returns:
        The job, which has ended.
    """
    calls = FarmCalls(owner)
    candidates = [await calls.program(program("add").bytes, "add")]
    devices = [job_pb2.DeviceChoice(selector=f"id={agent.devices[0].id}")]
    job = await calls.submit(job_pb2.JobSpec(candidates=candidates, devices=devices, **spec))
    for _ in range(3):
        start = await agent.started()
        await asyncio.sleep(pause_s)
        agent.finish(start, result)
    await calls.watch(job.id)
    ended: job_pb2.Job = await calls.call(calls.jobs.Get, job_pb2.GetJobRequest(job_id=job.id))
    return ended


class Serving:
    """The stream of a session, seen from the agent."""

    def __init__(self, stub: agent_pb2_grpc.AgentServiceAsyncStub, attempt_id: str, *, ready: bool = True) -> None:
        self._attempt_id = attempt_id
        self._outgoing: asyncio.Queue[agent_pb2.SessionReply | None] = asyncio.Queue()
        self.stream = stub.ServeSession(_each(self._outgoing))
        if ready:
            self._send(agent_pb2.SessionReply(ready=session_pb2.SessionReady(threads=2)))

    def _send(self, reply: agent_pb2.SessionReply) -> None:
        reply.attempt_id = self._attempt_id
        self._outgoing.put_nowait(reply)

    async def call(self) -> agent_pb2.SessionCall:
        """Return the next call."""
        async with asyncio.timeout(WAIT_S):
            return await self.stream.read()

    def answer(self, call_id: str, run_ns: int, outputs: session_pb2.SessionTensors | None = None) -> None:
        """Answer a call."""
        answer = session_pb2.SessionAnswer(run_ns=run_ns, outputs=outputs)
        self._send(agent_pb2.SessionReply(answered=agent_pb2.SessionAnswered(call_id=call_id, answer=answer)))

    def tokens(self, call_id: str, *tokens: int) -> None:
        """Sends tokens of a generation."""
        sent = session_pb2.SessionTokens(tokens=tokens, token_ns=[1] * len(tokens))
        self._send(agent_pb2.SessionReply(tokens=agent_pb2.SessionTokenReply(call_id=call_id, tokens=sent)))

    def line(self, text: str) -> None:
        """Report what the runner printed."""
        self._send(agent_pb2.SessionReply(log_line=text))

    def end(self) -> None:
        """Close its side."""
        self._outgoing.put_nowait(None)


async def _each(queue: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while (item := await queue.get()) is not None:
        yield item


class Caller:
    """A session, seen from its owner."""

    def __init__(self, channel: grpc.aio.Channel, request: session_pb2.OpenSessionRequest) -> None:
        self.stub = session_pb2_grpc.SessionServiceStub(channel)
        self.events = self.stub.Open(request)
        self.id = ""

    async def event(self, kind: str) -> session_pb2.SessionEvent:
        """Return the next event of this kind."""
        async with asyncio.timeout(WAIT_S):
            while True:
                event = await self.events.read()
                assert event is not grpc.aio.EOF, f"the stream ended before {kind}"
                self.id = event.session_id
                if event.WhichOneof("event") == kind:
                    return event

    def call(self, call_id: str, **task: object) -> asyncio.Task[session_pb2.CallSessionResponse]:
        """Return a call under way."""
        asked = session_pb2.SessionTask(method="forward", **task)  # type: ignore[arg-type]
        request = session_pb2.CallSessionRequest(session_id=self.id, call_id=call_id, task=asked)

        async def calling() -> session_pb2.CallSessionResponse:
            return await self.stub.Call(request)

        return asyncio.create_task(calling())

    def generate(self, call_id: str, tokens: int) -> Any:
        """A generation under way."""
        wanted = session_pb2.SessionGeneration(prompt_tokens=[1], tokens=tokens)
        return self.stub.Generate(
            session_pb2.GenerateSessionRequest(session_id=self.id, call_id=call_id, generation=wanted, timeout_s=7.0)
        )
