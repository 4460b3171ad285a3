"""The warning of a device's outputs: which it names, and which are known already."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from etfarm.server.reports.numerics import wrong_outputs
from etfarm.wire import tensors
from etfarm.wire.tensors import Value

NAN = float("nan")
LOW = "forward is far from the model: {}. Give calibration inputs like the real ones."


def floats(*values: float) -> Value:
    return tensors.from_array("", np.array(values, np.float32))


def describe(
    *outputs: tuple[Value, Value],
    quantized: bool = False,
    backends: Sequence[str] = (),
    known: Sequence[str] = (),
    again: Sequence[Value] | None = None,
    in_half: Callable[[bool], Sequence[Sequence[Value]]] = lambda float32: (),
) -> str:
    named = {index: (name, [pair]) for index, (name, pair) in enumerate(zip("yzabcdef", outputs, strict=False))}
    repeated = [pair[0] for pair in outputs] if again is None else again
    return wrong_outputs.describe(
        "forward", named, lambda: repeated, in_half, quantized=quantized, backends=backends, known=known
    )


RIGHT = (floats(1, 2, 3), floats(1, 2, 3))
ROUGH = (floats(1, 2, 3), floats(1.1, 1.9, 3.1))  # 27 dB
FAR = (floats(1, 2, 3), floats(3, 1, 2))
GONE = (floats(1, 2, 3), floats(1, NAN, 3))


def test_a_program_is_judged_as_its_recipe_is() -> None:
    assert describe(RIGHT) == describe(ROUGH, quantized=True) == ""
    message = describe(ROUGH)
    assert message.startswith("On the device, forward is far from the model: y has 26.7 dB, where a float32 output mostly has")
    assert "No delegate takes part" in message and "the recipe portable too" not in message
    assert "Compile it with the recipe portable too" in describe(ROUGH, backends=["XnnpackBackend"])
    message = describe(RIGHT, FAR, quantized=True)
    assert message.startswith("On the device, forward is far from the model: z has 3.7 dB, less than the 10 dB")
    assert "Calibrate" in message


def test_integers_that_half_precision_decides_by_chance_are_not_named() -> None:
    classes = np.arange(100)
    model, device = (tensors.from_array("", each) for each in (classes, np.where(classes < 5, 7, classes)))
    other = [tensors.from_array("", np.where(classes > 96, 7, classes))]
    assert "y agrees in 95% of its integers only" in describe((model, device))
    assert not describe((model, device), in_half=lambda float32: [[model], other])
    assert "agrees in 95%" in describe((model, device), in_half=lambda float32: [[model]])
    assert "agrees in 95%" in describe((model, device), backends=["XnnpackBackend"], in_half=lambda float32: [other] * float32)
    assert not describe((model, device), backends=["CoreMLBackend"], in_half=lambda float32: [other] * float32)


def test_a_backend_that_may_compute_in_half_precision_is_judged_by_it() -> None:
    first, second = np.float32([1, 2, 3]), np.float32([1.01, 2.03, 3.06])  # 35 dB
    wide = (tensors.from_array("", first), tensors.from_array("", second))
    half = (tensors.from_array("", first), tensors.from_array("", second.astype(np.float16)))
    assert not describe(wide, half, backends=["CoreMLBackend"])
    for backends in ([], ["XnnpackBackend"]):
        message = describe(wide, half, backends=backends)
        assert " y has 34." in message or " y has 35." in message
    assert "y has the dtype float16 where the model gives float32" in describe(
        (half[0], tensors.from_array("", np.float16(first)))
    )


@pytest.mark.parametrize("quantized", [False, True])
def test_nan_is_named_with_its_number(quantized: bool) -> None:
    assert ": y has NaN in 1 of 3 elements where the model gives numbers. " in describe(GONE, quantized=quantized)


def test_integers_that_differ_are_named() -> None:
    first, second = (tensors.from_array("", np.array(each, np.int64)) for each in ([1, 2, 3, 4], [1, 2, 3, 9]))
    assert ": y agrees in 75% of its integers only. " in describe((first, second))


@pytest.mark.parametrize(
    ("known", "named"),
    [
        (LOW.format("y has 3.0 dB, less"), "z"), (LOW.format("z has 3.0 dB, less; y has 2.0 dB, less"), ""),
        (LOW.format("yy has 3.0 dB, less"), "yz"),
        ("forward on the server: Outputs are far from its graph: z (3.0 dB), y (12.0 dB), where 25 dB are usual.", ""),
    ],
)  # fmt: skip
def test_an_output_that_is_known_to_be_wrong_is_not_named_again(known: str, named: str) -> None:
    message = describe(FAR, FAR, quantized=True, known=[known])
    assert [name for name in "yz" if f" {name} has" in message] == list(named)


def test_nan_is_named_unless_it_is_known() -> None:
    assert " y has NaN" in describe(GONE, known=[LOW.format("y has 3.0 dB, less; z has NaN in 1 of 2 elements")])
    assert not describe(GONE, known=[LOW.format("y has NaN in 2 of 3 elements where the model gives numbers")])


def test_an_output_that_the_model_does_not_repeat_is_no_difference_but_nan_is() -> None:
    again = [floats(2, 3, 1)]
    assert not describe(FAR, again=again)
    assert " y has NaN" in describe(GONE, again=again)


def test_a_long_list_is_cut() -> None:
    message = describe(*[FAR] * 5, quantized=True)
    assert "; a has" in message and "and 2 more. " in message and " b has" not in message
