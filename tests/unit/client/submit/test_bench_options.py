"""The options of a benchmark: the client's keywords are the fields of one frozen object."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields

import pytest

from etfarm.client import AsyncFarm, Farm
from etfarm.client.submit.bench_options import BenchOptions


@pytest.mark.parametrize("farm", [AsyncFarm, Farm])
def test_bench_shows_every_option_as_a_keyword(farm: type) -> None:
    parameters = inspect.signature(farm.bench).parameters
    assert list(parameters) == ["self", "model", *(field.name for field in fields(BenchOptions))]
    positional = [name for name, known in parameters.items() if known.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == ["self", "model", "recipes", "devices"]


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="iteration"):
        Farm().bench("demo:resnet8", iteration=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("farm", [AsyncFarm, Farm])
def test_an_unknown_option_is_refused_in_the_name_of_the_method(farm: type) -> None:
    with pytest.raises(TypeError, match=r"^bench\(\) got an unexpected keyword argument 'method'$"):
        farm().bench("demo:resnet8", method="forward")


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
    assert not spec.measurement.HasField("warmup") and not spec.HasField("timeout_s"), "the server's defaults"


def test_without_a_selector_any_device_will_do() -> None:
    assert [choice.selector for choice in BenchOptions(devices=()).job_spec().devices] == [""]
