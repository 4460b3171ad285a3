"""The options of benchmarks, compilations and runs: the client's keywords are the fields of one frozen object each."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields
from typing import Any

import numpy as np
import pytest

from etfarm.client import AsyncFarm, Farm, LocalSession
from etfarm.client.submit.bench_options import BenchOptions
from etfarm.client.submit.compile_options import CompileOptions
from etfarm.client.submit.options import only_device
from etfarm.client.submit.run_options import RunOptions
from etfarm.wire.measurement import FIELDS
from tests.support.refusals import refuses


@pytest.mark.parametrize("farm", [AsyncFarm, Farm])
@pytest.mark.parametrize(
    ("method", "options_type", "in_order"),
    [
        ("bench", BenchOptions, ["recipes", "devices"]),
        ("compile", CompileOptions, ["recipes"]),
        ("run", RunOptions, ["recipes", "device"]),
    ],
)
def test_a_call_shows_every_option_as_a_keyword(farm: type, method: str, options_type: Any, in_order: list[str]) -> None:
    parameters = inspect.signature(getattr(farm, method)).parameters
    assert sorted(parameters) == sorted(["self", "model", *(field.name for field in fields(options_type))])
    positional = [name for name, known in parameters.items() if known.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == ["self", "model", *in_order]


@pytest.mark.parametrize(("min_time_s", "max_time_s"), [(None, None), (60.0, None), (61.5, 61.5)])
def test_a_timed_pass_may_take_as_long_as_it_must(min_time_s: float | None, max_time_s: float | None) -> None:
    measurement = BenchOptions(min_time_s=min_time_s).job_spec().measurement
    assert (measurement.max_time_s if measurement.HasField("max_time_s") else None) == max_time_s


@pytest.mark.parametrize("name", FIELDS)
def test_every_option_of_a_measurement_is_requested_of_the_server(name: str) -> None:
    unset = getattr(BenchOptions(), name)
    value: Any = not unset if isinstance(unset, bool) else "big" if FIELDS[name].range is None else 7
    assert BenchOptions(**{name: value}).job_spec() != BenchOptions().job_spec()


def test_options_of_a_compilation_and_of_a_run_become_a_job() -> None:
    compiled = CompileOptions("portable", name="n", labels={"a": "b"}, no_cache=True, stop_after="QUANTIZE").job_spec()
    assert (compiled.name, dict(compiled.labels), compiled.no_cache, compiled.stop_after) == ("n", {"a": "b"}, True, "QUANTIZE")
    assert not compiled.devices and not compiled.HasField("measurement"), "compile only"
    run = RunOptions("portable", "arch=aarch64", method="encode", threads=2, timeout_s=5).job_spec()
    assert [(choice.selector, choice.all) for choice in run.devices] == [("arch=aarch64", False)]
    assert (list(run.methods), list(run.threads), run.timeout_s) == (["encode"], [2], 5.0)
    assert not run.HasField("measurement") and not RunOptions().job_spec().HasField("timeout_s")


@pytest.mark.parametrize("options_type", [CompileOptions, RunOptions])
def test_options_of_a_compilation_and_of_a_run_do_not_change(options_type: Any) -> None:
    with pytest.raises(FrozenInstanceError):
        options_type().name = "other"
    with refuses("BAD_OPTION"):
        options_type(recipe="portable", recipes="portable")


@pytest.mark.parametrize(
    ("device", "devices", "selector"),
    [(None, None, ""), ("arch=aarch64", None, "arch=aarch64"), (None, ["name=pi"], "name=pi"), ((), None, "")],
)
def test_a_session_takes_one_device_in_both_spellings(device: Any, devices: Any, selector: str) -> None:
    assert only_device(device, devices) == selector


@pytest.mark.parametrize(("device", "devices"), [("name=a", "name=b"), (["name=a", "name=b"], None)])
def test_a_session_takes_no_two_devices(device: Any, devices: Any) -> None:
    with refuses("BAD_OPTION"):
        AsyncFarm("localhost:1").session("x.pte", device, devices=devices)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="iteration"):
        Farm().bench("demo:resnet8", iteration=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("farm", [AsyncFarm, Farm])
@pytest.mark.parametrize("method", ["bench", "compile", "run"])
def test_an_unknown_option_is_refused_in_the_name_of_the_method(farm: type, method: str) -> None:
    with pytest.raises(TypeError, match=rf"^{method}\(\) got an unexpected keyword argument 'iteration'$"):
        getattr(farm(), method)("demo:resnet8", iteration=3)


def test_a_single_method_or_thread_count_needs_no_list() -> None:
    single, listed = BenchOptions(methods="forward", threads=4), BenchOptions(methods=["forward"], threads=(4,))
    assert single.job_spec() == listed.job_spec()
    assert (list(single.job_spec().methods), list(single.job_spec().threads)) == (["forward"], [4])


def test_options_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        BenchOptions().iterations = 3  # type: ignore[misc]


def test_the_job_has_the_options() -> None:
    options = BenchOptions(
        devices=("arch=aarch64", "arch=x86_64"), all_devices=True, iterations=3, profile=False, labels={"a": "b"}
    )
    spec = options.job_spec()
    assert [(choice.selector, choice.all) for choice in spec.devices] == [("arch=aarch64", True), ("arch=x86_64", True)]
    assert (spec.measurement.iterations, spec.measurement.no_profile, dict(spec.labels)) == (3, True, {"a": "b"})
    assert BenchOptions(trace_iterations=50).job_spec().measurement.trace_iterations == 50
    assert not spec.measurement.HasField("trace_iterations")
    assert not spec.measurement.HasField("warmup") and not spec.HasField("timeout_s"), "the server's defaults"


def test_without_a_selector_any_device_will_do() -> None:
    assert [choice.selector for choice in BenchOptions(devices=()).job_spec().devices] == [""]


def test_both_spellings_of_an_option_are_taken() -> None:
    singular = BenchOptions(recipe="portable", device="name=a", method="forward")
    plural = BenchOptions(["portable"], ["name=a"], methods=["forward"])
    assert singular.chosen_recipes == plural.chosen_recipes == ["portable"]
    assert singular.job_spec() == plural.job_spec()
    assert BenchOptions(recipe=["portable", "xnnpack_fp32"]).chosen_recipes == ["portable", "xnnpack_fp32"]
    assert BenchOptions().chosen_recipes == ["xnnpack_fp32"]


@pytest.mark.parametrize("method", ["bench", "compile", "run", "session"])
def test_every_call_that_compiles_takes_both_spellings(method: str) -> None:
    for farm in (AsyncFarm, Farm):
        parameters = inspect.signature(getattr(farm, method)).parameters
        assert {"recipe", "recipes"} <= parameters.keys()
        assert ("method" in parameters) == ("methods" in parameters)
    assert {"method", "methods"} <= inspect.signature(LocalSession).parameters.keys()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"recipes": []}, "`recipes` is empty. Name at least one, such as 'xnnpack_fp32', or leave it out."),
        ({"recipe": ()}, "`recipes` is empty. Name at least one, such as 'xnnpack_fp32', or leave it out."),
        (
            {"recipe": "portable", "recipes": ["portable"]},
            "`recipe` and `recipes` are the same option, and both are set. Set one.",
        ),
        ({"device": "", "devices": ""}, "`device` and `devices` are the same option, and both are set. Set one."),
        ({"method": "a", "methods": "b"}, "`method` and `methods` are the same option, and both are set. Set one."),
    ],
)
def test_options_that_contradict_each_other_or_select_nothing_are_refused(options: dict[str, Any], sentence: str) -> None:
    with refuses("BAD_OPTION") as refused:
        Farm().bench("demo:resnet8", **options)
    assert str(refused.value) == sentence


async def test_a_call_without_recipes_or_with_too_many_is_refused() -> None:
    with refuses("BAD_OPTION"):
        await AsyncFarm().compile("demo:resnet8", [])
    with refuses("BAD_OPTION"):
        await AsyncFarm().run("demo:resnet8", recipe=[])
    with refuses("BAD_OPTION", match="must be one recipe, got 2"):
        AsyncFarm().session("demo:resnet8", recipes=["portable", "xnnpack_fp32"])


@pytest.mark.parametrize("options", [BenchOptions, CompileOptions])
@pytest.mark.parametrize("value", [(np.zeros(3),), np.zeros(3), ["portable", 3]])
def test_inputs_in_the_place_of_a_recipe_are_refused_with_their_keyword(options: Any, value: Any) -> None:
    with refuses("BAD_OPTION", match=r"must be a recipe's name, .*example_inputs=\(x,\), .*inputs=\{"):
        options(value)
