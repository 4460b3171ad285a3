"""The real runners for tests. The C++ one is built once for its sources, unpacked outside of the checkout."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from etfarm.device_agents.daemon.own_runners import REMEMBERED, own_runners
from etfarm.device_agents.native.build import build_bundle, source_digest
from etfarm.device_agents.runners.bundle import Bundle, unpack
from etfarm.device_agents.runners.child import MAX_LINE_BYTES, Input
from etfarm.device_agents.runners.native import NativeRunner
from etfarm.device_agents.runners.protocol import MeasurePlan
from etfarm.device_agents.runners.python import PythonRunner
from etfarm.device_agents.runners.remote import RemoteRunner
from etfarm.wire import tensors
from etfarm.wire.errors import EtfarmError
from etfarm.wire.tensors import Tensor, Value
from tests.support.forks import Fork, exporting
from tests.support.programs import Program, cache_folder, locked

Start = Callable[..., AbstractAsyncContextManager[RemoteRunner]]
QUICK = MeasurePlan(warmup=2, iterations=20, min_time_ns=0, max_time_ns=5_000_000_000, max_samples=1000)
ENDLESS = MeasurePlan(warmup=0, iterations=1_000_000_000, min_time_ns=10**12, max_time_ns=10**12, max_samples=100_000_000)


class ForkedChild:
    """A runner of Python, forked from a process that has loaded torch, which takes most of the time of a start."""

    lost: EtfarmError | None = None
    memory_ran_out = False

    def __init__(self, fork: Fork, stdin: Input, stdout: asyncio.StreamReader, stderr: asyncio.StreamReader) -> None:
        self.pid, self.stdin, self.stdout, self.stderr = fork.pid, stdin, stdout, stderr
        self._fork = fork
        self._end = asyncio.create_task(self._ended(fork))

    async def _ended(self, fork: Fork) -> int:
        code = await asyncio.to_thread(fork.wait)
        self._kill_group()
        return code

    @property
    def ended(self) -> bool:
        """See `Child.ended`."""
        return self._end.done()

    def kill(self) -> None:
        """See `Child.kill`."""
        if not self.ended:
            self._fork.kill()  # at first it leads no group
            self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """See `Child.wait`."""
        return await asyncio.shield(self._end)


async def spawn_fork(command: Sequence[str], folder: Path) -> ForkedChild:
    """Fork the runner of Python where `spawn_here` would start it."""
    interpreter, *options = command
    assert interpreter == sys.executable and options[:2] == ["-P", "-m"]
    environment = {"LC_ALL": "C.UTF-8", "HOME": str(folder), "TMPDIR": str(folder)}
    fork, stdin, *outputs = exporting.run_module(options[2], options[3:], folder, environment)
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, stdin)
    readers = [asyncio.StreamReader(limit=MAX_LINE_BYTES) for _ in outputs]
    for reader, file in zip(readers, outputs, strict=True):
        await loop.connect_read_pipe(partial(asyncio.StreamReaderProtocol, reader), file)
    return ForkedChild(fork, asyncio.StreamWriter(transport, protocol, None, loop), *readers)


def runner_archive() -> Path:
    """Return the bundle of this machine's architecture; several test runs at once build it one time."""
    if shutil.which("g++") is None:
        pytest.skip("needs a compiler: apt-get install g++")
    archive = cache_folder() / f"runner-{source_digest()[:16]}.tar.gz"
    with locked("runner"):
        if not archive.exists():
            build_bundle(platform.machine(), archive)
    return archive


def know_own_runners(data: Path) -> None:
    """An agent of the data folder need not ask what is installed here, as if it had been started before."""
    with locked("own-runners"):
        # Of an event loop of its own: the caller may be on one.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(lambda: asyncio.run(own_runners(cache_folder()))).result()
        data.mkdir(parents=True, exist_ok=True)
        if (known := cache_folder() / REMEMBERED).exists():
            shutil.copy(known, data)


@pytest.fixture(scope="session")
def runner_bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    """The runner, unpacked and verified."""
    yield unpack(runner_archive(), tmp_path_factory.mktemp("runner") / "bundle")


@pytest.fixture
def start_native(runner_bundle: Bundle, tmp_path: Path) -> Start:
    """Starts the C++ runner in a folder of the test."""

    def starter(**options: object) -> AbstractAsyncContextManager[RemoteRunner]:
        return NativeRunner.start(runner_bundle.command(), tmp_path, **options)  # type: ignore[arg-type]

    return starter


@pytest.fixture(params=["native", "python"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    """Starts a runner in a folder of the test: each promise is one of both kinds."""
    if request.param == "native":
        native: Start = request.getfixturevalue("start_native")
        return native
    if not PythonRunner.available():
        pytest.skip("needs torch and executorch")

    def starter(**options: object) -> AbstractAsyncContextManager[RemoteRunner]:
        return PythonRunner.start(tmp_path, spawn=spawn_fork, **options)  # type: ignore[arg-type]

    return starter


@pytest.fixture
async def native_runner(start_native: Start) -> AsyncIterator[RemoteRunner]:
    """The C++ runner with nothing loaded."""
    async with start_native() as started:
        yield started


@pytest.fixture
async def runner(start: Start) -> AsyncIterator[RemoteRunner]:
    """A runner with nothing loaded, of each kind."""
    async with start() as started:
        yield started


async def loaded(runner: RemoteRunner, program: Program, **options: bool) -> Program:
    """`program` loaded with its inputs set."""
    await runner.load(program.path, program.data)
    await runner.load_method("forward", **options)
    await runner.set_inputs(program.inputs)
    return program


async def load_methods(runner: RemoteRunner, program: Program, *names: str) -> None:
    """Load a program and the methods with which it generates text."""
    await runner.threads(1)
    await runner.load(program.path)
    for name in dict.fromkeys(names or ("forward",)):
        await runner.load_method(name, keep=True)


def expected_tokens(program: Program) -> list[int]:
    """Return what eager PyTorch generates of a program's prompt."""
    (tokens,) = arrays(program.expected)
    return tokens.tolist()


async def quickest(try_once: Callable[[], Awaitable[float]], within_s: float, tries: int = 5) -> float:
    """Return how many seconds the quickest try takes: the machine may stand still in one of them."""
    took_s: list[float] = []
    while not took_s or (took_s[-1] >= within_s and len(took_s) < tries):
        took_s.append(await try_once())
    return min(took_s)


def arrays(values: Sequence[Value]) -> list[np.ndarray]:
    """Those that are tensors."""
    return [tensors.to_array(value) for value in values if isinstance(value, Tensor)]


def close(actual: Sequence[Value], expected: Sequence[Value]) -> bool:
    """Equal but for the last bits; fails with what is not."""
    assert len(actual) == len(expected)
    for one, other in zip(arrays(actual), arrays(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    return True
