"""A session on this device, from the server's StartRun to the RunResult that states how it ended.

Its calls use a stream of their own. The session ends with the stream, and the runner is killed then.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import deque
from pathlib import Path
from typing import Final

import grpc

from etfarm.device_agents.attempts.cache import Cache, Lease
from etfarm.device_agents.attempts.fault_attribution import ABNORMAL_EXITS, attribute_fault, self_test_limit_s
from etfarm.device_agents.attempts.fetch import attempt_limit_s, fetch_program
from etfarm.device_agents.attempts.progress import KEPT_LOG_LINES, OnRunProgress
from etfarm.device_agents.attempts.session_program import Exchange, ServedProgram
from etfarm.device_agents.attempts.transfers import Transfers, attempt_channel
from etfarm.device_agents.config import AgentConfig
from etfarm.device_agents.device.inventory import choose_cpus, choose_threads
from etfarm.device_agents.errors import transfer_timed_out
from etfarm.device_agents.runners import errors
from etfarm.device_agents.targets.base import Provisions, Target
from etfarm.v1 import agent_pb2, common_pb2, session_pb2
from etfarm.v1.agent_pb2_grpc import AgentServiceStub
from etfarm.wire.errors import EtfarmError
from etfarm.wire.shielding import end_tasks
from etfarm.wire.status import from_rpc_error, to_proto
from etfarm.wire.words import value_of

log = logging.getLogger(__name__)

_LAST_WORDS_S: Final = 1.0
"""Seconds for sending the last answer before the stream is cut."""


class ServedSession:
    """One session on this device. `run` it once; cancelling that kills the runner.

    Args:
        config: the agent's settings.
        target: the device to run on.
        cache: the artifact cache.
        folder: the runner's working folder; created, and deleted at the end.
        start: the server's request, received now.
        on_progress: takes progress for the server until the program is loaded; never blocks.
    """

    needs_target = True
    """Whether the session still needs its target: until its end."""

    def __init__(
        self,
        config: AgentConfig,
        target: Target,
        cache: Cache,
        folder: Path,
        start: agent_pb2.StartRun,
        on_progress: OnRunProgress,
    ) -> None:
        self.config = config
        self.target = target
        self.folder = folder
        self.start = start
        self.phase = ""
        """The current phase."""
        self._cache = cache
        self._on_progress = on_progress
        self._received_s = time.monotonic()
        self._replies: asyncio.Queue[agent_pb2.SessionReply | None] = asyncio.Queue()
        self._provisions: Provisions | None = None
        self._lines: deque[str] = deque(maxlen=KEPT_LOG_LINES)
        self._stops: dict[str, asyncio.Event] = {}
        """What ends the generations that were not answered yet, by call id."""

    @property
    def timing(self) -> bool:
        """Whether a pass is in progress that must not be disturbed."""
        return self.phase == "TIMED"

    async def run(self) -> agent_pb2.RunResult:
        """Serve the session and return how it ended; without an error if the server ended it."""
        result = agent_pb2.RunResult(attempt_id=self.start.attempt_id, device_id=self.start.device_id)
        try:
            limit_s = attempt_limit_s(self.start)
            left_s = limit_s - (time.monotonic() - self._received_s)
            async with attempt_channel(self.config, left_s, limit_s) as channel:
                transfers = Transfers.over(channel, self.config.pauses)
                with self._cache.lease(transfers) as lease:
                    await self._run(channel.channel, transfers, lease)
        except grpc.aio.AioRpcError as error:
            result.error.CopyFrom(to_proto(from_rpc_error(error, server=self.config.access.server)))
        except EtfarmError as raised:
            end = await self._judged(raised)
            end.stage = end.stage or self.phase
            result.error.CopyFrom(to_proto(end))
        finally:
            self.phase = ""
            shutil.rmtree(self.folder, ignore_errors=True)
        return result

    async def _run(self, channel: grpc.aio.Channel, transfers: Transfers, lease: Lease) -> None:
        (candidate,) = self.start.candidates
        session = self.start.session
        deadline_s = attempt_limit_s(self.start)
        deadline = asyncio.timeout(deadline_s - (time.monotonic() - self._received_s))
        cpus = choose_cpus(self.target.device, session.cores, self.target.restricted)
        threads = candidate.threads if candidate.HasField("threads") else choose_threads(self.target.device, cpus)
        try:
            async with deadline:
                self._enter("FETCH")
                fetched = await fetch_program(candidate, self.target, self.config.data, lease, self._report)
                self._provisions = fetched
            self.folder.mkdir(parents=True)
            async with self.target.start_runner(
                fetched.bundle, self.folder, lambda line: self._lines.append(str(line))
            ) as runner:
                served = ServedProgram(runner, self._exchange(transfers))
                async with asyncio.timeout_at(deadline.when()) as deadline:
                    self._enter("LOAD")
                    ready = await served.load(fetched.program, fetched.data, cpus=cpus, threads=threads, methods=session.methods)
                ready.runner.kind = value_of(common_pb2.RunnerKind, runner.kind)
                if fetched.bundle is not None:
                    ready.runner.bundle_digest = candidate.bundle.artifact.digest
                await self._serve(channel, served, ready)
        except TimeoutError:
            if not deadline.expired():
                raise
            if self.phase == "FETCH":
                raise transfer_timed_out(self.phase, deadline_s) from None
            raise errors.ProgramHung(self.phase, deadline_s, list(self._lines)) from None

    async def _serve(self, channel: grpc.aio.Channel, served: ServedProgram, ready: session_pb2.SessionReady) -> None:
        """Answer calls until either side ends the stream, or the program ends.

        Raises:
            EtfarmError: what ended the program.
            grpc.aio.AioRpcError: what ended the stream.
        """
        self._enter("SERVE")
        self._reply(agent_pb2.SessionReply(ready=ready))
        stream = AgentServiceStub(channel).ServeSession()
        calls: asyncio.Queue[agent_pb2.SessionCall] = asyncio.Queue()

        async def read() -> None:
            async for call in stream:
                if not call.cancel:
                    if call.task.HasField("generation"):
                        self._stops[call.call_id] = asyncio.Event()
                    calls.put_nowait(call)
                elif (stop := self._stops.get(call.call_id)) is not None:
                    stop.set()

        async def write() -> None:
            while (reply := await self._replies.get()) is not None:
                await stream.write(reply)
            await stream.done_writing()

        writing = asyncio.create_task(write(), name=f"session {self.start.attempt_id} writing")
        reading = asyncio.create_task(read(), name=f"session {self.start.attempt_id} reading")
        working = asyncio.create_task(self._work(calls, served), name=f"session {self.start.attempt_id} working")
        try:
            await asyncio.wait({reading, working}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                # Send the last answer first: it states what ended the program.
                self._replies.put_nowait(None)
                await asyncio.wait({reading}, timeout=_LAST_WORDS_S)
                working.result()
            reading.result()
        finally:
            stream.cancel()
            # The reader has raised the error that broke the stream.
            await end_tasks(reading, writing, working)

    async def _work(self, calls: asyncio.Queue[agent_pb2.SessionCall], served: ServedProgram) -> None:
        while True:
            call = await calls.get()
            self.phase = "TIMED" if call.task.HasField("loop") else "RUN"

            def on_tokens(tokens: session_pb2.SessionTokens, call_id: str = call.call_id) -> None:
                self._reply(agent_pb2.SessionReply(tokens=agent_pb2.SessionTokenReply(call_id=call_id, tokens=tokens)))

            answer, end = await served.answer(call.task, on_tokens, self._stops.get(call.call_id))
            self._stops.pop(call.call_id, None)
            self.phase = "SERVE"
            if end is not None:
                end = await self._judged(end)
                answer.error.CopyFrom(to_proto(end))
            while self._lines:
                self._reply(agent_pb2.SessionReply(log_line=self._lines.popleft()))
            answered = agent_pb2.SessionAnswered(call_id=call.call_id, answer=answer)
            self._reply(agent_pb2.SessionReply(answered=answered))
            if end is not None:
                raise end

    async def _judged(self, error: EtfarmError) -> EtfarmError:
        """Return the error, attributed to the program or the device if that is not known yet."""
        if not isinstance(error, ABNORMAL_EXITS) or "self_test" in error.metadata or self._provisions is None:
            return error
        again = self.target.start_runner(self._provisions.bundle, self.folder, None)
        return await attribute_fault(error, again, self_test_limit_s(self.target, self._provisions))

    def _exchange(self, transfers: Transfers) -> Exchange:
        async def fetch(artifact: common_pb2.Artifact) -> bytes:
            # Not into the cache: inputs are used once, and a session may receive more of them than fits on the disk.
            path = self.folder / "inputs"
            try:
                await transfers.download(artifact, path)
                return await asyncio.to_thread(path.read_bytes)
            finally:
                for name in ("inputs", "inputs.part"):
                    (self.folder / name).unlink(missing_ok=True)

        async def store(data: bytes) -> common_pb2.Artifact:
            return await transfers.upload(data)

        return Exchange(fetch, store)

    def _reply(self, reply: agent_pb2.SessionReply) -> None:
        reply.attempt_id = self.start.attempt_id
        self._replies.put_nowait(reply)

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self._report()

    def _report(self, done: int | None = None, total: int | None = None) -> None:
        progress = agent_pb2.RunProgress(
            attempt_id=self.start.attempt_id, device_id=self.start.device_id, phase=self.phase, done=done, total=total
        )
        self._on_progress(progress)
