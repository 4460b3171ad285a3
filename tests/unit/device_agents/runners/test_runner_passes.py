"""The passes of every runner, and how it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from etfarm.device_agents.runners import errors
from etfarm.device_agents.runners.process import Limits, LogLine
from etfarm.device_agents.runners.protocol import MeasurePlan, Progress
from etfarm.device_agents.runners.remote import RemoteRunner
from tests.support.programs import program
from tests.support.refusals import refuses
from tests.support.runner import ENDLESS, QUICK, Start, close, loaded, quickest

pytestmark = pytest.mark.slow(reason="starts a runner for each test, and the Python one loads torch")

TRIES = 5
"""Of a pass that reports progress: the machine may stand still in one of them."""


async def test_measure_stops_for_the_reason_that_it_reports(runner: RemoteRunner) -> None:
    await loaded(runner, program("add"))
    enough = await runner.measure(QUICK)
    assert (enough.stop_reason, enough.iterations, enough.warmup) == ("ENOUGH", 20, 2)
    assert len(enough.samples_ns) == 20
    assert all(sample > 0 for sample in enough.samples_ns)
    assert sum(enough.samples_ns) <= enough.duration_ns <= enough.wall_ns
    assert enough.cpu_ns is not None and enough.cpu_ns > 0
    if runner.kind == "native":
        assert enough.peak_rss_bytes is not None and enough.peak_rss_bytes > 1 << 20
    else:
        assert enough.peak_rss_bytes is None, "nearly all of it is Python's and torch's"
    capped = await runner.measure(replace(QUICK, iterations=10**6, max_samples=50))
    assert (capped.stop_reason, capped.iterations) == ("MAX_SAMPLES", 50)
    late = await runner.measure(replace(QUICK, iterations=10**9, max_time_ns=1_000_000, max_samples=10**7))
    assert late.stop_reason == "MAX_TIME"
    assert late.first_run_ns == enough.first_run_ns
    lasting = await runner.measure(replace(QUICK, min_time_ns=3_000_000, max_samples=10**7))
    assert lasting.stop_reason == "ENOUGH" and lasting.duration_ns >= 3_000_000


async def test_samples_are_no_part_of_the_programs_memory(start_native: Start) -> None:
    async with start_native() as runner:
        await loaded(runner, program("add"))
        few = await runner.measure(QUICK)
        many = await runner.measure(replace(QUICK, steady=True, iterations=10**6, max_samples=10**6))
        again = await runner.measure(QUICK)
        reported = await runner.memory()
    peaks = (few.peak_rss_bytes, many.peak_rss_bytes, again.peak_rss_bytes, reported.peak_rss_bytes)
    assert many.iterations == 10**6 and None not in peaks
    assert max(peaks) - few.peak_rss_bytes < 1 << 20, "8 MB of samples"  # type: ignore[operator,type-var]


async def test_a_steady_warm_up_says_whether_the_median_came_to_rest(runner: RemoteRunner) -> None:
    await loaded(runner, program("conv"))
    assert (await runner.measure(QUICK)).steady is None
    plan = replace(QUICK, steady=True, max_warmup_ns=120_000_000_000)
    calm = await runner.measure(plan)
    assert calm.steady is True
    assert calm.warmup >= plan.warmup + 3 * 5
    assert calm.warmup_ns is not None and calm.warmup_ns < 120_000_000_000
    assert (calm.stop_reason, calm.iterations) == ("ENOUGH", QUICK.iterations)
    # A window lasts 50 ms, and three are needed.
    hurried = await runner.measure(replace(plan, max_warmup_ns=1_000_000))
    assert hurried.steady is False and hurried.warmup_ns is not None and hurried.warmup_ns >= 1_000_000


async def test_measure_reports_its_progress(runner: RemoteRunner) -> None:
    await loaded(runner, program("add"))
    plan = replace(QUICK, iterations=1, min_time_ns=600_000_000, max_samples=10**7)
    timed: list[Progress] = []
    for _ in range(TRIES):
        seen: list[Progress] = []
        measured = await runner.measure(plan, seen.append)
        assert list(dict.fromkeys(p.stage for p in seen)) == ["WARMUP", "TIMED"]
        timed = [p for p in seen if p.stage == "TIMED" and p.done]
        assert len(timed) <= measured.duration_ns / 250_000_000  # at most four a second
        if timed:
            break
    assert timed, "a pass reports progress, unless the machine stands still for most of it"


async def test_a_measurement_is_never_traced(runner: RemoteRunner) -> None:
    await loaded(runner, program("add"), trace=True)
    with refuses("RUNNER_BROKEN", match="loaded with a tracer"):
        await runner.measure(QUICK)


async def test_inspector_reads_the_trace_and_the_intermediate_outputs(runner: RemoteRunner, tmp_path: Path) -> None:
    inspector = pytest.importorskip("executorch.devtools").Inspector
    model = await loaded(runner, program("conv"), trace=True)
    traced = await runner.trace(5, tmp_path / "trace.etdp", warmup=2)
    assert len(traced.samples_ns) == 5
    assert traced.etdump_bytes == traced.etdump.stat().st_size > 0
    assert traced.wall_ns is not None and traced.wall_ns >= sum(traced.samples_ns)
    assert traced.cpu_ns is not None and traced.cpu_ns > 0
    assert traced.involuntary_switches is not None and traced.involuntary_switches >= 0
    (block,) = [b for b in inspector(etdump_path=str(traced.etdump)).event_blocks if b.name == "Execute"]
    calls = [event for event in block.events if event.name == "DELEGATE_CALL"]
    assert [len(event.perf_data.raw) for event in calls] == [5]
    assert len([event for event in block.events if event.is_delegated_op]) >= 2

    await runner.load_method("forward", trace=True, debug=True)
    with refuses("RUNNER_BROKEN", match="runs by the debug command only"):
        await runner.run()
    debugged = await runner.debug(tmp_path / "debug.etdp", tmp_path / "debug.bin")
    assert debugged.dump_bytes == debugged.dump.stat().st_size > 0
    (block,) = [
        b
        for b in inspector(etdump_path=str(debugged.etdump), debug_buffer_path=str(debugged.dump)).event_blocks
        if b.name == "Execute"
    ]
    assert any(event.debug_data for event in block.events)
    assert close(await runner.outputs(), model.expected)


async def test_a_trace_is_repeatable(runner: RemoteRunner, tmp_path: Path) -> None:
    await loaded(runner, program("add"), trace=True)
    first = await runner.trace(3, tmp_path / "a.etdp")
    second = await runner.trace(3, tmp_path / "b.etdp")
    assert first.etdump_bytes == second.etdump_bytes


async def test_a_full_disk_is_the_devices_fault(runner: RemoteRunner) -> None:
    await loaded(runner, program("add"), trace=True)
    with refuses("DEVICE_STORAGE_FAILED", match="No space left on device"):
        await runner.trace(3, Path("/dev/full"))


async def test_a_debug_file_on_a_full_disk_is_the_devices_fault_and_the_runner_goes_on(
    runner: RemoteRunner, tmp_path: Path
) -> None:
    await loaded(runner, program("add"), trace=True, debug=True)
    for etdump, dump in ((tmp_path / "debug.etdp", Path("/dev/full")), (Path("/dev/full"), tmp_path / "debug.bin")):
        with refuses("DEVICE_STORAGE_FAILED", match="No space left on device"):
            await runner.debug(etdump, dump)
        await runner.load_method("forward", trace=True, debug=True)
    assert (await runner.debug(tmp_path / "debug.etdp", tmp_path / "debug.bin")).dump_bytes > 0


@pytest.mark.remedy("DEVICE_STORAGE_FAILED")
async def test_a_debug_file_gets_no_larger_than_it_may(runner: RemoteRunner, tmp_path: Path) -> None:
    await loaded(runner, program("add"), trace=True, debug=True)
    etdump, dump = tmp_path / "debug.etdp", tmp_path / "debug.bin"
    with refuses("DEVICE_STORAGE_FAILED", match=r"the intermediate outputs take \d+ bytes, and there is room for 10\."):
        await runner.debug(etdump, dump, max_bytes=10)
    assert not dump.exists() or dump.stat().st_size <= 10
    await runner.load_method("forward", trace=True, debug=True)
    size = (await runner.debug(etdump, dump, max_bytes=1 << 24)).dump_bytes
    await runner.load_method("forward", trace=True, debug=True)
    assert (await runner.debug(etdump, dump, max_bytes=size)).dump_bytes == size


async def on_timed(runner: RemoteRunner, act: Callable[[], None], plan: MeasurePlan = ENDLESS) -> None:
    """Measures, and acts once the timed pass has begun."""
    await runner.measure(plan, lambda progress: act() if progress.stage == "TIMED" else None)


async def test_a_crash_reports_signal_and_stage(runner: RemoteRunner) -> None:
    await loaded(runner, program("conv"))
    with pytest.raises(errors.ProgramCrashed, match="by SIGSEGV at TIMED") as caught:
        await on_timed(runner, lambda: os.kill(runner.pid, signal.SIGSEGV))
    assert (caught.value.signal, caught.value.exit_code, caught.value.stage) == ("SIGSEGV", None, "TIMED")
    with pytest.raises(errors.ProgramCrashed):
        await runner.run()  # its outcome is still reported


async def cancelled(start: Start) -> float:
    """Seconds from the cancel of a command until its runner is gone."""
    async with start() as runner:
        await loaded(runner, program("conv"))
        timed = asyncio.Event()
        task = asyncio.create_task(on_timed(runner, timed.set))
        await timed.wait()
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with refuses("RUNNER_CLOSED"):
            await runner.run()
        await runner.close()
        took_s = time.monotonic() - began
        with pytest.raises(ProcessLookupError):
            os.kill(runner.pid, 0)
        return took_s


async def test_a_cancelled_command_kills_the_process(start: Start) -> None:
    assert await quickest(partial(cancelled, start), 1.0) < 1.0


async def test_leaving_the_context_reaps_a_stopped_process(start: Start) -> None:
    async with start() as runner:
        os.kill(runner.pid, signal.SIGSTOP)
    with pytest.raises(ProcessLookupError):
        os.kill(runner.pid, 0)


@pytest.mark.remedy("PROGRAM_OUT_OF_MEMORY")
async def test_a_program_larger_than_the_budget_is_out_of_memory(start: Start) -> None:
    async with start(limits=Limits(data_bytes=64 << 20)) as runner:
        await runner.threads(1)
        with pytest.raises(errors.ProgramOutOfMemory, match=str(64 << 20)):
            await loaded(runner, program("large"))
        await runner.memory()  # refused, not dead
    async with start(limits=Limits(data_bytes=64 << 20)) as runner:
        await runner.threads(1)
        await loaded(runner, program("add"))


async def test_threads_that_do_not_fit_into_the_budget_are_refused(start: Start) -> None:
    async with start(limits=Limits(data_bytes=16 << 20)) as runner:
        with pytest.raises(errors.ProgramOutOfMemory, match="no room for 64 threads"):
            await runner.threads(64)


async def test_log_lines_arrive_as_they_are_written(start: Start, tmp_path: Path) -> None:
    seen: list[LogLine] = []
    async with start(on_log=seen.append) as runner:
        (tmp_path / "none.pte").write_bytes(b"x" * 100)
        with pytest.raises(errors.ProgramFailed):
            await runner.load(tmp_path / "none.pte")
    assert any(line.source == "runtime" and line.level in ("E", "") and line.where.startswith("program.cpp:") for line in seen)
