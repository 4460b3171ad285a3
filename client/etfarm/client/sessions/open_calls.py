"""The connection of an open session: its events, its calls in order, and the reason of its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from etfarm.client.errors import from_rpc_error
from etfarm.client.sessions.text import Parts
from etfarm.client.submit.value_names import ValueNames
from etfarm.client.transport import transfers
from etfarm.v1 import common_pb2, compile_pb2, session_pb2
from etfarm.wire import chunks, sessions, tensors
from etfarm.wire.errors import AWAY_REASONS, EtfarmError, error_for
from etfarm.wire.located_failures import CRASHED, LOCATED_REASONS, locate
from etfarm.wire.status import from_proto, is_unanswered

if TYPE_CHECKING:
    from etfarm.client.transport.retry import Backoff
    from etfarm.client.transport.stubs import Stubs

LAST_WORD_S = 1.0
"""Seconds to wait for the reason of a session's end after a call failed because of it."""

Answer = TypeVar("Answer")
Generating = grpc.aio.UnaryStreamCall[session_pb2.GenerateSessionRequest, session_pb2.GenerateSessionResponse]

TextCallback = Callable[[str], None]
"""Callback that takes one line or sentence."""


FindOperators = Callable[[], Awaitable[Mapping[str, compile_pb2.LocatedOperators]]]


@dataclass(frozen=True)
class Line:
    """The stubs of a session's server, and its open request."""

    stubs: Stubs
    request: session_pb2.OpenSessionRequest
    names: ValueNames = field(default_factory=ValueNames)
    """Names of the program's inputs and outputs; the program's own, or positions, for a method without any."""
    find_operators: FindOperators | None = None
    """Returns the program's operators with their source lines, by method; None for a ready program."""


Connect = Callable[[AsyncExitStack], Awaitable[Line]]
"""Callback that returns the line; it pushes its clean-up onto the stack, which is closed at the session's end."""


class SessionCalls:
    """The stream of a session's events, and the calls on it, which the server receives in their order.

    Args:
        connect: returns the line to the server.
        usage: how callers open such a session, for errors.
        on_wait: called with what the session waits for, whenever that changes.
        on_log: called with each line that the runner prints.
    """

    def __init__(self, connect: Connect, usage: str, on_wait: TextCallback | None, on_log: TextCallback | None) -> None:
        self._connect = connect
        self._usage = usage
        self._on_wait = on_wait
        self._on_log = on_log
        self._stack = AsyncExitStack()
        self._line: Line | None = None
        self.ready = session_pb2.SessionReady()
        """The device, its runner and the program's methods, since the session is open."""
        self._id = ""
        self._following: asyncio.Task[None] | None = None
        self._ended: EtfarmError | None = None
        self._operators: Mapping[str, compile_pb2.LocatedOperators] | None = None
        """Thousands of source lines, fetched for the first failure that needs them."""
        self._calls = 0
        self._turn = asyncio.Lock()
        """Lock held until the server has received a call, so that calls keep their order: large inputs are sent before a call,
        and every call is a separate stream."""
        self._under_way: set[asyncio.Future[session_pb2.CallSessionResponse]] = set()
        self._streams: set[Generating] = set()

    async def open(self) -> None:
        """Wait for a device and load the program on it.

        Raises:
            EtfarmError: as SessionService.Open.
        """
        self._ended = self._operators = None
        try:
            line = await self._connect(self._stack)
            backoff = line.stubs.patience.backoff()
            while True:
                try:
                    await self._ask_for_device(line, backoff)
                    break
                except EtfarmError as error:
                    if error.reason not in AWAY_REASONS:
                        raise
                    await backoff.while_away(error)  # nothing has run yet, so that another try changes nothing
            self._line = line
        except BaseException:
            await self.close()
            raise

    async def _ask_for_device(self, line: Line, backoff: Backoff) -> None:
        """Wait until the program is loaded on a device."""
        self._ended = None
        events = line.stubs.sessions.Open(line.request)
        self._stack.callback(events.cancel)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._following = asyncio.create_task(self._follow(line, events, ready, backoff), name="session events")
        await ready

    async def close(self) -> None:
        """Release the device."""
        self._line = None
        for call in self._under_way:
            call.cancel()
        for stream in self._streams:
            stream.cancel()
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            await asyncio.wait([following])
        await self._stack.aclose()

    async def ended(self, within_s: float) -> EtfarmError | None:
        """Return why the session has ended, or None if it does not end within `within_s` seconds."""
        if self._following is not None and self._ended is None:
            await asyncio.wait([self._following], timeout=within_s)
        return self._ended

    async def generate(self, generation: session_pb2.SessionGeneration, timeout_s: float | None) -> Parts:
        """Yield what the device sends of a generation; closing the iterator stops it."""
        line = self._require_running()
        async with self._turn:
            self._calls += 1
            request = session_pb2.GenerateSessionRequest(
                session_id=self._id, call_id=str(self._calls), generation=generation, timeout_s=timeout_s
            )
            call = line.stubs.sessions.Generate(request)
            self._streams.add(call)
            try:
                await call.initial_metadata()
            except BaseException:
                self._streams.discard(call)
                call.cancel()
                raise
        try:
            async for part in call:
                yield part
        except asyncio.CancelledError:
            if self._line is None:
                raise self.not_open() from None
            raise
        except grpc.aio.AioRpcError as error:
            raise await self._reason(error, line) from None
        finally:
            self._streams.discard(call)
            # Stops the device if the caller has left.
            call.cancel()

    async def call(self, task: session_pb2.SessionTask, values: Sequence[tensors.Value] | None) -> session_pb2.SessionAnswer:
        """Return the answer to a task, whose inputs are sent first.

        Raises:
            EtfarmError: the task failed, or the session has ended.
        """
        line = self._require_running()
        async with self._turn:
            if values is not None:
                task.inputs.CopyFrom(await self._while_open(sessions.pack(tensors.encode(values), self._store)))
            self._calls += 1
            request = session_pb2.CallSessionRequest(session_id=self._id, call_id=str(self._calls), task=task)
            call = line.stubs.sessions.Call(request)
            calling: asyncio.Future[session_pb2.CallSessionResponse] = asyncio.ensure_future(_awaited(call))
            self._under_way.add(calling)
            try:
                await call.initial_metadata()
            except asyncio.CancelledError:
                calling.cancel()
                self._under_way.discard(calling)
                raise
        try:
            answer = (await calling).answer
        except asyncio.CancelledError:
            calling.cancel()
            if self._line is None:
                raise self.not_open() from None
            raise
        except grpc.aio.AioRpcError as error:
            raise await self._reason(error, line) from None
        finally:
            self._under_way.discard(calling)
        if answer.HasField("error"):
            failure = await self._located(from_proto(answer.error), task.method, line)
            if failure.reason == CRASHED:
                # It ends the session. Later calls must not have the operator of their method at the place of this crash.
                self._ended = failure = self._ended or failure
            raise failure
        return answer

    async def _located(self, error: EtfarmError, method: str, line: Line) -> EtfarmError:
        """Return the device's error with the source line of the operator that failed, if the compilation knows it."""
        if error.reason not in LOCATED_REASONS or line.find_operators is None:
            return error
        try:
            if self._operators is None:
                self._operators = await line.find_operators()
        except EtfarmError:  # the compilation is gone, or the server cannot be reached: the device's error says enough
            return error
        return locate(error, self._operators[method]) if method in self._operators else error

    async def _while_open(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Return the result of work that may wait for the server; raise why the session has ended, if it ends meanwhile."""
        working = asyncio.ensure_future(work)
        ending = {self._following} if self._following is not None else set()
        try:
            await asyncio.wait({working, *ending}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and self._ended is not None:
                raise self._ended
            return await working
        finally:
            working.cancel()

    async def _reason(self, error: grpc.aio.AioRpcError, line: Line) -> EtfarmError:
        """Return why a call failed: the reason of the session's end says more than the failed call."""
        is_of_end = is_unanswered(error) or error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE)
        if is_of_end and self._following is not None:
            await asyncio.wait([self._following], timeout=LAST_WORD_S)
        return self._ended or from_rpc_error(error, server=line.stubs.server)

    async def _store(self, data: bytes) -> common_pb2.Artifact:
        line = self.require_open()
        artifact = chunks.artifact_of(data)
        await transfers.upload_missing(line.stubs, {artifact.digest: (artifact, data)})
        return artifact

    async def fetch(self, artifact: common_pb2.Artifact) -> bytes:
        """Return the bytes of an artifact that the device sent."""
        line = self.require_open()
        return await transfers.download_bytes(line.stubs, artifact)

    def not_open(self) -> EtfarmError:
        """Return the error of a call while the session is not open."""
        return error_for("SESSION_CLOSED", "The session is not open.", f"Use it inside of `{self._usage}`.")

    def require_open(self) -> Line:
        """Return the line of the open session.

        Raises:
            SESSION_CLOSED: it is not open.
        """
        if self._line is None:
            raise self.not_open()
        return self._line

    def _require_running(self) -> Line:
        """Return the line of the open session, or raise why it has ended."""
        line = self.require_open()
        if self._ended is not None:
            raise self._ended
        return line

    async def _follow(
        self,
        line: Line,
        events: grpc.aio.UnaryStreamCall[session_pb2.OpenSessionRequest, session_pb2.SessionEvent],
        ready: asyncio.Future[None],
        backoff: Backoff,
    ) -> None:
        """Process the session's events until the stream ends."""
        error: EtfarmError = error_for(
            "SESSION_LOST", f"The server at {line.stubs.server} ended the session without a reason.", "Open another session."
        )
        try:
            async for event in events:
                backoff.reset()
                kind = event.WhichOneof("event")
                if kind == "waiting" and self._on_wait is not None:
                    self._on_wait(event.waiting.why)
                elif kind == "ready":
                    self._id = event.session_id
                    self.ready.CopyFrom(event.ready)
                    if not ready.done():
                        ready.set_result(None)
                elif kind == "log_line" and self._on_log is not None:
                    self._on_log(event.log_line)
                elif kind == "ended":  # the stream may still break until the device is free
                    self._ended = self._ended or from_proto(event.ended)
        except grpc.aio.AioRpcError as broken:
            error = from_rpc_error(broken, server=line.stubs.server)
        except asyncio.CancelledError:
            return
        except Exception as raised:
            # Raised by a callback: the session cannot be opened without it.
            if ready.done():
                raise
            ready.set_exception(raised)
            return
        self._ended = self._ended or error
        if not ready.done():
            ready.set_exception(self._ended)


async def _awaited(call: Awaitable[Answer]) -> Answer:
    return await call
