"""A runner in a process of its own, as a `Runner`: commands out, typed results in. `native/PROTOCOL.md` is its protocol."""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from etfarm.device_agents.runners import errors
from etfarm.device_agents.runners.child import Spawn, spawn_here
from etfarm.device_agents.runners.process import Argument, Event, Limits, OnLog, RunnerProcess
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
from etfarm.wire.chunks import Progressed
from etfarm.wire.tensors import Scalar, Tensor, Value

PROTOCOL: Final = 1
"""The version of `native/PROTOCOL.md` that is spoken here."""


class RemoteRunner:
    """A `Runner` that speaks the line protocol, whatever it is made of. `connect` starts it and leaves nothing behind."""

    kind: ClassVar[str] = ""
    """Such as `native`, for reports."""

    def __init__(self, process: RunnerProcess) -> None:
        self._process = process
        self._method: MethodInfo | None = None
        self.path_for_runner: Callable[[Path], Path] = Path.absolute
        """Gives a file of this machine as the runner finds it."""

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, command: Sequence[str], folder: Path, limits: Limits, on_log: OnLog | None, spawn: Spawn = spawn_here
    ) -> AsyncIterator[Self]:
        """A runner started by `command`, working in `folder`; killed and reaped at the end.

        Raises:
            RunnerBroken: it cannot be started.
            As `spawn`.
        """
        process = await RunnerProcess.start(command, folder, limits, on_log, spawn)
        runner = cls(process)
        try:
            yield runner
        finally:
            process.kill()
            # A second cancellation must not leave a zombie: the waiting goes on without us.
            await asyncio.shield(asyncio.ensure_future(process.reap()))

    @property
    def pid(self) -> int:
        """The runner's process and process group."""
        return self._process.pid

    @property
    def stage(self) -> str:
        """What is under way, or was last."""
        return self._process.stage

    @property
    def moving(self) -> str:
        """What is on its way between here and where it runs, such as `its inputs`. Empty where it computes, or runs here."""
        return ""

    @property
    def has_files(self) -> bool:
        """Whether files that it wrote are where it runs, until `collect`."""
        return False

    async def collect(self, on_progress: Progressed | None = None) -> None:
        """Brings the files that it wrote to where they were asked for; they are there where it runs here."""

    async def hello(self) -> Hello:
        """Who answers.

        Raises:
            RunnerBroken: another version of the protocol, or none.
        """
        event, _ = await self._process.request("hello", stage="START")
        if event["protocol"] != PROTOCOL:
            raise errors.RunnerBroken(f"The runner speaks protocol {event['protocol']}, not {PROTOCOL}.")
        return Hello(
            event["protocol"], event["executorch"], event["arch"], tuple(event["backends"]), tuple(event["operators"]),
            tuple(event.get("confined", ())),
        )  # fmt: skip

    async def self_test(self) -> tuple[str, ...]:
        """Kernels and backends that gave known results; RunnerBroken names the first that did not."""
        event, _ = await self._process.request("self_test", stage="START")
        return tuple(event["passed"])

    async def threads(self, count: int) -> int:
        """Sets the size of the thread pool; RunnerBroken after `load`."""
        event, _ = await self._process.request("threads", [("n", count)], stage="START")
        return int(event["threads"])

    async def affinity(self, cores: Sequence[int]) -> None:
        """Binds the process; CoresUnavailable where it may not run there."""
        await self._process.request("affinity", [("cores", ",".join(map(str, cores)))], stage="START")

    async def load(self, program: Path, data: Sequence[Path] = ()) -> Loaded:
        """Loads a .pte with its .ptd files; ProgramFailed where they are damaged."""
        self._process.without_data = not data
        arguments: list[tuple[str, Argument]] = [("path", self.path_for_runner(program))]
        arguments += [("data", self.path_for_runner(path)) for path in data]
        event, _ = await self._process.request("load", arguments, stage="LOAD")
        return Loaded(event["load_ns"], tuple(event["methods"]), event["threads"])

    async def method(self, name: str) -> MethodInfo:
        """What a method takes and gives; ProgramFailed where there is none of that name."""
        event, _ = await self._process.request("method", [("name", name)], stage="LOAD")
        return MethodInfo(
            event["name"],
            tuple(_tensor_info(value) for value in event["inputs"]),
            tuple(_tensor_info(value) for value in event["outputs"]),
            tuple(event["planned_bytes"]),
            tuple(event["backends"]),
        )

    async def load_method(self, name: str, *, trace: bool = False, debug: bool = False, keep: bool = False) -> MethodLoaded:
        """Makes `name` the loaded method; OperatorMissing and BackendMissing name what the runner lacks."""
        self._method = None
        arguments: list[tuple[str, Argument]] = [("name", name), ("trace", int(trace)), ("debug", int(debug))]
        if keep:
            arguments.append(("keep", 1))
        event, _ = await self._process.request("load_method", arguments, stage="LOAD_METHOD")
        self._method = await self.method(name)
        return MethodLoaded(event["load_method_ns"])

    async def select(self, name: str) -> None:
        """Makes a method that was loaded with `keep` the one that commands are for."""
        await self._process.request("select", [("name", name)], stage="LOAD_METHOD")
        self._method = await self.method(name)

    async def set_inputs(self, values: Sequence[Value]) -> None:
        """All inputs of the loaded method, in order; InputMismatch tells the first that does not fit."""
        expected = self._method.inputs if self._method else ()
        if self._method and len(values) != len(expected):
            raise errors.InputMismatch(
                "INPUTS", f"method {self._method.name!r} takes {len(expected)} inputs, and {len(values)} are given"
            )
        for index, value in enumerate(values):
            kind = expected[index].kind if self._method else ""
            arguments, payload = _input(index, value, kind)
            await self._process.request("input", arguments, payload, stage="INPUTS")

    async def default_inputs(self, seed: int) -> list[Value]:
        """Sets and gives inputs made from `seed`, 0 to 2**63 - 1."""
        event, payload = await self._process.request("default_inputs", [("seed", seed)], stage="INPUTS")
        return _values(event, payload, "INPUTS")

    async def run(self) -> Ran:
        """One execution."""
        event, _ = await self._process.request("run", stage="RUN")
        return Ran(event["run_ns"])

    async def outputs(self) -> list[Value]:
        """What the latest execution gave, in order; named by the program or else by position."""
        event, payload = await self._process.request("outputs", stage="OUTPUTS")
        return _values(event, payload, "OUTPUTS")

    async def measure(self, plan: MeasurePlan, on_progress: OnProgress | None = None) -> Measured:
        """The timed pass. Its deadline is the warm-up's, the timed iterations' and `Limits.command_s` together."""
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
        )
        names = (
            "warmup", "warmup_ns", "steady", "first_run_ns", "iterations", "duration_ns", "stop_reason", "wall_ns", "cpu_ns",
            "voluntary_switches", "involuntary_switches", "minor_faults", "major_faults", "cpu_pressure_us",
            "peak_rss_bytes",
        )  # fmt: skip
        return Measured(**{name: event[name] for name in names}, samples_ns=_int64s(payload))

    async def trace(self, iterations: int, etdump: Path, *, warmup: int = 1, on_progress: OnProgress | None = None) -> Traced:
        """`iterations` traced ones into `etdump`; the method must be loaded with `trace` alone."""
        event, payload = await self._process.request(
            "trace",
            [("iterations", iterations), ("warmup", warmup), ("path", self.path_for_runner(etdump))],
            stage="TRACED",
            on_progress=_progress(on_progress),
        )
        return Traced(event["iterations"], _int64s(payload), etdump, event["etdump_bytes"])

    async def debug(self, etdump: Path, dump: Path, *, max_bytes: int | None = None) -> Debugged:
        """One iteration with intermediate outputs; the method must be loaded with `trace` and `debug`. DeviceStorageFailed
        where the outputs take more than `max_bytes`, or cannot be written."""
        arguments: list[tuple[str, Argument]] = [
            ("path", self.path_for_runner(etdump)),
            ("dump", self.path_for_runner(dump)),
        ]
        if max_bytes is not None:
            arguments.append(("max_bytes", max_bytes))
        event, _ = await self._process.request("debug", arguments, stage="DEBUG")
        return Debugged(event["run_ns"], etdump, event["etdump_bytes"], dump, event["dump_bytes"])

    async def memory(self) -> Memory:
        """Memory of the process now."""
        event, _ = await self._process.request("memory", stage=self._process.stage)
        return Memory(event["rss_bytes"], event["peak_rss_bytes"], event["data_bytes"])

    async def close(self) -> None:
        """Kills and reaps the process; later commands raise RunnerClosed."""
        self._process.kill()
        await self._process.reap()


def _progress(on_progress: OnProgress | None) -> Callable[[Event], None] | None:
    if on_progress is None:
        return None
    return lambda event: on_progress(Progress(event["stage"], event["done"], event["elapsed_ns"]))


def _input(index: int, value: Value, expected: str) -> tuple[list[tuple[str, Argument]], bytes | None]:
    """The arguments and the payload of an `input` command."""
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
        scalar = float(scalar)  # files that hold 2 where 2.0 was meant
    match scalar:
        case None:
            return [*arguments, ("kind", "none")], None
        case bool():
            return [*arguments, ("kind", "bool"), ("value", int(scalar))], None
        case int():
            return [*arguments, ("kind", "int"), ("value", scalar)], None
        case float():
            return [*arguments, ("kind", "double"), ("value", scalar.hex())], None


def _values(event: Event, payload: bytes, stage: str) -> list[Value]:
    values: list[Value] = []
    for head in event["values"]:
        name = head["name"] or str(head["index"])
        match head["kind"]:
            case "tensor" if head["dtype"] != "unsupported":
                data = payload[head["offset"] : head["offset"] + head["size_bytes"]]
                values.append(Tensor(name, head["dtype"], tuple(head["shape"]), data, tuple(head["dim_order"])))
            case "int":
                values.append(Scalar(name, int(head["value"])))
            case "double":
                values.append(Scalar(name, float.fromhex(head["value"])))
            case "bool":
                values.append(Scalar(name, head["value"] == "1"))
            case "none":
                values.append(Scalar(name, None))
            case kind:
                raise errors.ProgramFailed(
                    stage, f"output {name} is of a kind or dtype ({kind}) that etfarm does not carry", "NotSupported", ()
                )
    return values


def _tensor_info(value: Mapping[str, Any]) -> TensorInfo:
    if value["kind"] != "tensor":
        return TensorInfo(value["index"], value["kind"])
    return TensorInfo(
        value["index"],
        "tensor",
        value["name"],
        value["dtype"],
        tuple(value["shape"]),
        tuple(value["dim_order"]),
        value["size_bytes"],
        value["planned"],
        value.get("dynamic"),
    )


def _int64s(payload: bytes) -> array[int]:
    samples = array("q")
    samples.frombytes(payload)
    if sys.byteorder == "big":
        samples.byteswap()
    return samples
