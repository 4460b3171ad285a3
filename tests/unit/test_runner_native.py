"""The C++ runner, driven by `NativeRunner`: what it computes, what it refuses, and how it dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from etfarm.device_agents.runners import errors
from etfarm.device_agents.runners.bundle import Bundle
from etfarm.device_agents.runners.native import Limits, LogLine, NativeRunner
from etfarm.device_agents.runners.protocol import MeasurePlan, Progress
from etfarm.wire import tensors
from etfarm.wire.tensors import Scalar, Tensor, Value
from tests.support.programs import Program, program
from tests.support.runner import runner_bundle  # noqa: F401 - a fixture

Start = Callable[..., AbstractAsyncContextManager[NativeRunner]]
QUICK = MeasurePlan(warmup=2, iterations=20, min_time_ns=0, max_time_ns=5_000_000_000, max_samples=1000)
ENDLESS = MeasurePlan(warmup=0, iterations=1_000_000_000, min_time_ns=10**12, max_time_ns=10**12, max_samples=100_000_000)


@pytest.fixture
def start(runner_bundle: Bundle, tmp_path: Path) -> Start:  # noqa: F811
    """Starts a runner in a folder of the test."""

    def starter(**options: object) -> AbstractAsyncContextManager[NativeRunner]:
        return NativeRunner.start(runner_bundle.command(), tmp_path, **options)  # type: ignore[arg-type]

    return starter


@pytest.fixture
async def runner(start: Start) -> AsyncIterator[NativeRunner]:
    """A runner with nothing loaded."""
    async with start() as started:
        yield started


async def loaded(runner: NativeRunner, program: Program, **options: bool) -> Program:
    """`program` loaded with its inputs set."""
    await runner.load(program.path, program.data)
    await runner.load_method("forward", **options)
    await runner.set_inputs(program.inputs)
    return program


def arrays(values: list[Value]) -> list[np.ndarray]:
    return [tensors.to_array(value) for value in values if isinstance(value, Tensor)]


def assert_close(actual: list[Value], expected: list[Value]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(arrays(actual), arrays(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["add", "batch", "conv", "chain", "channels_last", "scalars", "external", "external_xnnpack"])
async def test_outputs_are_torchs(runner: NativeRunner, name: str) -> None:
    model = await loaded(runner, program(name))
    await runner.run()
    assert_close(await runner.outputs(), model.expected)


async def test_a_second_run_sees_the_same_inputs(runner: NativeRunner) -> None:
    model = await loaded(runner, program("chain"))
    await runner.measure(QUICK)
    assert_close(await runner.outputs(), model.expected)


async def test_hello_lists_what_the_runner_can_run(runner: NativeRunner) -> None:
    hello = await runner.hello()
    assert hello.arch == os.uname().machine
    assert hello.executorch == "1.5.1"
    assert hello.backends == ("XnnpackBackend",)
    assert {"aten::add.out", "quantized_decomposed::quantize_per_tensor.out"} <= set(hello.operators)


async def test_a_method_tells_its_inputs_and_needs(runner: NativeRunner) -> None:
    model = program("conv")
    assert (await runner.load(model.path)).methods == ("forward",)
    info = await runner.method("forward")
    assert [(i.kind, i.dtype, i.shape, i.dim_order, i.dynamic) for i in info.inputs] == [
        ("tensor", "float32", (1, 3, 16, 16), (0, 1, 2, 3), None)
    ]
    assert info.backends == ("XnnpackBackend",)
    assert sum(info.planned_bytes) > 0
    await runner.load_method("forward")
    assert (await runner.method("forward")).inputs[0].dynamic is False


async def test_only_dynamic_dims_may_be_smaller(runner: NativeRunner) -> None:
    await loaded(runner, program("batch"))
    assert (await runner.method("forward")).inputs[0].dynamic is True
    for rows in (1, 8):
        await runner.set_inputs([tensors.from_array("x", np.ones((rows, 3), np.float32))])
        await runner.run()
        assert arrays(await runner.outputs())[0].tolist() == [[2.0] * 3] * rows
    with pytest.raises(errors.InputMismatch, match=r"\[8, 3\] at most, not \[9, 3\]"):
        await runner.set_inputs([tensors.from_array("x", np.ones((9, 3), np.float32))])


@pytest.mark.parametrize(
    ("name", "array", "order", "complaint"),
    [
        ("add", np.ones((2, 3), np.float64), (), "must be float32, not float64"),
        ("add", np.ones((3, 2), np.float32), (), r"must have the shape \[2, 3\], not \[3, 2\]"),
        ("add", np.ones(6, np.float32), (), r"must have 2 dims \[2, 3\], not 1 \[6\]"),
        ("conv", np.ones((1, 3, 16, 16), np.float32), (0, 2, 3, 1), r"dim order \[0, 1, 2, 3\], not \[0, 2, 3, 1\]"),
        ("channels_last", np.ones((1, 2, 3, 4), np.float32), (), r"dim order \[0, 2, 3, 1\], not \[0, 1, 2, 3\]"),
    ],
)
async def test_an_input_that_does_not_fit_is_refused_before_it_runs(
    runner: NativeRunner, name: str, array: np.ndarray, order: tuple[int, ...], complaint: str
) -> None:
    model = await loaded(runner, program(name))
    wrong = tensors.from_array("x", array, order)
    with pytest.raises(errors.InputMismatch, match=complaint) as caught:
        await runner.set_inputs([wrong, *model.inputs[1:]])
    assert caught.value.stage == "INPUTS"
    await runner.run()  # the inputs from before are still set
    assert_close(await runner.outputs(), model.expected)


async def test_dims_of_size_one_have_no_place_in_the_dim_order(runner: NativeRunner) -> None:
    model = await loaded(runner, program("conv"))
    (x,) = model.inputs
    assert isinstance(x, Tensor)
    await runner.set_inputs([replace(x, dim_order=(1, 0, 2, 3))])
    await runner.run()
    assert_close(await runner.outputs(), model.expected)


async def test_baked_scalars_must_be_given_as_they_are(runner: NativeRunner) -> None:
    model = await loaded(runner, program("scalars"))
    x, factor, times, bias = model.inputs
    with pytest.raises(errors.InputMismatch, match="input 1 must be the double that the program was exported with"):
        await runner.set_inputs([x, Scalar("factor", 2.25), times, bias])
    with pytest.raises(errors.InputMismatch, match="input 2 must be int, not tensor"):
        await runner.set_inputs([x, factor, x, bias])
    with pytest.raises(errors.InputMismatch, match="takes 4 inputs, and 3 are given"):
        await runner.set_inputs([x, factor, times])


async def test_default_inputs_are_the_same_on_every_machine(runner: NativeRunner) -> None:
    await loaded(runner, program("add"))
    first, second = arrays(await runner.default_inputs(7)), arrays(await runner.default_inputs(7))
    assert [a.tolist() for a in first] == [a.tolist() for a in second]
    assert first[0].tolist() != first[1].tolist()
    assert [a.tolist() for a in first] != [a.tolist() for a in arrays(await runner.default_inputs(8))]
    assert all(((a >= 0) & (a < 1)).all() for a in first)
    # Pinned: another machine, and the next version, give these.
    assert first[0][0, 0] == np.float32(0.84866875)


async def test_threads_are_set_before_load_only(runner: NativeRunner) -> None:
    assert await runner.threads(3) == 3
    assert (await runner.load(program("conv").path)).threads == 3
    with pytest.raises(errors.RunnerBroken, match="threads must be set before load"):
        await runner.threads(1)


async def test_cores_that_do_not_exist_are_the_callers_fault(runner: NativeRunner) -> None:
    await runner.affinity(sorted(os.sched_getaffinity(0))[:1])
    with pytest.raises(errors.CoresUnavailable, match=r"cannot bind to the cores \[1000\]"):
        await runner.affinity([1000])


async def test_state_is_kept_between_runs_and_reset_by_a_reload(runner: NativeRunner) -> None:
    await loaded(runner, program("counter"))
    seen = []
    for step in ("run", "run", "reload", "run"):
        if step == "reload":
            await runner.load_method("forward")  # the inputs are kept
            continue
        await runner.run()
        seen.append(arrays(await runner.outputs())[0].item())
    assert seen == [1.0, 2.0, 1.0]


async def test_measure_stops_for_the_reason_it_tells(runner: NativeRunner) -> None:
    await loaded(runner, program("add"))
    enough = await runner.measure(QUICK)
    assert (enough.stop_reason, enough.iterations, enough.warmup) == ("ENOUGH", 20, 2)
    assert len(enough.samples_ns) == 20
    assert all(sample > 0 for sample in enough.samples_ns)
    assert sum(enough.samples_ns) <= enough.duration_ns <= enough.wall_ns
    assert enough.cpu_ns is not None and enough.cpu_ns > 0
    assert enough.peak_rss_bytes is not None and enough.peak_rss_bytes > 1 << 20
    capped = await runner.measure(replace(QUICK, iterations=10**6, max_samples=50))
    assert (capped.stop_reason, capped.iterations) == ("MAX_SAMPLES", 50)
    late = await runner.measure(replace(QUICK, iterations=10**9, max_time_ns=1_000_000, max_samples=10**7))
    assert late.stop_reason == "MAX_TIME"
    assert late.first_run_ns == enough.first_run_ns
    lasting = await runner.measure(replace(QUICK, min_time_ns=3_000_000, max_samples=10**7))
    assert lasting.stop_reason == "ENOUGH" and lasting.duration_ns >= 3_000_000


async def test_measure_tells_how_far_it_is(runner: NativeRunner) -> None:
    await loaded(runner, program("add"))
    seen: list[Progress] = []
    await runner.measure(replace(QUICK, iterations=1, min_time_ns=600_000_000, max_samples=10**7), seen.append)
    assert [p.stage for p in seen][:2] == ["WARMUP", "TIMED"]
    timed = [p for p in seen if p.stage == "TIMED" and p.done]
    assert 1 <= len(timed) <= 3  # at most four a second


async def test_a_measurement_is_never_traced(runner: NativeRunner) -> None:
    await loaded(runner, program("add"), trace=True)
    with pytest.raises(errors.RunnerBroken, match="loaded with a tracer"):
        await runner.measure(QUICK)


async def test_inspector_reads_the_trace_and_the_intermediate_outputs(runner: NativeRunner, tmp_path: Path) -> None:
    inspector = pytest.importorskip("executorch.devtools").Inspector
    model = await loaded(runner, program("conv"), trace=True)
    traced = await runner.trace(5, tmp_path / "trace.etdp", warmup=2)
    assert len(traced.samples_ns) == 5
    assert traced.etdump_bytes == traced.etdump.stat().st_size > 0
    (block,) = [b for b in inspector(etdump_path=str(traced.etdump)).event_blocks if b.name == "Execute"]
    calls = [event for event in block.events if event.name == "DELEGATE_CALL"]
    assert [len(event.perf_data.raw) for event in calls] == [5]
    assert len([event for event in block.events if event.is_delegated_op]) >= 2

    await runner.load_method("forward", trace=True, debug=True)
    with pytest.raises(errors.RunnerBroken, match="runs by the debug command only"):
        await runner.run()
    debugged = await runner.debug(tmp_path / "debug.etdp", tmp_path / "debug.bin")
    assert debugged.dump_bytes == debugged.dump.stat().st_size > 0
    (block,) = [
        b
        for b in inspector(etdump_path=str(debugged.etdump), debug_buffer_path=str(debugged.dump)).event_blocks
        if b.name == "Execute"
    ]
    assert any(event.debug_data for event in block.events)
    assert_close(await runner.outputs(), model.expected)


async def test_a_trace_is_repeatable(runner: NativeRunner, tmp_path: Path) -> None:
    await loaded(runner, program("add"), trace=True)
    first = await runner.trace(3, tmp_path / "a.etdp")
    second = await runner.trace(3, tmp_path / "b.etdp")
    assert first.etdump_bytes == second.etdump_bytes


async def test_a_full_disk_is_the_devices_fault(runner: NativeRunner) -> None:
    await loaded(runner, program("add"), trace=True)
    with pytest.raises(errors.DeviceStorageFailed, match="No space left on device"):
        await runner.trace(3, Path("/dev/full"))


async def test_a_cut_program_fails_with_the_runtimes_own_words(runner: NativeRunner, tmp_path: Path) -> None:
    whole = program("conv").bytes
    for size in (0, 10, 64, len(whole) // 2):
        cut = tmp_path / f"{size}.pte"
        cut.write_bytes(whole[:size])
        with pytest.raises(errors.ProgramFailed) as caught:
            await runner.load(cut)
            await runner.load_method("forward")
            pytest.fail(f"{size} bytes were taken for a program")
        assert caught.value.code
        assert caught.value.stage == "LOAD"
        assert caught.value.log
    await loaded(runner, program("conv"))  # the process is still good


async def test_a_missing_method_is_named(runner: NativeRunner) -> None:
    await runner.load(program("add").path)
    with pytest.raises(errors.ProgramFailed, match="no method 'backward'"):
        await runner.load_method("backward")


@pytest.mark.parametrize(
    ("name", "old", "new", "error", "named"),
    [
        ("add", b"aten::add", b"aten::zdd", errors.OperatorMissing, "aten::zdd.out"),
        ("conv", b"XnnpackBackend", b"YnnpackBackend", errors.BackendMissing, "YnnpackBackend"),
    ],
)
async def test_what_the_runner_lacks_is_named(
    runner: NativeRunner, tmp_path: Path, name: str, old: bytes, new: bytes, error: type[Exception], named: str
) -> None:
    altered = tmp_path / "altered.pte"
    assert old in program(name).bytes
    altered.write_bytes(program(name).bytes.replace(old, new))
    await runner.load(altered)
    with pytest.raises(error, match=named):
        await runner.load_method("forward")


async def on_timed(runner: NativeRunner, act: Callable[[], None], plan: MeasurePlan = ENDLESS) -> None:
    """Measures, and acts once the timed pass has begun."""
    await runner.measure(plan, lambda progress: act() if progress.stage == "TIMED" else None)


async def test_a_crash_tells_signal_and_stage(runner: NativeRunner) -> None:
    await loaded(runner, program("conv"))
    with pytest.raises(errors.ProgramCrashed, match="by SIGSEGV at TIMED") as caught:
        await on_timed(runner, lambda: os.kill(runner.pid, signal.SIGSEGV))
    assert (caught.value.signal, caught.value.exit_code, caught.value.stage) == ("SIGSEGV", None, "TIMED")
    with pytest.raises(errors.ProgramCrashed):
        await runner.run()  # what became of it is still told


async def test_a_crash_of_the_program_itself_is_survived_and_explained(runner: NativeRunner) -> None:
    await runner.load(program("external_xnnpack").path)  # and not its weights
    with pytest.raises(errors.ProgramCrashed, match=r"by SIGSEGV at LOAD_METHOD.*\.ptd file") as caught:
        await runner.load_method("forward")
    assert caught.value.stage == "LOAD_METHOD"


async def test_missing_weights_of_portable_operators_are_an_error(runner: NativeRunner) -> None:
    await runner.load(program("external").path)
    with pytest.raises(errors.ProgramFailed, match="external_data_map is null"):
        await runner.load_method("forward")


@pytest.mark.parametrize(
    ("words", "error", "told"),
    [
        ("assert failed (index < size_)", errors.ProgramCrashed, r"by SIGABRT at LOAD: assert failed \(index < size_\)"),
        ("uncaught C++ exception: std::bad_alloc", errors.ProgramOutOfMemory, "more memory at LOAD"),
    ],
)
async def test_an_abort_comes_with_its_last_words(tmp_path: Path, words: str, error: type[Exception], told: str) -> None:
    line = json.dumps({"event": "log", "level": "F", "where": "array_ref.h:7", "message": words})
    script = f"read command; echo '{line}'; kill -ABRT $$"
    async with NativeRunner.start(["/bin/sh", "-c", script], tmp_path) as runner:
        with pytest.raises(error, match=told):
            await runner.load(tmp_path / "any.pte")


async def test_what_a_program_forked_ends_with_it(tmp_path: Path) -> None:
    script = "sleep 600 & echo $! > child; read command; exit 3"
    async with NativeRunner.start(["/bin/sh", "-c", script], tmp_path) as runner:
        with pytest.raises(errors.ProgramCrashed, match="with exit code 3 at LOAD"):
            await asyncio.wait_for(runner.load(tmp_path / "any.pte"), 5)
    child = int((tmp_path / "child").read_text())
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"  # init reaps it


async def test_a_hang_ends_at_the_deadline(start: Start) -> None:
    async with start(limits=Limits(command_s=0.3)) as runner:
        await loaded(runner, program("conv"))
        plan = replace(ENDLESS, max_time_ns=1)
        began = time.monotonic()
        os.kill(runner.pid, signal.SIGSTOP)
        with pytest.raises(errors.ProgramHung, match=r"did not finish (WARMUP|TIMED) within 0\.3"):
            await runner.measure(plan)
        assert time.monotonic() - began < 1.3  # the device is free within a second
        with pytest.raises(ProcessLookupError):
            os.kill(runner.pid, 0)


async def test_a_cancelled_command_kills_the_process(start: Start) -> None:
    async with start() as runner:
        await loaded(runner, program("conv"))
        timed = asyncio.Event()
        task = asyncio.create_task(on_timed(runner, timed.set))
        await timed.wait()
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(errors.RunnerClosed):
            await runner.run()
        await runner.close()
        assert time.monotonic() - began < 1.0
        with pytest.raises(ProcessLookupError):
            os.kill(runner.pid, 0)


async def test_leaving_the_context_reaps_a_stopped_process(start: Start) -> None:
    async with start() as runner:
        os.kill(runner.pid, signal.SIGSTOP)
    with pytest.raises(ProcessLookupError):
        os.kill(runner.pid, 0)


async def test_a_program_larger_than_the_budget_is_out_of_memory(start: Start) -> None:
    async with start(limits=Limits(data_bytes=64 << 20)) as runner:
        await runner.threads(1)
        with pytest.raises(errors.ProgramOutOfMemory, match=str(64 << 20)):
            await loaded(runner, program("large"))
        await runner.memory()  # refused, not dead


async def test_threads_that_do_not_fit_into_the_budget_are_refused(start: Start) -> None:
    async with start(limits=Limits(data_bytes=16 << 20)) as runner:
        with pytest.raises(errors.ProgramOutOfMemory, match="no room for 64 threads"):
            await runner.threads(64)


async def test_the_samples_do_not_take_from_the_programs_budget(start: Start) -> None:
    async with start(limits=Limits(data_bytes=4 << 20)) as runner:
        await runner.threads(1)
        await loaded(runner, program("add"))
        measured = await runner.measure(replace(QUICK, max_samples=10_000_000))  # room for 80 MB of samples
        assert measured.iterations == QUICK.iterations


async def test_the_same_program_fits_without_a_budget(runner: NativeRunner) -> None:
    await runner.threads(1)
    model = await loaded(runner, program("large"))
    await runner.run()
    np.testing.assert_allclose(arrays(await runner.outputs()), arrays(model.expected), rtol=1e-5)


async def test_log_lines_arrive_as_they_are_written(start: Start, tmp_path: Path) -> None:
    seen: list[LogLine] = []
    async with start(on_log=seen.append) as runner:
        (tmp_path / "none.pte").write_bytes(b"x" * 100)
        with pytest.raises(errors.ProgramFailed):
            await runner.load(tmp_path / "none.pte")
    assert any(line.source == "runtime" and line.level == "E" and line.where.startswith("program.cpp:") for line in seen)


async def test_a_runner_that_cannot_start_is_the_farms_fault(tmp_path: Path) -> None:
    with pytest.raises(errors.RunnerBroken, match="cannot be started"):
        async with NativeRunner.start([str(tmp_path / "nothing")], tmp_path):
            pass
    async with NativeRunner.start(["/bin/sh", "-c", "echo no libc here >&2; exit 127"], tmp_path) as runner:
        with pytest.raises(errors.RunnerBroken, match="no libc here"):
            await runner.hello()
    async with NativeRunner.start(["/bin/echo", "something else"], tmp_path) as runner:
        with pytest.raises(errors.RunnerBroken, match="no protocol"):
            await runner.hello()
