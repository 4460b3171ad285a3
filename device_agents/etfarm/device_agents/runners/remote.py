"""A runner in a separate process, as a `Runner`: sends commands and returns typed results, over `native/PROTOCOL.md`."""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from etfarm.device_agents.runners import answers, errors, streaming
from etfarm.device_agents.runners.child import Spawn, spawn_here
from etfarm.device_agents.runners.generation import COUNTERS, Generated, GenerateRequest, read_generated
from etfarm.device_agents.runners.process import Argument, Event, Limits, OnLog, RunnerProcess, room_for_payload
from etfarm.device_agents.runners.protocol import (
    Debugged,
    Hello,
    Loaded,
    Measured,
    MeasurePlan,
    Memory,
    MethodInfo,
    MethodLoaded,
    OnProgress,
    Progress,
    Ran,
    TensorInfo,
    Traced,
)
from etfarm.device_agents.runners.score import Scored, ScoreRequest, read_scored
from etfarm.device_agents.runners.streaming import OnTokens, Streamed, StreamRequest, TokenReader
from etfarm.wire.chunks import Progressed
from etfarm.wire.errors import error_for
from etfarm.wire.fixed_numbers import how_to_vary
from etfarm.wire.series import little_endian
from etfarm.wire.tensors import BadTensorFile, Scalar, Tensor, Value

PROTOCOL: Final = 1
"""The implemented version of `native/PROTOCOL.md`."""
SAMPLE_BYTES: Final = 8


class RemoteRunner:
    """A `Runner` over the line protocol, whatever its implementation. `connect` starts it and cleans up completely."""

    kind: ClassVar[str] = ""
    """The kind of runner that reports state, such as `native`."""

    def __init__(self, process: RunnerProcess) -> None:
        self._process = process
        self._method: MethodInfo | None = None
        self.path_for_runner: Callable[[Path], Path] = Path.absolute
        """Function that maps a path on this machine to the path that the runner uses for the file."""

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, command: Sequence[str], folder: Path, limits: Limits, on_log: OnLog | None, spawn: Spawn = spawn_here
    ) -> AsyncIterator[Self]:
        """Start a runner with `command` in `folder`; it is killed and reaped at the end.

        Raises:
            RUNNER_BROKEN: the command cannot be started.
            As `spawn`.
        """
        process = await RunnerProcess.start(command, folder, limits, on_log, spawn)
        runner = cls(process)
        try:
            yield runner
        finally:
            process.kill()
            # A second cancellation must not leave a zombie: waiting for the end continues in the background.
            await asyncio.shield(asyncio.ensure_future(process.reap()))

    @property
    def pid(self) -> int:
        """The id of the runner's process and process group."""
        return self._process.pid

    @property
    def stage(self) -> str:
        """The current stage, or the last one."""
        return self._process.stage

    @property
    def limits(self) -> Limits:
        """Limits of the commands that follow; those of memory hold from the start of the process."""
        return self._process.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._process.limits = limits

    @property
    def moving(self) -> str:
        """What is being transferred to or from the runner's machine, such as `its inputs`; empty if nothing is."""
        return ""

    @property
    def has_files(self) -> bool:
        """Whether files that the runner wrote are still on its machine, until `collect`."""
        return False

    async def collect(self, on_progress: Progressed | None = None) -> None:
        """Copy the files that the runner wrote to the requested paths; does nothing if it runs on this machine."""

    async def hello(self) -> Hello:
        """Return the runner's identity and what it can run.

        Raises:
            RUNNER_BROKEN: the runner has another version of the protocol, or does not follow it.
        """
        event, _ = await self._process.request("hello", stage="START")
        with self._reading("hello"):
            protocol = answers.whole(event, "protocol")
        if protocol != PROTOCOL:
            raise error_for("RUNNER_BROKEN", f"The runner speaks protocol {protocol}, not {PROTOCOL}.")
        with self._reading("hello"):
            executorch, arch = (answers.text(event, key) for key in ("executorch", "arch"))
            backends, operators = (answers.texts(event, key) for key in ("backends", "operators"))
            confined = answers.texts(event, "confined") if "confined" in event else ()
            commands = answers.texts(event, "commands", ())
            return Hello(protocol, executorch, arch, backends, operators, confined, commands)

    async def self_test(self) -> tuple[str, ...]:
        """Return the kernels and backends that computed known results; RUNNER_BROKEN names the first that did not."""
        event, _ = await self._process.request("self_test", stage="START")
        with self._reading("self_test"):
            return answers.texts(event, "passed")

    async def threads(self, count: int) -> int:
        """Set the size of the thread pool; raise RUNNER_BROKEN after `load`."""
        event, _ = await self._process.request("threads", [("n", count)], stage="START")
        with self._reading("threads"):
            return answers.whole(event, "threads")

    async def affinity(self, cores: Sequence[int]) -> None:
        """Bind the process to CPUs; raise CORES_UNAVAILABLE if it may not run there."""
        await self._process.request("affinity", [("cores", ",".join(map(str, cores)))], stage="START")

    async def load(self, program: Path, data: Sequence[Path] = ()) -> Loaded:
        """Load a .pte with its .ptd files; raise ProgramFailed if they are damaged."""
        self._process.without_data = not data
        arguments: list[tuple[str, Argument]] = [("path", self.path_for_runner(program))]
        arguments += [("data", self.path_for_runner(path)) for path in data]
        event, _ = await self._process.request("load", arguments, stage="LOAD")
        with self._reading("load"):
            return Loaded(answers.whole(event, "load_ns"), answers.texts(event, "methods"), answers.whole(event, "threads"))

    async def method(self, name: str) -> MethodInfo:
        """Return a method's inputs, outputs and needs; raise ProgramFailed if there is no such method."""
        event, _ = await self._process.request("method", [("name", name)], stage="LOAD")
        with self._reading("method"):
            return MethodInfo(
                answers.text(event, "name"),
                tuple(read_tensor_info(value) for value in answers.events(event, "inputs")),
                tuple(read_tensor_info(value) for value in answers.events(event, "outputs")),
                answers.wholes(event, "planned_bytes"),
                answers.texts(event, "backends"),
            )

    async def load_method(self, name: str, *, trace: bool = False, debug: bool = False, keep: bool = False) -> MethodLoaded:
        """Load `name` and make it the current method; OPERATOR_MISSING and BACKEND_MISSING name what the runner lacks."""
        self._method = None
        arguments: list[tuple[str, Argument]] = [("name", name), ("trace", int(trace)), ("debug", int(debug))]
        if keep:
            arguments.append(("keep", 1))
        event, _ = await self._process.request("load_method", arguments, stage="LOAD_METHOD")
        with self._reading("load_method"):
            load_method_ns = answers.whole(event, "load_method_ns")
        self._method = await self.method(name)
        return MethodLoaded(load_method_ns)

    async def select(self, name: str) -> None:
        """Make a method that was loaded with `keep` the current one."""
        await self._process.request("select", [("name", name)], stage="LOAD_METHOD")
        self._method = await self.method(name)

    async def set_inputs(self, values: Sequence[Value]) -> None:
        """Set all inputs of the current method, in order; InputMismatch names the first that does not fit."""
        expected = self._method.inputs if self._method else ()
        if self._method and len(values) != len(expected):
            raise errors.InputMismatch(
                "INPUTS",
                f"method {self._method.name!r} takes {len(expected)} input{'' if len(expected) == 1 else 's'}, got {len(values)}",
            )
        for index, value in enumerate(values):
            kind = expected[index].kind if self._method else ""
            arguments, payload = encode_input(index, value, kind)
            try:
                await self._process.request("input", arguments, payload, stage="INPUTS")
            except errors.InputMismatch as error:
                detail = str(error.metadata["detail"])
                how = how_to_vary(kind) if "a constant of the exported program" in detail else ""
                raise errors.InputMismatch("INPUTS", _named(detail, value), how) from None

    async def default_inputs(self, seed: int) -> list[Value]:
        """Set inputs generated from `seed` (0 to 2**63 - 1) and return them."""
        room = room_for_payload()
        arguments: list[tuple[str, Argument]] = [("seed", seed)]
        event, payload = await self._process.request("default_inputs", arguments, stage="INPUTS", max_payload_bytes=room)
        with self._reading("default_inputs"):
            return read_values(event, payload, "INPUTS")

    async def run(self) -> Ran:
        """Execute once."""
        event, _ = await self._process.request("run", stage="RUN")
        with self._reading("run"):
            return Ran(answers.whole(event, "run_ns"))

    async def outputs(self) -> list[Value]:
        """Return the outputs of the latest execution, in order, named by the program or else by position."""
        event, payload = await self._process.request("outputs", stage="OUTPUTS", max_payload_bytes=room_for_payload())
        with self._reading("outputs"):
            return read_values(event, payload, "OUTPUTS")

    async def measure(self, plan: MeasurePlan, on_progress: OnProgress | None = None) -> Measured:
        """Run the timed pass. Its deadline is the sum of the limits of warm-up and timed iterations and of `Limits.command_s`."""
        max_warmup_ns = plan.max_time_ns if plan.max_warmup_ns is None else plan.max_warmup_ns
        event, payload = await self._process.request(
            "measure",
            [
                ("warmup", plan.warmup),
                ("iterations", plan.iterations),
                ("min_time_ns", plan.min_time_ns),
                ("max_time_ns", plan.max_time_ns),
                ("max_samples", plan.max_samples),
                ("steady", int(plan.steady)),
                ("max_warmup_ns", max_warmup_ns),
            ],
            stage="WARMUP" if plan.warmup or plan.steady else "TIMED",
            deadline_s=self._process.limits.command_s + (max_warmup_ns + plan.max_time_ns) / 1e9,
            on_progress=_progress(on_progress),
            max_payload_bytes=SAMPLE_BYTES * max(plan.max_samples, plan.iterations),
        )
        with self._reading("measure"):
            return read_measured(event, payload)

    async def trace(self, iterations: int, etdump: Path, *, warmup: int = 1, on_progress: OnProgress | None = None) -> Traced:
        """Trace `iterations` into `etdump`; the method must be loaded with `trace` only."""
        event, payload = await self._process.request(
            "trace",
            [("iterations", iterations), ("warmup", warmup), ("path", self.path_for_runner(etdump))],
            stage="TRACED",
            on_progress=_progress(on_progress),
            max_payload_bytes=SAMPLE_BYTES * iterations,
        )
        with self._reading("trace"):
            iterations, etdump_bytes = (answers.whole(event, key) for key in ("iterations", "etdump_bytes"))
            counters = {key: answers.optional_whole(event, key) for key in ("wall_ns", *COUNTERS)}
            return Traced(iterations, read_samples(payload), etdump, etdump_bytes, **counters)

    async def generate(self, request: GenerateRequest, limit_s: float, on_progress: OnProgress | None = None) -> Generated:
        """Generate text repeatedly with methods that are loaded without a tracer; the steps of progress are tokens.

        Raises:
            InputMismatch: the methods do not take tokens and positions, or do not return logits.
            ProgramHung: it takes more than `limit_s` seconds, which is the only limit on a single repetition.
        """
        event, payload = await self._process.request(
            "generate",
            request.arguments(),
            request.payload(),
            stage="GENERATE",
            deadline_s=limit_s,
            on_progress=_progress(on_progress),
            max_payload_bytes=request.max_answer_bytes,
        )
        with self._reading("generate"):
            return read_generated(event, payload, request)

    async def score(
        self, request: ScoreRequest, vocabulary: int, limit_s: float, on_progress: OnProgress | None = None
    ) -> Scored:
        """Execute given tokens one by one and return their scores; the steps of progress are tokens.

        Args:
            vocabulary: the maximum number of logits.

        Raises:
            InputMismatch: the methods do not take tokens and positions, or a token has no logit.
            ProgramFailed: the logits have NaN.
            ProgramHung: it takes more than `limit_s` seconds, which is the only limit on a single token.
        """
        event, payload = await self._process.request(
            "score",
            request.arguments(),
            request.payload(),
            stage="SCORE",
            deadline_s=limit_s,
            on_progress=_progress(on_progress),
            max_payload_bytes=request.max_answer_bytes(vocabulary),
        )
        with self._reading("score"):
            return read_scored(event, payload, request)

    async def stream(self, request: StreamRequest, limit_s: float, on_tokens: OnTokens, stop: asyncio.Event) -> Streamed:
        """Generate one text; its tokens are passed on as they come, and `stop` ends it after the current one.

        Raises:
            InputMismatch: the methods do not take tokens and positions, or do not return logits.
            ProgramHung: it takes more than `limit_s` seconds.
        """
        reader = TokenReader(request.tokens, on_tokens)
        event, _ = await self._process.request(
            streaming.COMMAND,
            request.arguments(),
            request.payload(),
            stage="GENERATE",
            deadline_s=limit_s,
            on_tokens=reader.read,
            stop=stop,
        )
        with self._reading(streaming.COMMAND):
            return reader.end(event)

    async def debug(self, etdump: Path, dump: Path, *, max_bytes: int | None = None) -> Debugged:
        """Run one iteration with intermediate outputs; the method must be loaded with `trace` and `debug`.

        Raises:
            DEVICE_STORAGE_FAILED: the outputs take more than `max_bytes`, or cannot be written.
        """
        arguments: list[tuple[str, Argument]] = [
            ("path", self.path_for_runner(etdump)),
            ("dump", self.path_for_runner(dump)),
        ]
        if max_bytes is not None:
            arguments.append(("max_bytes", max_bytes))
        event, _ = await self._process.request("debug", arguments, stage="DEBUG")
        with self._reading("debug"):
            run_ns, etdump_bytes, dump_bytes = (answers.whole(event, key) for key in ("run_ns", "etdump_bytes", "dump_bytes"))
            return Debugged(run_ns, etdump, etdump_bytes, dump, dump_bytes)

    async def memory(self) -> Memory:
        """Return the current memory of the process."""
        event, _ = await self._process.request("memory", stage=self._process.stage)
        with self._reading("memory"):
            return Memory(*(answers.optional_whole(event, key) for key in ("rss_bytes", "peak_rss_bytes", "data_bytes")))

    @contextmanager
    def _reading(self, command: str) -> Iterator[None]:
        """End a runner whose answer to a command violates the protocol.

        Raises:
            RUNNER_BROKEN: the answer has missing or invalid fields.
        """
        try:
            yield
        except (ValueError, TypeError, KeyError, OverflowError, BadTensorFile) as error:
            broken = error_for("RUNNER_BROKEN", f"The runner's answer to {command} violates the protocol: {error}.")
            self._process.distrust(broken)
            raise broken from error

    async def close(self) -> None:
        """Kill and reap the process; later commands raise RUNNER_CLOSED."""
        self._process.kill()
        await self._process.reap()


def _named(message: str, value: Value) -> str:
    """Return a runner's message about an input with the name of the value, as far as that is not a place."""
    if not value.name or value.name.isdecimal():
        return message
    return re.sub(r"^input \d+(?: '[^']*')?", lambda _: f"input {value.name!r}", message)


def _progress(on_progress: OnProgress | None) -> Callable[[Event], None] | None:
    if on_progress is None:
        return None
    return lambda event: on_progress(Progress(event["stage"], event["done"], event["elapsed_ns"]))


def encode_input(index: int, value: Value, expected: str) -> tuple[list[tuple[str, Argument]], bytes | None]:
    """Return the arguments and the payload of an `input` command."""
    arguments: list[tuple[str, Argument]] = [("index", index)]
    if isinstance(value, Tensor):
        arguments += [
            ("dtype", value.dtype),
            ("shape", ",".join(map(str, value.shape))),
            ("dim_order", ",".join(map(str, value.dim_order))),
        ]
        return arguments, value.data
    scalar = value.value
    if expected == "double" and isinstance(scalar, int) and not isinstance(scalar, bool):
        scalar = float(scalar)  # files that hold 2 for the float 2.0
    match scalar:
        case None:
            return [*arguments, ("kind", "none")], None
        case bool():
            return [*arguments, ("kind", "bool"), ("value", int(scalar))], None
        case int():
            return [*arguments, ("kind", "int"), ("value", scalar)], None
        case float():
            return [*arguments, ("kind", "double"), ("value", scalar.hex())], None


def read_values(event: Event, payload: bytes, stage: str) -> list[Value]:
    """Return the tensors and scalars that an event describes and its payload holds."""
    values: list[Value] = []
    for head in answers.events(event, "values"):
        name = answers.text(head, "name") or str(answers.whole(head, "index"))
        match answers.text(head, "kind"):
            case "tensor" if (dtype := answers.text(head, "dtype")) != "unsupported":
                offset, size = answers.whole(head, "offset"), answers.whole(head, "size_bytes")
                shape, order = (answers.wholes(head, key, answers.MOST_DIMS) for key in ("shape", "dim_order"))
                values.append(Tensor(name, dtype, shape, payload[offset : offset + size], order))
            case "int":
                number = int(answers.text(head, "value"))
                if not -(1 << 63) <= number < 1 << 63:
                    raise answers.BadAnswer(f"an integer of {number.bit_length()} bits")
                values.append(Scalar(name, number))
            case "double":
                values.append(Scalar(name, float.fromhex(answers.text(head, "value"))))
            case "bool":
                values.append(Scalar(name, answers.text(head, "value") == "1"))
            case "none":
                values.append(Scalar(name, None))
            case kind:
                raise errors.ProgramFailed(
                    stage, f"output {name} is of a kind or dtype ({kind}) that etfarm does not carry", "NotSupported", ()
                )
    return values


def read_tensor_info(value: Mapping[str, Any]) -> TensorInfo:
    """Return the description of a method's input or output."""
    index, kind = answers.whole(value, "index"), answers.text(value, "kind")
    if kind != "tensor":
        return TensorInfo(index, kind)
    return TensorInfo(
        index,
        "tensor",
        answers.text(value, "name"),
        answers.text(value, "dtype"),
        answers.wholes(value, "shape", answers.MOST_DIMS),
        answers.wholes(value, "dim_order", answers.MOST_DIMS),
        answers.whole(value, "size_bytes"),
        answers.truth(value, "planned"),
        answers.optional_truth(value, "dynamic"),
    )


def read_measured(event: Event, payload: bytes) -> Measured:
    """Return the result of a timed pass."""
    numbers = {key: answers.whole(event, key) for key in ("warmup", "first_run_ns", "iterations", "duration_ns", "wall_ns")}
    counters = {key: answers.optional_whole(event, key) for key in (*COUNTERS, "peak_rss_bytes", "warmup_ns")}
    return Measured(
        **numbers,
        **counters,  # type: ignore[arg-type]
        stop_reason=answers.text(event, "stop_reason"),
        samples_ns=read_samples(payload),
        steady=answers.optional_truth(event, "steady"),
    )


def read_samples(payload: bytes) -> array[int]:
    """Return the times in a payload.

    Raises:
        BadAnswer: a time is negative.
        ValueError: the payload ends within a time.
    """
    samples = little_endian(array("q", payload))
    if samples and min(samples) < 0:
        raise answers.BadAnswer("a sample is negative")
    return samples
