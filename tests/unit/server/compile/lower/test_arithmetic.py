"""Arithmetic that has PyTorch's values and dtypes, where ExecuTorch computes in floats of fewer bits or in another dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

pytest.importorskip("executorch")

from tests.support.compiling import lowered_here, run

pytestmark = [
    pytest.mark.filterwarnings("ignore:This API and all of its related functionality"), pytest.mark.numeric,
    pytest.mark.slow(reason="lowers models"),
]  # fmt: skip

Body = Callable[..., dict[str, Any]]

TIMES: Final = torch.tensor([[1700000130.25, 1700000131.5, -1700000140.0]], dtype=torch.float64)
LARGE: Final = torch.tensor([[2**62 + 1, 2**53 + 3, -(2**60) - 5, 50000001]])
BYTES: Final = torch.tensor([1, 255, 44, 45], dtype=torch.uint8)
HALF: Final = torch.tensor([0.1, -0.5, 2.0], dtype=torch.float16)


class Model(torch.nn.Module):
    """Some functions of the inputs."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body

    def forward(self, *inputs: Any) -> Any:
        return self.body(*inputs)


def of_float64(x: Any) -> dict[str, Any]:
    return {
        "sub": x - 1700000123.0, "rsub": 0.1 - x, "mul": x * 1.1, "div": x / 0.3, "where": torch.where(x > 0, x, 1700000123.1),
        "sum": x.sum(-1), "kept": x.sum(0, keepdim=True), "norm": (x * 1e-9).norm(dim=-1), "amax": x.amax() * 1.1,
        "remainder": x % 7.1, "remainder of negative": x % -7.1, "of tensors": torch.remainder(x, x.sign() * 7.1),
        "floor": torch.floor(x), "item": x * x[0, 0].item(),
    }  # fmt: skip


def of_int64(x: Any) -> dict[str, Any]:
    n = x.sign() * 11 - 1
    return {
        "floor": torch.floor(x), "ceil": torch.ceil(x) - x, "trunc": torch.trunc(x), "round": torch.round(x),
        "fmod": torch.fmod(x, 7), "fmod of tensors": torch.fmod(x, n), "div": torch.div(x, 7, rounding_mode="trunc"),
        "div of tensors": torch.div(x, n, rounding_mode="trunc"), "div by a negative": torch.div(x, -7, rounding_mode="trunc"),
        "sum": x.sum(-1), "kept": x.sum(-1, keepdim=True), "strided": x.sum(0), "all": x.sum(), "pow": x**2, "pow 5": x**5,
        "square": torch.square(x), "amax": x.amax() + 1, "item": x + x[0, 1].item(), "of floats": torch.fmod(x, 2.5),
    }  # fmt: skip


def of_int32(x: Any) -> dict[str, Any]:
    i = x.int()
    return {
        "floor": torch.floor(i), "pow": i**3, "sum": i.sum(-1, dtype=torch.int32), "amax": i.amax() + 1, "mul": i.amax() * 2,
        "float": i.amax() * 2.5, "fmod": torch.fmod(i, 7), "mixed": torch.fmod(x, i), "size": i.amax() + x.shape[1],
    }  # fmt: skip


def of_bytes(x: Any) -> dict[str, Any]:
    top = x.amax() + 1
    return {
        "top": top, "below": x < top, "beyond": x.amax() + 300, "rsub": 1 - x.amax(), "pow": x**6, "amax": x.amax() ** 3,
        "int16": (x.short() + 100) ** 4, "bool": (x > 2).amax() + 1, "sum": x.sum(0, dtype=torch.uint8), "floor": torch.floor(x),
    }  # fmt: skip


def of_half(x: Any) -> dict[str, Any]:
    return {
        "add": x.amax() + 1.0,
        "mul": x.amax() * 70000.0,
        "beyond": x * 70000.0,
        "within": x * 0.1,
        "compare": x > x.amax() * 0.5,
    }


@pytest.mark.parametrize("recipe", ["portable", "xnnpack_fp32"])
@pytest.mark.parametrize(
    ("body", "example", "x"),
    [
        (of_float64, TIMES / 1e9, TIMES),
        (of_int64, LARGE.sign(), LARGE),
        (of_int32, LARGE.sign(), torch.tensor([[2**31 - 1, 50000001, -16777217, 300]])),
        (of_bytes, BYTES // 9, BYTES),
        (of_half, HALF / 9, HALF),
    ],
)
def test_results_have_the_values_and_dtypes_of_pytorch(body: Body, example: Any, x: Any, recipe: str) -> None:
    program = torch.export.export(Model(body).eval(), (example,))
    expected = body(x)
    for (name, wanted), actual in zip(expected.items(), run(lowered_here(program, recipe), [x]), strict=True):
        exact = {"rtol": 1e-14, "atol": 1e-6} if wanted.dtype == torch.float64 else {}
        torch.testing.assert_close(actual, wanted, msg=lambda why, name=name: f"{name}: {why}", **exact)


def test_an_input_that_is_only_rounded_is_returned() -> None:
    program = torch.export.export(Model(lambda x: torch.floor(x)).eval(), (LARGE.sign(),))
    assert torch.equal(run(lowered_here(program, "portable"), [LARGE])[0], LARGE)


def test_sums_of_dynamic_sizes_are_exact() -> None:
    shapes = ({0: torch.export.Dim("rows", min=2, max=8)},)
    program = torch.export.export(
        Model(lambda x: x.sum(0)).eval(), (torch.ones(3, 4, dtype=torch.long),), dynamic_shapes=(shapes,)
    )
    rows = LARGE.expand(5, 4) // 8
    assert torch.equal(run(lowered_here(program, "portable"), [rows])[0], rows.sum(0))
