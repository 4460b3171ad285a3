"""int8 programs of layers whose weights or biases are computed, created or written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("executorch")

from etfarm.server.compile.lower import build, quantize
from etfarm.server.compile.program import places
from etfarm.wire import recipes
from tests.support.compiling import DYNAMIC, STATIC, lowered_here, run, sqnr_db

pytestmark = [
    pytest.mark.numeric, pytest.mark.slow(reason="lowers models"),
    pytest.mark.filterwarnings("ignore:This API and all of its related functionality"),
]  # fmt: skip


class Model(nn.Module):
    """A body before a convolution."""

    w: Tensor

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.image, self.back = nn.Conv2d(4, 4, 3), nn.ConvTranspose2d(4, 4, 3)
        self.make, self.last = nn.Linear(4, 4 * 4 * 9), nn.Conv2d(4, 4, 3)
        self.register_buffer("w", torch.randn(4, 4, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self, x))  # type: ignore[no-any-return]


def standardized(m: Any, x: Tensor) -> Tensor:
    w = m.image.weight
    w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
    return F.conv2d(x, w, m.image.bias).relu()


def scaled_back(m: Any, x: Tensor) -> Tensor:
    return F.conv_transpose2d(x, m.back.weight * 2, m.back.bias)


def blurred(m: Any, x: Tensor) -> Tensor:
    return F.conv2d(x, torch.full((4, 1, 3, 3), 1 / 9), groups=4)


def created_back(m: Any, x: Tensor) -> Tensor:
    return F.conv_transpose2d(x, torch.ones(4, 4, 3, 3) * 0.1, stride=2)


def generated(m: Any, x: Tensor) -> Tensor:
    return F.conv2d(x, m.make(x.mean((0, 2, 3))).view(4, 4, 3, 3)).relu()


def written(m: Any, x: Tensor) -> Tensor:
    m.w.mul_(0.5)
    return F.conv2d(x, m.w * 2)


def sobel(m: Any, x: Tensor) -> Tensor:
    return F.conv2d(x, torch.tensor([[[[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]]]] * 4), groups=4)


def averaged(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, torch.full((8, 8), 0.125)).relu()


def generated_linear(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.make(x.mean((0, 2, 3)))[:64].view(8, 8)).relu()


def scaled_bias(m: Any, x: Tensor) -> Tensor:
    return F.conv2d(x, m.image.weight * 2, m.image.bias * 2).relu()


def generated_bias(m: Any, x: Tensor) -> Tensor:
    return F.conv2d(x, m.image.weight, x.mean((0, 2, 3))).relu()


def quantized(body: Callable[[Any, Tensor], Tensor], recipe: str, x: Tensor) -> tuple[Any, list[str]]:
    """Return a quantized program, which is made in this process, with the layers that stay in fp32."""
    torch.manual_seed(0)
    program = torch.export.export(Model(body).eval(), (x,))
    own = recipes.from_toml(f'recipe = "{recipe}"')
    module = quantize.quantize(program, build.quantization(own, "forward"), recipe, "forward", [])
    again = quantize.export_again(module, program, own.strict)
    return again, [row.op for row in places.fp32(again, xnnpack=True) for _ in range(row.count)]


def must_run(program: Any, body: Callable[[Any, Tensor], Tensor], recipe: str, x: Tensor) -> None:
    torch.manual_seed(0)
    expected = Model(body).eval()(x)
    assert sqnr_db(expected, run(lowered_here(program, recipe), [x])[0]) > 30


@pytest.mark.parametrize("body", [standardized, scaled_back, sobel])
def test_a_weight_that_is_computed_of_constants_is_quantized(body: Callable[[Any, Tensor], Tensor]) -> None:
    x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    program, fp32 = quantized(body, STATIC, x)
    assert fp32 == []
    assert not any("aten.mean" in str(node.target) or "aten.mul" in str(node.target) for node in program.graph.nodes)
    must_run(program, body, STATIC, x)


@pytest.mark.parametrize(
    ("body", "fp32"),
    [
        (blurred, ["conv2d"]),
        (created_back, ["conv_transpose2d"]),
        (generated, ["conv2d", "linear"]),
        (written, ["conv2d"]),
        (averaged, ["linear"]),
        (generated_linear, ["linear", "linear"]),
        (scaled_bias, ["conv2d"]),
        (generated_bias, ["conv2d"]),
    ],
)
def test_a_layer_with_another_weight_stays_in_fp32(body: Callable[[Any, Tensor], Tensor], fp32: list[str]) -> None:
    x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    program, stayed = quantized(body, STATIC, x)
    assert sorted(stayed) == fp32
    must_run(program, body, STATIC, x)


def test_dynamic_scales_leave_such_a_convolution_alone() -> None:
    x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    program, stayed = quantized(created_back, DYNAMIC, x)
    assert stayed == ["conv_transpose2d"]
    must_run(program, created_back, DYNAMIC, x)
