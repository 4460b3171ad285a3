"""A runner's pipe, whose process runs a user's program: what an agent makes of its answers, `etfarm.device_agents.runners`.

An input is what the runner writes to stdout; behind the last NUL byte, what it writes to stderr.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from pathlib import Path
from typing import Any

from etfarm.device_agents.runners.generation import GenerateRequest
from etfarm.device_agents.runners.process import Limits, RunnerProcess
from etfarm.device_agents.runners.protocol import MeasurePlan
from etfarm.device_agents.runners.remote import RemoteRunner
from etfarm.wire.errors import EtfarmError
from etfarm.wire.tensors import Tensor

RUNS = 200
TOKENS = (
    b'"payload_bytes": 8589934592',
    b'"payload_bytes": -1',
    b'"payload_bytes": "x"',
    b'"event": "error"',
    b'"code": "RUNTIME"',
    b'"event": "progress"',
    b'"event": "log"',
    b'"level": 3',
    b"null",
    b"[]",
    b"{}",
    b"1e400",
    b'"dtype": "float64"',
    b'"shape": [-1]',
    b"\n",
    b"etfarm-error-1\n",
    b"99999999999999999999",
)
_TENSOR: dict[str, Any] = {
    "index": 0,
    "kind": "tensor",
    "name": "x",
    "dtype": "float32",
    "shape": [2],
    "dim_order": [0],
    "size_bytes": 8,
    "planned": True,
    "dynamic": False,
}


def _event(kind: str, command: str, payload: bytes = b"", **more: Any) -> bytes:
    event = {"event": kind, "command": command, **more} | ({"payload_bytes": len(payload)} if payload else {})
    return json.dumps(event).encode() + b"\n" + payload


def seeds() -> list[bytes]:
    """Return what a good runner answers, and refusals, logs and ends in between."""
    measured = dict.fromkeys(
        ("cpu_ns", "voluntary_switches", "involuntary_switches", "minor_faults", "major_faults", "cpu_pressure_us", "steady"),
        None,
    )
    measured |= {
        "warmup": 1,
        "warmup_ns": 5,
        "first_run_ns": 9,
        "iterations": 2,
        "duration_ns": 20,
        "stop_reason": "ENOUGH",
        "wall_ns": 30,
        "peak_rss_bytes": 4096,
    }
    generated = measured | {"tokens": 2, "vocabulary": 9}
    del generated["iterations"]
    log = json.dumps({"event": "log", "level": "I", "where": "a.cpp:1", "message": "text"}).encode() + b"\n"
    progress = json.dumps({"event": "progress", "stage": "TIMED", "done": 1, "elapsed_ns": 5}).encode() + b"\n"
    value = {
        "index": 0,
        "name": "y",
        "kind": "tensor",
        "dtype": "float32",
        "shape": [2],
        "dim_order": [0],
        "offset": 0,
        "size_bytes": 8,
    }
    method = _event("result", "method", name="forward", inputs=[_TENSOR], outputs=[_TENSOR], planned_bytes=[64], backends=[])
    whole = b"".join(
        [
            _event(
                "result",
                "hello",
                protocol=1,
                executorch="1.5.1",
                arch="x86_64",
                backends=[],
                operators=["aten::add.out"],
                commands=["hello"],
            ),
            _event("result", "self_test", passed=["aten::add.out"]),
            _event("result", "threads", threads=2),
            log,
            _event("result", "load", load_ns=5, methods=["forward"], threads=2),
            method,
            _event("result", "load_method", load_method_ns=7),
            method,
            _event("result", "input"),
            _event("result", "run", run_ns=3),
            _event("result", "outputs", bytes(8), values=[value]),
            _event("result", "generate", bytes(40), repetitions=1, **generated),
            progress,
            _event("result", "measure", bytes(16), **measured),
            _event("result", "trace", bytes(16), iterations=2, etdump_bytes=9),
            _event("result", "debug", run_ns=3, etdump_bytes=9, dump_bytes=10),
            _event("result", "memory", rss_bytes=1, peak_rss_bytes=2, data_bytes=None),
        ]
    )
    refused = (
        whole[:400].rpartition(b"\n")[0]
        + b"\n"
        + _event("error", "load", code="RUNTIME", message="It failed.", runtime_code="InvalidProgram", log=["a"], names=["b"])
    )
    return [whole, refused, whole[:200] + b"\0terminate called after throwing\n[method.cpp:12] Out of memory\n"]


def attacks() -> list[bytes]:
    """Return answers of a hostile program that writes to its runner's pipe."""
    hello = {"protocol": 1, "executorch": "\ud800", "arch": "\ud800", "backends": ["\ud800"], "operators": []}
    odd = _event("result", "hello", **hello) + _event("error", "self_test", code="RUNTIME", message="\ud800", log=["\ud800"])
    deep = b"[" * 500_000 + b"\n"
    large = [b'{"event": "result", "command": "hello", "payload_bytes": %d}\n' % size for size in (8 << 30, 1 << 62, 1)]
    return [odd, deep, *(one + bytes(1 << 20) for one in large), b'{"event": "log", "level": [], "where": {}, "message": 3}\n']


class _Sink:
    def write(self, data: bytes) -> None:
        """Drop them."""

    async def drain(self) -> None:
        """Have taken all."""

    def close(self) -> None:
        """Be closed."""


class _Scripted:
    """A process that has written all that it ever will, and has ended."""

    pid = 0
    ended = True
    lost: EtfarmError | None = None
    memory_ran_out: bool | None = False

    def __init__(self, data: bytes) -> None:
        text, _, printed = data.rpartition(b"\0") if b"\0" in data[-200:] else (data, b"", b"")
        self.stdin = _Sink()
        self.stdout, self.stderr = asyncio.StreamReader(limit=1 << 20), asyncio.StreamReader()
        for reader, part in ((self.stdout, text), (self.stderr, printed)):
            reader.feed_data(part)
            reader.feed_eof()

    def kill(self) -> None:
        """Have ended already."""

    async def wait(self) -> int | None:
        """Return its exit code."""
        return -6


def fuzz(data: bytes) -> None:
    """Every call gives what its type says, or raises what became of the runner."""
    asyncio.run(_use(data))


async def _use(data: bytes) -> None:
    process = RunnerProcess(_Scripted(data), Limits(command_s=5.0), lambda line: str(line).encode(errors="replace").decode())
    runner = RemoteRunner(process)
    folder, steps = Path("/nowhere"), list[Any]()
    plan = MeasurePlan(warmup=1, iterations=2)
    calls = (
        runner.hello,
        runner.self_test,
        lambda: runner.threads(2),
        lambda: runner.load(folder / "program.pte"),
        lambda: runner.method("forward"),
        lambda: runner.load_method("forward"),
        lambda: runner.set_inputs([Tensor("x", "float32", (2,), bytes(8))]),
        runner.run,
        runner.outputs,
        lambda: runner.generate(GenerateRequest("forward", "forward", [1, 2], 0, 2, 1, 0, 9), 5.0, steps.append),
        lambda: runner.measure(plan, steps.append),
        lambda: runner.trace(2, folder / "t", on_progress=steps.append),
        lambda: runner.debug(folder / "d", folder / "e"),
        runner.memory,
    )
    try:
        for call in calls:
            try:
                values = await call()
            except EtfarmError as error:
                assert str(error) and all(isinstance(value, str) for value in error.metadata.values())
                str(error.metadata)
            else:
                _check(values)
        for step in steps:
            assert isinstance(step.stage, str) and isinstance(step.done, int) and isinstance(step.elapsed_ns, int)
    finally:
        await runner.close()


def _check(values: object) -> None:
    """That numbers are whole and fit the contract's fields."""
    for name, value in vars(values).items() if hasattr(values, "__dataclass_fields__") else ():
        for text in value if isinstance(value, tuple) else (value,):
            assert not isinstance(text, str) or text.encode() is not None, name
        if name.endswith(("_ns", "_bytes")) and value is not None and not isinstance(value, tuple | array):
            assert type(value) is int and 0 <= value < 1 << 63, (name, value)
