"""int8 programs of models that write to buffers, views and inputs, against the models, call by call."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("executorch")

from etfarm.server.compile.lower import build, in_place, quantize
from etfarm.wire import recipes
from tests.support.compiling import DYNAMIC, STATIC, sample

pytestmark = pytest.mark.numeric


class Model(nn.Module):
    """Has a state, and layers that read what its body writes."""

    state: Tensor

    def __init__(self, body: Callable[[Any, Tensor], Tensor], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.body = body
        self.line, self.image = nn.Linear(16, 16), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.point = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.register_buffer("state", torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def accumulated(m: Any, x: Tensor) -> Tensor:
    m.state.mul_(0.5).add_(x)
    return m.line(m.state) + m.state  # type: ignore[no-any-return]


def averaged(m: Any, x: Tensor) -> Tensor:
    y = m.line(x)
    m.state.mul_(0.9).add_(y, alpha=0.1)
    return y - m.state  # type: ignore[no-any-return]


def rolled(m: Any, x: Tensor) -> Tensor:
    m.state[:, 1:] = m.state[:, :-1].clone()
    m.state[:, :1] = x
    return m.line(m.state).sum(1)  # type: ignore[no-any-return]


def row(m: Any, x: Tensor) -> Tensor:
    y = m.norm(m.image(x))
    y[:, :, 0, :] = 0
    return m.point(y.relu())  # type: ignore[no-any-return]


def normalized(m: Any, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] -= 0.485
    x[:, 1] *= 2
    return m.image(x)  # type: ignore[no-any-return]


def viewed(m: Any, x: Tensor) -> Tensor:
    y = m.line(x)
    y.view(2, 8)[0].mul_(-2)
    return m.line(y)  # type: ignore[no-any-return]


def viewed_in_a_region(m: Any, x: Tensor) -> Tensor:
    y = m.line(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y.view(2, 8)[0].mul_(-2)
        mean = y.mean()
    return m.line(y) + mean  # type: ignore[no-any-return]


def averaged_in_a_region(m: Any, x: Tensor) -> Tensor:
    y = m.line(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        m.state.mul_(0.9).add_(y, alpha=0.1)
        z = y * 2
    return z - m.state  # type: ignore[no-any-return]


BODIES = {
    "a state": (accumulated, (1, 16), (1, 16)),
    "a mean": (averaged, (1, 16), (1, 16)),
    "a delay line": (rolled, (1, 1, 16), (1, 4, 16)),
    "a row of a layer's output": (row, (1, 4, 8, 8), (1,)),
    "channels of a copy": (normalized, (1, 4, 8, 8), (1,)),
    "a view of a layer's output": (viewed, (1, 16), (1,)),
    "a view in a region": (viewed_in_a_region, (1, 16), (1,)),
    "a mean in a region": (averaged_in_a_region, (1, 16), (1, 16)),
}
RANDOM = torch.Generator().manual_seed(0)


def decibels(expected: Tensor, actual: Tensor) -> float:
    noise = (expected - actual).double().square().sum().item()
    return 300.0 if noise == 0 else 10 * math.log10(expected.double().square().sum().item() / noise)


@pytest.mark.slow(reason="lowers models")
@pytest.mark.parametrize("recipe", [STATIC, DYNAMIC])
@pytest.mark.parametrize("name", BODIES)
def test_what_is_written_in_place_is_read(name: str, recipe: str, tmp_path: Path) -> None:
    body, shape, state = BODIES[name]
    torch.manual_seed(0)
    model = Model(body, state).eval()
    calls = [torch.randn(shape, generator=RANDOM) for _ in range(12)]
    program = in_place.without_writes(torch.export.export(copy.deepcopy(model), (calls[0],)))
    files = [sample(tmp_path / f"{index}.ett", x) for index, x in enumerate(calls[1:])]
    own = recipes.from_toml(f'recipe = "{recipe}"')
    quantized = quantize.quantize(program, build.quantization(own, "forward"), recipe, "forward", files)
    with torch.no_grad():
        levels = [decibels(model(x), quantized(x)) for x in calls]
    assert min(levels) > 28, levels


def test_a_layer_and_its_norm_are_still_one() -> None:
    program = in_place.without_writes(torch.export.export(Model(row, (1,)).eval(), (torch.randn(1, 4, 8, 8),)))
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "aten.batch_norm.default" in names and not any("legit" in name for name in names)
    norm = next(node for node in program.graph.nodes if "batch_norm" in str(node.target))
    assert norm.meta["stack_trace"] and norm.meta["nn_module_stack"]


@pytest.mark.parametrize("body", [lambda m, x: m.line(x).relu_(), lambda m, x: m.line(x).add_(1).relu_() * 2])
def test_a_program_that_loses_no_write_is_left_as_it_is(body: Callable[[Any, Tensor], Tensor]) -> None:
    program = torch.export.export(Model(body, (1,)).eval(), (torch.randn(1, 16),))
    assert in_place.without_writes(program) is program
