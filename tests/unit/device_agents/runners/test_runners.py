"""What every runner computes, and what it refuses: the C++ one, and ExecuTorch's Python binding."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from etfarm.device_agents.runners import errors
from etfarm.device_agents.runners.python import PythonRunner
from etfarm.device_agents.runners.remote import RemoteRunner
from etfarm.wire import tensors
from etfarm.wire.tensors import Scalar, Tensor
from tests.support.programs import program
from tests.support.refusals import refuses
from tests.support.runner import QUICK, Start, arrays, close, loaded

pytestmark = pytest.mark.slow(reason="starts a runner for each test, and the Python one loads torch")

LACKING = ("int8", "split")
"""What the Python binding refuses, by name."""


# "add", "chain", "batch", "rows" and "unplanned" are compared with torch's in tests of their own below.
@pytest.mark.parametrize("name", ["conv", "channels_last", "scalars", "external", "external_xnnpack"])
async def test_outputs_are_torchs(runner: RemoteRunner, name: str) -> None:
    model = await loaded(runner, program(name))
    await runner.run()
    assert close(await runner.outputs(), model.expected)


@pytest.mark.parametrize("name", LACKING)
async def test_outputs_of_what_only_the_native_runner_takes_are_torchs(native_runner: RemoteRunner, name: str) -> None:
    model = await loaded(native_runner, program(name))
    await native_runner.run()
    assert close(await native_runner.outputs(), model.expected)


async def test_a_second_run_sees_the_same_inputs(runner: RemoteRunner) -> None:
    model = await loaded(runner, program("chain"))
    await runner.measure(QUICK)
    assert close(await runner.outputs(), model.expected)


async def test_a_method_reports_its_inputs_and_requirements(runner: RemoteRunner) -> None:
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


async def test_only_dynamic_dims_may_be_smaller(runner: RemoteRunner) -> None:
    await loaded(runner, program("batch"))
    assert (await runner.method("forward")).inputs[0].dynamic is True
    for rows in (1, 8):
        await runner.set_inputs([tensors.from_array("x", np.ones((rows, 3), np.float32))])
        await runner.run()
        assert arrays(await runner.outputs())[0].tolist() == [[2.0] * 3] * rows
    with pytest.raises(errors.InputMismatch, match=r"input 'x' must have the shape \[8, 3\] at most, not \[9, 3\]"):
        await runner.set_inputs([tensors.from_array("x", np.ones((9, 3), np.float32))])


NHWC = (0, 2, 3, 1)


@pytest.mark.parametrize(
    ("name", "complaints"),
    [
        ("add", {
            "must be float32, not float64": (np.ones((2, 3), np.float64), ()),
            r"must have the shape \[2, 3\], not \[3, 2\]": (np.ones((3, 2), np.float32), ()),
            r"must have 2 dims \[2, 3\], not 1 \[6\]": (np.ones(6, np.float32), ()),
        }),
        ("conv", {r"dim order \[0, 1, 2, 3\], not \[0, 2, 3, 1\]": (np.ones((1, 3, 16, 16), np.float32), NHWC)}),
        ("channels_last", {r"dim order \[0, 2, 3, 1\], not \[0, 1, 2, 3\]": (np.ones((1, 2, 3, 4), np.float32), ())}),
    ],
)  # fmt: skip
async def test_an_input_that_does_not_fit_is_refused_before_it_runs(
    runner: RemoteRunner, name: str, complaints: dict[str, tuple[np.ndarray, tuple[int, ...]]]
) -> None:
    model = await loaded(runner, program(name))
    for complaint, (array, order) in complaints.items():
        wrong = tensors.from_array("x", array, order)
        with pytest.raises(errors.InputMismatch, match=complaint) as caught:
            await runner.set_inputs([wrong, *model.inputs[1:]])
        assert caught.value.stage == "INPUTS"
    await runner.run()  # the inputs from before are still set
    assert close(await runner.outputs(), model.expected)


async def test_dims_of_size_one_have_no_place_in_the_dim_order(runner: RemoteRunner) -> None:
    model = await loaded(runner, program("conv"))
    (x,) = model.inputs
    assert isinstance(x, Tensor)
    await runner.set_inputs([replace(x, dim_order=(1, 0, 2, 3))])
    await runner.run()
    assert close(await runner.outputs(), model.expected)


async def test_baked_scalars_must_be_given_as_they_are(runner: RemoteRunner) -> None:
    model = await loaded(runner, program("scalars"))
    x, factor, times, bias = model.inputs
    with pytest.raises(errors.InputMismatch, match=r"input 'factor' must be 2\.5, a constant of the exported program") as fixed:
        await runner.set_inputs([x, Scalar("factor", 2.25), times, bias])
    assert "pass a tensor, such as torch.tensor(0.5)" in fixed.value.remedy
    with pytest.raises(errors.InputMismatch, match=r"input 2 must be 3, a constant of the exported program") as unnamed:
        await runner.set_inputs([x, factor, Scalar("2", 4), bias])
    assert "pass a tensor and index with it" in unnamed.value.remedy
    with pytest.raises(errors.InputMismatch, match="input 'times' must be int, not tensor"):
        await runner.set_inputs([x, factor, replace(x, name="times"), bias])
    with pytest.raises(errors.InputMismatch, match="takes 4 inputs, got 3"):
        await runner.set_inputs([x, factor, times])


async def test_default_inputs_are_the_same_on_every_machine(runner: RemoteRunner) -> None:
    await loaded(runner, program("add"))
    first, second = arrays(await runner.default_inputs(7)), arrays(await runner.default_inputs(7))
    assert [a.tolist() for a in first] == [a.tolist() for a in second]
    assert first[0].tolist() != first[1].tolist()
    assert [a.tolist() for a in first] != [a.tolist() for a in arrays(await runner.default_inputs(8))]
    assert all(((a >= 0) & (a < 1)).all() for a in first)
    # Pinned: another machine, and the next version, give these.
    assert first[0][0, 0] == np.float32(0.84866875)


async def test_threads_are_set_before_load_only(runner: RemoteRunner) -> None:
    assert await runner.threads(3) == 3
    assert (await runner.load(program("conv").path)).threads == 3
    with refuses("RUNNER_BROKEN", match="threads must be set before load"):
        await runner.threads(1)


@pytest.mark.remedy("CORES_UNAVAILABLE")
async def test_cores_that_do_not_exist_are_the_callers_fault(runner: RemoteRunner) -> None:
    with refuses("CORES_UNAVAILABLE", match=r"cannot bind to the cores \[1000\]"):
        await runner.affinity([1000])
    await runner.affinity(sorted(os.sched_getaffinity(0))[:1])


async def test_state_is_kept_between_runs_and_reset_by_a_reload(runner: RemoteRunner) -> None:
    await loaded(runner, program("counter"))
    seen = []
    for step in ("run", "run", "reload", "run"):
        if step == "reload":
            await runner.load_method("forward")  # the inputs are kept
            continue
        await runner.run()
        seen.append(arrays(await runner.outputs())[0].item())
    assert seen == [1.0, 2.0, 1.0]


@pytest.mark.remedy("PROGRAM_FAILED")
async def test_a_cut_program_fails_with_the_runtimes_own_words(runner: RemoteRunner, tmp_path: Path) -> None:
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


async def test_a_missing_method_is_named(runner: RemoteRunner) -> None:
    await runner.load(program("add").path)
    with pytest.raises(errors.ProgramFailed, match="no method 'backward'"):
        await runner.load_method("backward")


@pytest.mark.remedy("OPERATOR_MISSING")
@pytest.mark.parametrize(
    ("name", "old", "new", "reason", "named"),
    [
        ("add", b"aten::add", b"aten::zdd", "OPERATOR_MISSING", "aten::zdd.out"),
        ("conv", b"XnnpackBackend", b"YnnpackBackend", "BACKEND_MISSING", "YnnpackBackend"),
    ],
)
async def test_what_the_runner_lacks_is_named(
    runner: RemoteRunner, start: Start, tmp_path: Path, name: str, old: bytes, new: bytes, reason: str, named: str
) -> None:
    altered = tmp_path / "altered.pte"
    assert old in program(name).bytes
    altered.write_bytes(program(name).bytes.replace(old, new))
    await runner.load(altered)
    with refuses(reason, match=named):
        await runner.load_method("forward")
    async with start() as again:  # with a program whose operators and backends it has
        await loaded(again, program(name))


@pytest.mark.remedy("PROGRAM_DATA_MISSING")
@pytest.mark.parametrize(("name", "key"), [("external", "weight"), ("external_xnnpack", r"\w{12}\.\.\."), ("split", "weight")])
async def test_weights_that_did_not_come_are_named_and_crash_nothing(runner: RemoteRunner, name: str, key: str) -> None:
    model = program(name)
    await runner.load(model.path, [path for path in model.data if path.stem == "bias"])
    with refuses("PROGRAM_DATA_MISSING", match=f"none of its .ptd files contains: (bias, )?{key}") as caught:
        await runner.load_method("forward")
    assert caught.value.stage == "LOAD_METHOD"
    await runner.memory()  # XNNPACK alone would have ended the process with SIGSEGV


async def test_a_data_file_of_another_program_is_not_taken_for_the_right_one(runner: RemoteRunner) -> None:
    await runner.load(program("external_xnnpack").path, program("external").data)
    with refuses("PROGRAM_DATA_MISSING"):
        await runner.load_method("forward")


async def test_methods_of_one_program_replace_each_other(runner: RemoteRunner) -> None:
    model = program("methods")
    assert (await runner.load(model.path)).methods == ("double", "shift")
    seen = []
    for name in ("double", "shift", "double"):
        await runner.load_method(name)
        await runner.set_inputs(model.inputs)
        await runner.run()
        seen.append(arrays(await runner.outputs())[0].tolist())
    assert seen == [[0.0, 2.0, 4.0], [10.0, 11.0, 12.0], [0.0, 2.0, 4.0]]


async def test_outputs_may_be_scalars(runner: RemoteRunner) -> None:
    await loaded(runner, program("rows"))
    for rows in (8, 3):
        await runner.set_inputs([tensors.from_array("x", np.ones((rows, 3), np.float32))])
        await runner.run()
        doubled, count = await runner.outputs()
        assert isinstance(doubled, Tensor) and doubled.shape == (rows, 3)
        assert (arrays([doubled])[0] == 2.0).all()
        assert isinstance(count, Scalar) and count.value == rows


async def test_inputs_and_outputs_may_be_outside_of_the_memory_plan(runner: RemoteRunner) -> None:
    model = await loaded(runner, program("unplanned"))
    info = await runner.method("forward")
    assert [value.planned for value in (*info.inputs, *info.outputs)] == [False, False]
    for _ in range(2):  # each method loaded gets memory of its own
        await runner.measure(QUICK)
        assert close(await runner.outputs(), model.expected)
        await runner.load_method("forward")
    await runner.set_inputs([tensors.from_array("x", np.zeros((8, 3), np.float32))])
    await runner.run()
    assert arrays(await runner.outputs())[0].tolist() == [[0.0] * 3] * 8


@pytest.mark.remedy("RUNNER_LACKS")
async def test_what_the_python_binding_lacks_is_refused_by_name(native_runner: RemoteRunner, tmp_path: Path) -> None:
    split, int8 = program("split"), program("int8")
    async with PythonRunner.start(tmp_path) as runner:
        with refuses("RUNNER_LACKS", match="takes one data file, and the program has 2"):
            await runner.load(split.path, split.data)
        await runner.load(int8.path)
        with refuses("OPERATOR_MISSING", match=r"quantized_decomposed::quantize_per_tensor\.out"):
            await runner.load_method("forward")
    await loaded(native_runner, split)  # that of a bundle


async def test_every_runner_identifies_itself(runner: RemoteRunner) -> None:
    hello = await runner.hello()
    assert (hello.arch, hello.executorch) == (os.uname().machine, "1.5.1")
    assert "XnnpackBackend" in hello.backends and "aten::add.out" in hello.operators
    assert "XnnpackBackend" in await runner.self_test()


async def test_default_inputs_are_the_same_in_every_runner(start_native: Start, tmp_path: Path) -> None:
    model = program("conv")
    values = []
    for starting in (start_native(), PythonRunner.start(tmp_path)):
        async with starting as runner:
            await runner.load(model.path)
            await runner.load_method("forward")
            values.append(await runner.default_inputs(3))
    assert values[0] == values[1]


async def test_kept_methods_keep_their_state_apart(runner: RemoteRunner) -> None:
    model = program("counters")
    await runner.load(model.path)
    seen = []
    for name in ("ones", "tens"):
        await runner.load_method(name, keep=True)
        await runner.set_inputs(model.inputs)
    for name in ("ones", "ones", "tens", "ones"):
        await runner.select(name)
        await runner.run()
        seen.append(arrays(await runner.outputs())[0].item())
    assert seen == [1.0, 2.0, 10.0, 3.0]
    await runner.load_method("ones")
    with refuses("RUNNER_BROKEN", match="method 'tens' is not loaded"):
        await runner.select("tens")


async def test_every_dtype_and_empty_shape_comes_back_as_torch_gives_it(runner: RemoteRunner) -> None:
    model = await loaded(runner, program("dtypes"))
    await runner.run()
    values = [value for value in await runner.outputs() if isinstance(value, Tensor)]
    expected = [value for value in model.expected if isinstance(value, Tensor)]
    assert [(v.dtype, v.shape, v.data) for v in values] == [(v.dtype, v.shape, v.data) for v in expected]


async def test_not_a_number_is_a_value(runner: RemoteRunner) -> None:
    model = await loaded(runner, program("add"))
    odd = np.array([[np.nan, np.inf, -np.inf], [0.0, -0.0, 1e-45]], np.float32)
    await runner.set_inputs([tensors.from_array("x", odd), *model.inputs[1:]])
    await runner.run()
    assert np.array_equal(arrays(await runner.outputs())[0], odd + np.float32(0.5), equal_nan=True)
