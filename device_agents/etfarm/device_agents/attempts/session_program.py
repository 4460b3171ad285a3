"""The device's side of a session: one runner with a loaded program, which answers tasks one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from etfarm.device_agents.attempts.session_text import OnTokens, SessionText, max_time_s
from etfarm.device_agents.device.inventory import format_cpu_list
from etfarm.device_agents.runners import errors
from etfarm.device_agents.runners.protocol import DEFAULT_INPUTS_SEED, MeasurePlan, MethodInfo, Runner, TensorInfo
from etfarm.v1 import common_pb2, session_pb2
from etfarm.wire import sessions, tensors
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.status import to_proto
from etfarm.wire.words import value_of

_WARMUP: Final = 10
_MAX_TIME_S: Final = 60.0


@dataclass(frozen=True)
class Exchange:
    """The exchange of tensors that are too large for a message."""

    fetch: Callable[[common_pb2.Artifact], Awaitable[bytes]]
    store: Callable[[bytes], Awaitable[common_pb2.Artifact]]


class ServedProgram:
    """One program in one runner. State that its methods keep between executions stays from task to task.

    Args:
        runner: a fresh runner without a program.
        exchange: moves large tensors.
    """

    def __init__(self, runner: Runner, exchange: Exchange) -> None:
        self._runner = runner
        self._exchange = exchange
        self._methods: tuple[str, ...] = ()
        self._current: str | None = None
        self._loaded: set[str] = set()
        self._with_inputs: set[str] = set()
        """Methods whose inputs are set."""
        self._text = SessionText(runner, self)
        self.stage = ""
        """The current stage."""

    async def load(
        self, program: Path, data: Sequence[Path], *, cpus: Collection[int] | None, threads: int, methods: Sequence[str]
    ) -> session_pb2.SessionReady:
        """Load the program and some of its methods; return the callable methods.

        Raises:
            METHOD_MISSING: the program lacks some of `methods`.
            EtfarmError: as `Runner.load` and `Runner.load_method`.
        """
        self.stage = "LOAD"
        hello = await self._runner.hello()
        ready = session_pb2.SessionReady()
        ready.runner.executorch = hello.executorch
        if cpus is not None:
            await self._runner.affinity(sorted(cpus))
            ready.runner.cores = format_cpu_list(cpus)
        ready.threads = await self._runner.threads(threads)
        loaded = await self._runner.load(program, data)
        ready.load.load_ns = loaded.load_ns
        self._methods = loaded.methods
        for name in methods:
            if (load_method_ns := await self.use(name)) is not None and not ready.load.load_method_ns:
                ready.load.load_method_ns = load_method_ns
        for name in loaded.methods:
            ready.methods.append(_described(await self._runner.method(name)))
        return ready

    @property
    def names(self) -> tuple[str, ...]:
        """All methods of the program, in its order."""
        return self._methods

    async def answer(
        self, task: session_pb2.SessionTask, on_tokens: OnTokens | None = None, stop: asyncio.Event | None = None
    ) -> tuple[session_pb2.SessionAnswer, EtfarmError | None]:
        """Return a task's answer, errors of the program included, and the error that ended the program, if it ended.

        Args:
            on_tokens: takes the tokens of a generation as they come.
            stop: ends a generation after its current token.
        """
        timeout_s = task.timeout_s if task.HasField("timeout_s") else sessions.CALL_TIMEOUT_S + _own_time_s(task)
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                if task.HasField("generation"):
                    return await self._generate(task, timeout_s, on_tokens or _ignore, stop or asyncio.Event()), None
                return await self._answer(task), None
        except TimeoutError:
            if not deadline.expired():
                raise
            error: EtfarmError = errors.ProgramHung(self.stage, timeout_s, [])
        except EtfarmError as raised:
            error = raised
        error.stage = error.stage or self.stage
        answer = session_pb2.SessionAnswer(error=to_proto(error))
        return answer, error if deadline.expired() or await self._is_over() else None

    async def _answer(self, task: session_pb2.SessionTask) -> session_pb2.SessionAnswer:
        sessions.check_task(task)
        answer = session_pb2.SessionAnswer()
        if task.reset:
            # The next call of a method loads it anew, which gives it its initial state.
            self._current = None
            self._loaded.clear()
            self._text.forget()
            return answer
        self.stage = "LOAD_METHOD"
        if (load_method_ns := await self.use(task.method)) is not None:
            answer.load_method_ns = load_method_ns
        self.stage = "INPUTS"
        if task.HasField("inputs"):
            data = await sessions.unpack(task.inputs, self._exchange.fetch)
            values = await _aside(data, lambda: tensors.decode(data))
            await self._runner.set_inputs(values)
            self._with_inputs.add(task.method)
        elif task.method not in self._with_inputs:
            await self._runner.default_inputs(DEFAULT_INPUTS_SEED)
            self._with_inputs.add(task.method)
        if task.HasField("loop"):
            await self._measure(task.loop, answer.measured)
        else:
            self.stage = "RUN"
            answer.run_ns = (await self._runner.run()).run_ns
        self.stage = "OUTPUTS"
        outputs = await self._runner.outputs()
        answer.outputs.CopyFrom(await sessions.pack(tensors.encode(outputs), self._exchange.store))
        return answer

    async def _measure(self, loop: session_pb2.SessionLoop, into: session_pb2.SessionMeasured) -> None:
        plan = MeasurePlan(
            warmup=loop.warmup if loop.HasField("warmup") else _WARMUP,
            iterations=loop.iterations,
            min_time_ns=round(loop.min_time_s * 1e9),
            max_time_ns=max(1, round(_max_time_s(loop) * 1e9)),
        )
        self.stage = "TIMED"
        measured = await self._runner.measure(plan)
        into.samples.CopyFrom(await sessions.pack(measured.samples_ns.tobytes(), self._exchange.store))
        into.warmup, into.iterations = measured.warmup, measured.iterations
        into.duration_ns, into.stop_reason = measured.duration_ns, value_of(common_pb2.StopReason, measured.stop_reason)
        into.first_run_ns = measured.first_run_ns

    async def _generate(
        self, task: session_pb2.SessionTask, limit_s: float, on_tokens: OnTokens, stop: asyncio.Event
    ) -> session_pb2.SessionAnswer:
        sessions.check_task(task)
        self.stage = "GENERATE"
        generated = await self._text.generate(task.generation, limit_s, on_tokens, stop)
        return session_pb2.SessionAnswer(generated=generated)

    async def use(self, method: str) -> int | None:
        """Make `method` the current one; return its load time in ns, or None if it was loaded already."""
        if method == self._current:
            return None
        if method not in self._methods:
            raise error_for(
                "METHOD_MISSING",
                f"The program has no method {method!r}.",
                f"It has: {', '.join(sorted(self._methods))}. Choose with --method (method=).",
                method=method,
            )
        self._current = None
        if method in self._loaded:
            await self._runner.select(method)
            self._current = method
            return None
        loaded = await self._runner.load_method(method, keep=bool(self._loaded))
        self._loaded.add(method)
        self._current = method
        return loaded.load_method_ns

    async def _is_over(self) -> bool:
        """Return whether the runner ended: it then answers everything with the error that ended it."""
        try:
            await self._runner.memory()
        except EtfarmError:
            return True
        return False


def _max_time_s(loop: session_pb2.SessionLoop) -> float:
    return loop.max_time_s if loop.HasField("max_time_s") else _MAX_TIME_S


def _own_time_s(task: session_pb2.SessionTask) -> float:
    """Return the time that a task may take in addition: a loop for its warm-up and its timed pass, a generation as much."""
    if task.HasField("generation"):
        return 2 * max_time_s(task.generation)
    return 2 * _max_time_s(task.loop) if task.HasField("loop") else 0.0


def _ignore(_tokens: session_pb2.SessionTokens) -> None:
    """Drop tokens that nobody reads."""


async def _aside(data: bytes, work: Callable[[], list[tensors.Value]]) -> list[tensors.Value]:
    """Decode large tensors in a thread, small ones here, since switching threads takes longer."""
    return await asyncio.to_thread(work) if len(data) > sessions.INLINE_BYTES else work()


def _described(info: MethodInfo) -> session_pb2.SessionMethod:
    return session_pb2.SessionMethod(
        name=info.name, inputs=[_value(value) for value in info.inputs], outputs=[_value(value) for value in info.outputs]
    )


def _value(info: TensorInfo) -> session_pb2.SessionValue:
    kind = value_of(common_pb2.ValueKind, info.kind) or common_pb2.VALUE_KIND_UNSUPPORTED
    return session_pb2.SessionValue(name=info.name, kind=kind, dtype=info.dtype, shape=info.shape, dim_order=info.dim_order)
