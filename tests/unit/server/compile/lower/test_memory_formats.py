"""Quantized programs in which operators of images and others read the same tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("executorch")

from etfarm.server.compile.lower import build, quantize
from etfarm.wire import recipes
from tests.support.compiling import DYNAMIC, STATIC, lowered_here, run, sqnr_db

pytestmark = [
    pytest.mark.numeric, pytest.mark.slow(reason="lowers models"),
    pytest.mark.filterwarnings("ignore:This API and all of its related functionality"),
]  # fmt: skip

REDUCTIONS = ("mean", "sum", "amax", "amin", "max", "min", "var", "std", "norm")
"""Functions that reduce an image to a tensor without dims."""

Body = Callable[[Any, Tensor], Any]


class Model(nn.Module):
    """Applies a function of layers to an image."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.image, self.point, self.prelu = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.PReLU(4)
        self.make, self.first, self.last = nn.Linear(4, 4), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


@pytest.mark.parametrize(("recipe", "body"), [
    (STATIC, lambda m, x: m.point(F.prelu(m.image(x), m.prelu.weight * 2))),
    (STATIC, lambda m, x: m.point(F.prelu(m.image(x), m.make(x.mean((0, 2, 3)))))),
    (STATIC, lambda m, x: ((y := m.image(x)), m.point(F.instance_norm(y)))),
    (STATIC, lambda m, x: ((y := m.image(x)), m.point(y), y + 1, y.flatten(2))),
    (STATIC, lambda m, x: ((y := m.image(x)), torch.sigmoid(y))),
    (STATIC, lambda m, x: m.last(m.prelu(m.first(x)))),
    (STATIC, lambda m, x: ((y := torch.sigmoid(m.image(x))), *(getattr(torch, name)(y) for name in REDUCTIONS))),
    (STATIC, lambda m, x: ((y := m.image(x)), torch.where(y.mean() > -1, m.point(y), y), y * y.amax() + y.std())),
    (DYNAMIC, lambda m, x: m.last(m.prelu(m.first(x)))),
    (DYNAMIC, lambda m, x: m.last(F.max_pool2d(m.first(x), 3, 1, 1))),
    (DYNAMIC, lambda m, x: ((y := m.prelu(m.first(x))), m.last(y), m.first(y))),
    (DYNAMIC, lambda m, x: m.point(F.instance_norm(x))),
    (DYNAMIC, lambda m, x: ((y := F.instance_norm(m.image(x))), m.point(y))),
    (DYNAMIC, lambda m, x: m.point(F.layer_norm(m.image(x).flatten(2).transpose(1, 2), (4,)).transpose(1, 2).view(x.shape))),
    (DYNAMIC, lambda m, x: ((y := m.image(x)), m.point(2.0 - y), m.point(m.prelu.weight.sum() - y), y + 1)),
    (DYNAMIC, lambda m, x: m.point(m.image(x) * m.make(x.mean((0, 2, 3)))[:, None, None] + x)),
    (DYNAMIC, lambda m, x: ((y := x + 1), m.point(y), m.image(y), m.last(y), y.flatten(2))),
], ids=["computed", "generated", "instance norm", "outputs", "sigmoid", "linear", "no dims",
        "used without dims", "dynamic linear", "dynamic pool",
        "dynamic twice", "dynamic norm", "dynamic norm as output", "dynamic tokens", "dynamic number", "dynamic channels",
        "dynamic outputs"])  # fmt: skip
def test_programs_compute_as_the_model(recipe: str, body: Body) -> None:
    torch.manual_seed(0)
    model, x = Model(body).eval(), torch.randn(1, 4, 8, 8)
    program = torch.export.export(model, (x,))
    own = recipes.from_toml(f'recipe = "{recipe}"')
    module = quantize.quantize(program, build.quantization(own, "forward"), recipe, "forward", [])
    actual = run(lowered_here(quantize.export_again(module, program, own.strict), recipe), [x])
    expected = model(x) if isinstance(model(x), tuple) else (model(x),)
    assert all(sqnr_db(*pair) > 30 for pair in zip(expected, actual, strict=True))
