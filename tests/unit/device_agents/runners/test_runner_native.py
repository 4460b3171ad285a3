"""What the C++ runner alone can do, and what becomes of processes that are no runner."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from etfarm.device_agents.runners import errors
from etfarm.device_agents.runners.native import NativeRunner
from etfarm.device_agents.runners.process import Limits
from etfarm.device_agents.runners.protocol import MeasurePlan
from etfarm.device_agents.runners.remote import RemoteRunner
from etfarm.wire.errors import Fault
from tests.support.farm import wait_until
from tests.support.programs import program
from tests.support.refusals import refuses
from tests.support.runner import ENDLESS, QUICK, Start, arrays, loaded, quickest


async def test_hello_lists_what_the_runner_can_run(native_runner: RemoteRunner) -> None:
    hello = await native_runner.hello()
    assert hello.arch == os.uname().machine
    assert hello.executorch == "1.5.1"
    assert hello.backends == ("XnnpackBackend",)
    assert {"aten::add.out", "quantized_decomposed::quantize_per_tensor.out"} <= set(hello.operators)


async def test_hundreds_of_blocks_leave_nothing_behind(native_runner: RemoteRunner) -> None:
    await loaded(native_runner, program("conv"))
    block = MeasurePlan(warmup=0, iterations=5, min_time_ns=0, max_time_ns=5_000_000_000)
    descriptors = Path(f"/proc/{native_runner.pid}/fd")

    async def blocks(count: int) -> tuple[int, int]:
        for _ in range(count):
            measured = await native_runner.measure(block)
            assert (len(measured.samples_ns), measured.warmup) == (5, 0)
        data = (await native_runner.memory()).data_bytes
        assert data is not None
        return data, len(list(descriptors.iterdir()))

    first = await blocks(50)
    assert await blocks(300) == first


async def test_the_self_test_needs_no_program(native_runner: RemoteRunner) -> None:
    passed = await native_runner.self_test()
    assert set(passed) == {
        "aten::add.out", "aten::mul.out", "quantized_decomposed::quantize_per_tensor.out", "llama::update_cache.out",
        "llama::custom_sdpa.out", "XnnpackBackend",
    }  # fmt: skip
    await loaded(native_runner, program("add"))  # and leaves the process as it was


@pytest.mark.parametrize(
    ("words", "error", "expected"),
    [
        ("assert failed (index < size_)", errors.ProgramCrashed, r"by SIGABRT at LOAD: assert failed \(index < size_\)"),
        ("uncaught C++ exception: std::bad_alloc", errors.ProgramOutOfMemory, "more memory at LOAD"),
    ],
)
async def test_an_abort_comes_with_its_last_words(tmp_path: Path, words: str, error: type[Exception], expected: str) -> None:
    line = json.dumps({"event": "log", "level": "F", "where": "array_ref.h:7", "message": words})
    script = f"read command; echo '{line}'; kill -ABRT $$"
    async with NativeRunner.start(["/bin/sh", "-c", script], tmp_path) as runner:
        with pytest.raises(error, match=expected):
            await runner.load(tmp_path / "any.pte")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        # A log with levels: nothing in it is fatal.
        (
            "echo '{line}'; kill -ABRT $$",
            "The program ended the runner by SIGABRT at LOAD.",
        ),
        # One without, as of ExecuTorch's Python binding.
        ("echo '[a.cpp:1] No such thing.' >&2; kill -ABRT $$", "The program ended the runner by SIGABRT at LOAD: No such thing."),
        # Said in another command.
        (
            "echo '[a.cpp:1] Resetting.' >&2; echo '{done}'; read command; kill -ABRT $$",
            "The program ended the runner by SIGABRT at LOAD.",
        ),
    ],
)
async def test_an_abort_without_words_is_given_none(tmp_path: Path, script: str, message: str) -> None:
    line = json.dumps(
        {"event": "log", "level": "I", "where": "threadpool.cpp:7", "message": "Resetting threadpool to 1 threads."}
    )
    done = json.dumps({"event": "result", "command": "threads", "threads": 1})
    reported = "read command; " + script.replace("{line}", line).replace("{done}", done)
    async with NativeRunner.start(["/bin/sh", "-c", reported], tmp_path) as runner:
        if "{done}" in script:
            await runner.threads(1)
            assert await asyncio.to_thread(wait_until, lambda: len(runner._process._log) == 1)
        with pytest.raises(errors.ProgramCrashed) as caught:
            await runner.load(tmp_path / "any.pte")
    assert caught.value.message == message


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # init reaps it
    except psutil.NoSuchProcess:
        return True


async def test_what_a_program_forked_ends_with_it(tmp_path: Path) -> None:
    script = "sleep 600 & echo $! > child; read command; exit 3"
    async with NativeRunner.start(["/bin/sh", "-c", script], tmp_path) as runner:
        with pytest.raises(errors.ProgramCrashed, match="with exit code 3 at LOAD"):
            await asyncio.wait_for(runner.load(tmp_path / "any.pte"), 60)
    child = int((tmp_path / "child").read_text())
    assert wait_until(lambda: has_ended(child))


async def hung(start_native: Start) -> float:
    """Seconds until a runner that hangs in its timed pass is gone."""
    async with start_native() as runner:
        await loaded(runner, program("conv"))
        runner.limits = Limits(command_s=0.3)  # from here on: loading takes what it takes
        plan = replace(ENDLESS, max_time_ns=1)
        began = time.monotonic()
        os.kill(runner.pid, signal.SIGSTOP)
        with pytest.raises(errors.ProgramHung, match=r"did not finish (WARMUP|TIMED) within 0\.3"):
            await runner.measure(plan)
        took_s = time.monotonic() - began
        with pytest.raises(ProcessLookupError):
            os.kill(runner.pid, 0)
        return took_s


async def test_a_hang_ends_at_the_deadline(start_native: Start) -> None:
    assert await quickest(partial(hung, start_native), 1.3) < 1.3, "the device is free within a second"


async def test_the_samples_do_not_take_from_the_programs_budget(start_native: Start) -> None:
    async with start_native(limits=Limits(data_bytes=4 << 20)) as runner:
        await runner.threads(1)
        await loaded(runner, program("add"))
        measured = await runner.measure(replace(QUICK, max_samples=10_000_000))  # room for 80 MB of samples
        assert measured.iterations == QUICK.iterations


async def test_the_same_program_fits_without_a_budget(native_runner: RemoteRunner) -> None:
    await native_runner.threads(1)
    model = await loaded(native_runner, program("large"))
    await native_runner.run()
    assert np.allclose(arrays(await native_runner.outputs()), arrays(model.expected), rtol=1e-5)


async def test_a_runner_that_cannot_start_is_the_farms_fault(tmp_path: Path) -> None:
    with refuses("RUNNER_BROKEN", match="cannot be started"):
        async with NativeRunner.start([str(tmp_path / "nothing")], tmp_path):
            pass
    async with NativeRunner.start(["/bin/sh", "-c", "echo no libc here >&2; exit 127"], tmp_path) as runner:
        with refuses("RUNNER_BROKEN", match="no libc here"):
            await runner.hello()
    async with NativeRunner.start(["/bin/echo", "something else"], tmp_path) as runner:
        with refuses("RUNNER_BROKEN", match="violates the protocol"):
            await runner.hello()


async def test_a_runner_that_is_killed_before_it_had_a_program_is_the_devices_fault(tmp_path: Path) -> None:
    async with NativeRunner.start(["/bin/sh", "-c", "read command; kill -KILL $$"], tmp_path) as runner:
        with refuses("DEVICE_RUNNER_KILLED", match="killed by SIGKILL at START, before it had a program") as killed:
            await runner.hello()
    assert (killed.value.fault, killed.value.reason) == (Fault.DEVICE, "DEVICE_RUNNER_KILLED")
