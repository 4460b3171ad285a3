"""`AsyncSession`: a leased device with a loaded program, for many calls.

with Farm() as farm, farm.session(device="arch=aarch64", program="x.pte") as s:
    y = s.run(x)
    print(s.loop(1000).p50_ns)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import grpc

from etfarm.client.errors import EtfarmError, FarmError, Kind, UserError, from_rpc_error
from etfarm.client.models import Device
from etfarm.client.sessions.calls import Loop, Outputs, flattened, loop_of
from etfarm.client.sessions.text import AsyncTokenStream, Parts, TextContext, request_of
from etfarm.client.submit.early_checks import NoSuchMethod
from etfarm.client.transport import decode, transfers
from etfarm.v1 import common_pb2, session_pb2
from etfarm.wire import chunks, sessions, tensors
from etfarm.wire.status import from_proto

if TYPE_CHECKING:
    from etfarm.v1.artifact_pb2_grpc import ArtifactServiceAsyncStub
    from etfarm.v1.session_pb2_grpc import SessionServiceAsyncStub

LAST_WORD_S = 1.0
"""Seconds to wait for the reason of a session's end after a call failed because of it."""

Answer = TypeVar("Answer")
Generating = grpc.aio.UnaryStreamCall[session_pb2.GenerateSessionRequest, session_pb2.GenerateSessionResponse]

TextCallback = Callable[[str], None]
"""Callback that takes one line or sentence."""


class SessionClosed(UserError):
    """Error of a session that is used outside of its `with` block."""

    reason = "SESSION_CLOSED"
    kind = Kind.FAILED_PRECONDITION


class SessionCut(FarmError):
    """Error of a session stream that ended without a reason."""

    reason = "SESSION_LOST"
    kind = Kind.UNAVAILABLE


@dataclass(frozen=True)
class Line:
    """The stubs of a session's server, and its open request."""

    server: str
    sessions: SessionServiceAsyncStub
    artifacts: ArtifactServiceAsyncStub
    request: session_pb2.OpenSessionRequest
    input_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Input names by method, in flattened order; the program's own names for a method without an entry."""


Connect = Callable[[AsyncExitStack], Awaitable[Line]]
"""Callback that returns the line; it pushes its clean-up onto the stack, which is closed at the session's end."""


class AsyncSession:
    """A program on a device that is reserved for it.

    Use it with `async with`.

    Each method's buffers keep their state from call to call, separately for each method, until the session ends.
    Calls are served in the order of the calls. A call that fails because of its inputs changes nothing.
    """

    _USE: ClassVar[str] = "with farm.session(...) as s:"

    def __init__(self, connect: Connect, *, on_wait: TextCallback | None = None, on_log: TextCallback | None = None) -> None:
        """Prepare a session; AsyncFarm.session and LocalSession create instances.

        Args:
            on_wait: called with what the session waits for, whenever that changes.
            on_log: called with each line that the runner prints.
        """
        self._connect = connect
        self._on_wait = on_wait
        self._on_log = on_log
        self._stack = AsyncExitStack()
        self._line: Line | None = None
        self._ready = session_pb2.SessionReady()
        self._id = ""
        self._following: asyncio.Task[None] | None = None
        self._ended: EtfarmError | None = None
        self._calls = 0
        self._turn = asyncio.Lock()
        """Lock held until the server has received a call, so that calls keep their order: large inputs are sent before a call,
        and every call is a separate stream."""
        self._under_way: set[asyncio.Future[session_pb2.CallSessionResponse]] = set()
        self._streams: set[Generating] = set()
        self._context = TextContext()

    async def __aenter__(self) -> Self:
        """Wait for a device and load the program on it.

        Raises:
            EtfarmError: as SessionService.Open.
        """
        self._ended = None
        self._context.tokens = 0
        try:
            line = await self._connect(self._stack)
            events = line.sessions.Open(line.request)
            self._stack.callback(events.cancel)
            ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._following = asyncio.create_task(self._follow(line, events, ready), name="session events")
            await ready
            self._line = line
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

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

    @property
    def device(self) -> Device:
        """The device that runs the program."""
        self._must_be_open()
        return decode.device(self._ready.device)

    @property
    def threads(self) -> int:
        """The size of the program's thread pool."""
        self._must_be_open()
        return self._ready.threads

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of the program's methods."""
        self._must_be_open()
        return tuple(method.name for method in self._ready.methods)

    def input_names(self, method: str) -> tuple[str, ...]:
        """Return the names of a method's inputs in flattened order.

        They come from the model that it was compiled from, else from the program; without either, they are positions as
        text.

        Raises:
            NoSuchMethod: the program has no such method.
        """
        described = self._method(method)
        if described is None:
            there = f"It has: {', '.join(self.methods)}."
            raise NoSuchMethod(f"The program has no method {method!r}.", there, method=method)
        own = [value.name for value in described.inputs]
        known = self._must_be_open().input_names.get(method, ())
        return tuple(known or (own if all(own) else map(str, range(len(own)))))

    async def ended(self, within_s: float) -> EtfarmError | None:
        """Return why the session has ended, or None if it does not end within `within_s` seconds.

        The end of a session arrives after the call that caused it.
        """
        if self._following is not None and self._ended is None:
            await asyncio.wait([self._following], timeout=within_s)
        return self._ended

    async def run(self, /, *inputs: Any, timeout_s: float | None = None, **named: Any) -> Outputs:
        """Run one execution of a method and return its outputs.

        `s.run(x)` calls the program's only method; `s.run("encode", x)` calls a method by its name.

        Args:
            inputs: arrays, torch tensors, or Python numbers for scalar inputs, in flattened order; a method's name may
                precede them.
            named: the remaining inputs by name, those of `input_names`.
            timeout_s: limit on the device in seconds, 600 when None; a program that takes longer is killed, and the
                session ends.

        Returns:
            The outputs, each by its position, `y[0]`, and by its name, `y["logits"]`: NumPy arrays, or Python numbers
            for scalar outputs. `y.array("logits")` is typed as an array, `y.as_dict()` has all by name, and `y.run_ns`
            is the duration on the device.

        Raises:
            UserError: an input does not fit; the session stays usable. Errors such as PROGRAM_CRASHED end the session.
            NoSuchMethod: the program has several methods, and the call names none.
            EtfarmError: the session has ended; this is the reason.
        """
        if inputs and isinstance(inputs[0], str):
            method, inputs = inputs[0], inputs[1:]
        else:
            method = self._only_method()
        described = self._method(method)
        names = self._must_be_open().input_names.get(method, ())
        values = flattened(method, described, names, inputs, named)
        task = session_pb2.SessionTask(method=method, timeout_s=timeout_s)
        answer = await self._call(task, values)
        return await self._outputs(answer)

    async def loop(
        self,
        iterations: int,
        method: str = "",
        inputs: Sequence[Any] | Mapping[str, Any] | None = None,
        *,
        warmup: int | None = None,
        min_time_s: float | None = None,
        max_time_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Loop:
        """Measure at least `iterations` executions on the device, without a call between them.

        Args:
            method: the method; the program's only method, or forward, when empty.
            inputs: in flattened order or by name; those of the method's last call when None, else inputs that the runner
                generates.
            warmup: number of iterations before, which are not counted; 10 when None.
            min_time_s, max_time_s: limits of the duration in seconds; 0 and 60 when None.

        Raises:
            EtfarmError: as `run`.
        """
        line = self._must_be_open()
        method = method or (self.methods[0] if len(self.methods) == 1 else "forward")
        described = self._method(method)
        values = None
        if inputs is not None:
            in_order, named = ((), inputs) if isinstance(inputs, Mapping) else (tuple(inputs), {})
            values = flattened(method, described, line.input_names.get(method, ()), in_order, named)
        task = session_pb2.SessionTask(method=method, timeout_s=timeout_s)
        task.loop.CopyFrom(
            session_pb2.SessionLoop(iterations=iterations, warmup=warmup, min_time_s=min_time_s, max_time_s=max_time_s)
        )
        answer = await self._call(task, values)
        samples = await sessions.unpack(answer.measured.samples, self._fetch)
        return loop_of(method, answer.measured, samples, await self._outputs(answer))

    def generate(
        self,
        prompt_tokens: Any,
        tokens: int,
        *,
        position: int | None = None,
        stop_tokens: Iterable[int] | Literal["eos"] = (),
        max_time_s: float | None = None,
        timeout_s: float | None = None,
        prefill_method: str = "",
        decode_method: str = "",
    ) -> AsyncTokenStream:
        """Generate text with a language model; the loop over the tokens runs on the device.

        `async for token in s.generate(prompt, 128)` yields tokens as they come, `await s.generate(prompt, 128).result()` returns
        all of them with their times. Each token is the most likely one. The prompt and the tokens stay in the session's context,
        which the next generation continues, until `reset` or `position=0`. Calls of `run` with the same methods overwrite it.

        Args:
            prompt_tokens: token ids: a sequence, or an array or tensor of shape (n,) or (1, n). May be empty to go on.
            tokens: maximum number of tokens to generate, at most 65,536.
            position: number of tokens of the context to continue after, which forgets the others; 0 starts a new context. All of
                them when None.
            stop_tokens: token ids that end the text, or "eos" for those that the program's metadata names. The text ends for no
                token by default.
            max_time_s: time in seconds after which the text ends, 600 when None.
            timeout_s: limit on the device in seconds, 600 plus twice `max_time_s` when None; a program that takes longer is
                killed, and the session ends.
            prefill_method, decode_method: the methods that process the prompt and generate tokens; recognized when empty.

        Raises:
            BadCall: a value is out of range. The iteration raises the other errors; see TokenStream.result.
            EtfarmError: the session is not open.
        """
        self._must_be_open()
        request = request_of(
            prompt_tokens,
            tokens,
            stop_tokens,
            position=position,
            max_time_s=max_time_s,
            prefill_method=prefill_method,
            decode_method=decode_method,
        )
        return AsyncTokenStream(lambda message: self._generate(message, timeout_s), request, self._context)

    async def reset(self) -> None:
        """Give all methods their initial state, and start a new context for `generate`.

        Raises:
            EtfarmError: as `run`.
        """
        await self._call(session_pb2.SessionTask(reset=True), None)
        self._context.tokens = 0

    async def _generate(self, generation: session_pb2.SessionGeneration, timeout_s: float | None) -> Parts:
        line = self._must_be_open()
        if self._ended is not None:
            raise self._ended
        async with self._turn:
            self._calls += 1
            request = session_pb2.GenerateSessionRequest(
                session_id=self._id, call_id=str(self._calls), generation=generation, timeout_s=timeout_s
            )
            call = line.sessions.Generate(request)
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
                raise self._not_open() from None
            raise
        except grpc.aio.AioRpcError as error:
            raise await self._reason(error, line) from None
        finally:
            self._streams.discard(call)
            # Stops the device if the caller has left.
            call.cancel()

    async def _call(self, task: session_pb2.SessionTask, values: Sequence[tensors.Value] | None) -> session_pb2.SessionAnswer:
        line = self._must_be_open()
        if self._ended is not None:
            raise self._ended
        async with self._turn:
            if values is not None:
                task.inputs.CopyFrom(await sessions.pack(tensors.encode(values), self._store))
            self._calls += 1
            request = session_pb2.CallSessionRequest(session_id=self._id, call_id=str(self._calls), task=task)
            call = line.sessions.Call(request)
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
                raise self._not_open() from None
            raise
        except grpc.aio.AioRpcError as error:
            raise await self._reason(error, line) from None
        finally:
            self._under_way.discard(calling)
        if answer.HasField("error"):
            raise from_proto(answer.error)
        return answer

    async def _reason(self, error: grpc.aio.AioRpcError, line: Line) -> EtfarmError:
        """Return why a call failed: the reason of the session's end says more than the failed call."""
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND) and self._following is not None:
            await asyncio.wait([self._following], timeout=LAST_WORD_S)
        return self._ended or from_rpc_error(error, server=line.server)

    async def _outputs(self, answer: session_pb2.SessionAnswer) -> Outputs:
        run_ns = answer.run_ns if answer.HasField("run_ns") else None
        return Outputs(tensors.decode(await sessions.unpack(answer.outputs, self._fetch)), run_ns)

    async def _store(self, data: bytes) -> common_pb2.Artifact:
        line = self._must_be_open()
        artifact = chunks.artifact_of(data)
        await transfers.upload_missing(line.artifacts, {artifact.digest: (artifact, data)}, server=line.server)
        return artifact

    async def _fetch(self, artifact: common_pb2.Artifact) -> bytes:
        line = self._must_be_open()
        return await transfers.download_bytes(line.artifacts, artifact, server=line.server)

    def _only_method(self) -> str:
        if len(self.methods) != 1:
            raise NoSuchMethod(
                f"The program has {len(self.methods)} methods, and the call names none.",
                f"Name it first, as in run({self.methods[0]!r}, x). Methods: {', '.join(self.methods)}.",
            )
        return self.methods[0]

    def _method(self, name: str) -> session_pb2.SessionMethod | None:
        """Return the program's description of a method; None without one.

        The device reports unknown names.
        """
        return next((method for method in self._ready.methods if method.name == name), None)

    def _not_open(self) -> SessionClosed:
        return SessionClosed("The session is not open.", f"Use it inside of `{self._USE}`.")

    def _must_be_open(self) -> Line:
        if self._line is None:
            raise self._not_open()
        return self._line

    async def _follow(
        self,
        line: Line,
        events: grpc.aio.UnaryStreamCall[session_pb2.OpenSessionRequest, session_pb2.SessionEvent],
        ready: asyncio.Future[None],
    ) -> None:
        """Process the session's events until the stream ends."""
        error: EtfarmError = SessionCut(
            f"The server at {line.server} ended the session without a reason.", "Open another session."
        )
        try:
            async for event in events:
                kind = event.WhichOneof("event")
                if kind == "waiting" and self._on_wait is not None:
                    self._on_wait(event.waiting.why)
                elif kind == "ready":
                    self._id = event.session_id
                    self._ready.CopyFrom(event.ready)
                    if not ready.done():
                        ready.set_result(None)
                elif kind == "log_line" and self._on_log is not None:
                    self._on_log(event.log_line)
                elif kind == "ended":
                    error = from_proto(event.ended)
        except grpc.aio.AioRpcError as broken:
            error = from_rpc_error(broken, server=line.server)
        except asyncio.CancelledError:
            return
        except Exception as raised:
            # Raised by a callback: the session cannot be opened without it.
            if ready.done():
                raise
            ready.set_exception(raised)
            return
        self._ended = error
        if not ready.done():
            ready.set_exception(error)


async def _awaited(call: Awaitable[Answer]) -> Answer:
    return await call
