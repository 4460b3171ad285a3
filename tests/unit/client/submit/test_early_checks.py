"""What is checked of a job before its models are exported: methods and keys of inputs, and what the server answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from etfarm.client.export.source import ModelSource
from etfarm.client.submit.early_checks import check_source, require_accepted
from etfarm.client.submit.input_names import InputMissing, UnknownInput
from etfarm.client.submit.input_types import InputMismatch
from etfarm.client.submit.inputs import read_named
from etfarm.client.submit.prepared import PreparedModel
from etfarm.v1 import job_pb2
from etfarm.wire import recipes
from etfarm.wire.errors import Fault, error_of
from etfarm.wire.names import PROTOCOL_VERSION
from tests.support.refusals import refuses


class Plain:
    def forward(self, image: Any, state: Any) -> None: ...


class Open:
    def forward(self, *images: Any, **options: Any) -> None: ...


def source(module: object = None, **more: Any) -> ModelSource:
    modules = cast(Any, {"forward": module or Plain(), **more})
    return ModelSource(modules, dict.fromkeys(modules, ()), constant_methods={"length": 3})


def keys(*names: str) -> Any:
    return read_named({name: np.zeros(1) for name in names})


def test_methods_are_those_of_the_source_and_its_constants() -> None:
    check_source("net", source(encode=Plain()), ["forward", "encode", "length"], None)
    with refuses("METHOD_MISSING") as refused:
        check_source("net", source(), ["decode"], None)
    assert str(refused.value) == (
        "net has no method 'decode'. It has: forward, length. Choose with --method (methods=)."
    )  # fmt: skip


@pytest.mark.parametrize(
    "keys_of_inputs", [("image", "state"), ("image", "state_0", "state_h_1"), ("0", "arr_1"), ("forward/image",), ()]
)
def test_keys_that_may_be_inputs_pass(keys_of_inputs: tuple[str, ...]) -> None:
    check_source("net", source(), [], keys(*keys_of_inputs))


def test_arguments_without_names_of_their_own_take_any_key() -> None:
    check_source("net", source(Open()), [], keys("images_0", "mask"))


@pytest.mark.parametrize("key", ["picture", "imag", "forward/picture", "decode/image"])
def test_a_key_that_can_be_no_input_is_refused(key: str) -> None:
    with pytest.raises(UnknownInput):
        check_source("net", source(), [], keys("image", key))


class Typed:
    def forward(self, image: Any, mask: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("arrays", "dynamic", "got"),
    [
        ({"image": np.zeros((1, 3), np.float64)}, False, "float64 [1, 3]"),
        ({"image": np.zeros((2, 3), np.float32)}, False, "float32 [2, 3]"),
        ({"arr_0": np.zeros((1, 3, 1), np.float32)}, True, "float32 [1, 3, 1]"),
        ({"image": np.zeros((1, 3), np.float32), "mask": np.zeros(2, bool)}, False, "bool [2]"),
        ({"image": np.zeros((1, 3), np.float32), "mask": np.zeros(2, np.float32)}, False, ""),
        ({"image": np.zeros((9, 3), np.float32), "1": np.zeros(2, np.float32)}, True, ""),
        ({"image": np.zeros((1, 3), np.float32), "mask_0": np.zeros(9)}, False, ""),
    ],
)
def test_a_tensor_unlike_the_example_is_refused_before_the_export(arrays: dict[str, np.ndarray], dynamic: bool, got: str) -> None:
    shapes = {"dynamic_shapes": {"forward": {"image": {0: torch.export.Dim("n", max=9)}, "mask": None}}} if dynamic else {}
    typed = ModelSource(
        cast(Any, {"forward": Typed()}), {"forward": (torch.zeros(1, 3),)},
        example_kwargs={"forward": {"mask": torch.zeros(2)}}, **shapes,
    )  # fmt: skip
    if not got:
        check_source("net", typed, [], read_named(arrays))
        return
    with pytest.raises(InputMismatch) as refused:
        check_source("net", typed, [], read_named(arrays))
    assert refused.value.metadata["got"] == got and "of forward is" in refused.value.message


class Parts:
    def forward(self, x: Any, a: Any = None, x_1: Any = None) -> None: ...


@pytest.mark.remedy("INPUT_MISMATCH")
def test_positions_are_those_of_the_export_and_parts_of_a_structure_are_no_arguments() -> None:
    """The export has positional arguments, then keyword arguments as they are given."""
    kwargs = {"x_1": torch.zeros(2, dtype=torch.float64), "a": torch.zeros(3)}
    plain = ModelSource(cast(Any, {"forward": Parts()}), {"forward": (torch.zeros(1),)}, example_kwargs={"forward": kwargs})
    check_source("net", plain, [], read_named({"0": np.zeros(1, np.float32), "1": np.zeros(2), "2": np.zeros(3, np.float32)}))
    with pytest.raises(InputMismatch, match=r"array\.astype"):
        check_source("net", plain, [], read_named({"1": np.zeros(3, np.float32)}))
    with pytest.raises(InputMismatch, match="Reshape it"):
        check_source("net", plain, [], read_named({"1": np.zeros(4)}))
    with pytest.raises(InputMissing, match="the input 'a' is missing"):
        check_source("net", plain, [], read_named({"x": np.zeros(1, np.float32), "x_1": np.zeros(2)}))
    listed = ModelSource(
        cast(Any, {"forward": Parts()}), {"forward": ([torch.zeros(1), torch.zeros(5)],)}, example_kwargs={"forward": kwargs}
    )
    check_source("net", listed, [], read_named({"x_0": np.zeros(1, np.float32), "x_1": np.zeros(5, np.float32)}))


def test_keys_without_a_method_belong_to_forward_or_to_the_only_one() -> None:
    with pytest.raises((UnknownInput, InputMissing)):
        check_source("net", ModelSource(cast(Any, {"a": Plain(), "b": Plain()}), {"a": (), "b": ()}), [], keys("image"))


async def test_a_job_that_the_server_would_refuse_is_refused_before_its_models_are_exported() -> None:
    sent: list[job_pb2.SubmitJobRequest] = []

    async def submit(request: job_pb2.SubmitJobRequest) -> job_pb2.Job:
        sent.append(request)
        raise error_of(Fault.USER, "NO_SUCH_DEVICE", "No.")

    stubs = cast(Any, SimpleNamespace(jobs=SimpleNamespace(Submit=submit)))
    fp32 = recipes.parse("xnnpack_fp32")
    with refuses("NO_SUCH_DEVICE"):
        await require_accepted(stubs, job_pb2.JobSpec(), [PreparedModel("net")], [fp32])
    (request,) = sent
    assert request.validate_only and request.request_id and request.protocol_version == PROTOCOL_VERSION
    assert [(each.name, each.recipe, each.WhichOneof("source")) for each in request.spec.candidates] == [("net", fp32.json, None)]
