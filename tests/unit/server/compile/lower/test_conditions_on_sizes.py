"""Quantized programs whose dynamic dims have conditions, which torch.export finds again when it exports the quantized one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

pytest.importorskip("executorch")

from etfarm.server.compile.lower import build, quantize
from etfarm.server.compile.program.explain import stage_failed
from etfarm.wire import recipes
from tests.support.compiling import DYNAMIC, STATIC, lowered_here, run, sqnr_db

pytestmark = [
    pytest.mark.numeric, pytest.mark.slow(reason="lowers models"),
    pytest.mark.filterwarnings("ignore:This API and all of its related functionality"),
]  # fmt: skip


class Sound(nn.Module):
    """Strided and transposed convolutions, whose lengths torch does not prove positive for a named Dim."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.deep = nn.Conv1d(1, 8, 10, 5), nn.GroupNorm(2, 8), nn.Conv1d(8, 8, 3, padding=1, groups=8)
        self.second, self.up, self.head = nn.Conv1d(8, 16, 3, 2), nn.ConvTranspose1d(16, 8, 4, 2), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.norm(self.first(x)))
        y = F.silu(self.second(y + self.deep(y)))
        return self.head(self.up(y).transpose(1, 2)).log_softmax(-1)


def quantized(model: nn.Module, x: Tensor, shapes: Any, recipe: str) -> Any:
    program = torch.export.export(model, (x,), dynamic_shapes=shapes)
    own = recipes.from_toml(f'recipe = "{recipe}"')
    return program, quantize.quantize(program, build.quantization(own, "forward"), recipe, "forward", [])


@pytest.mark.parametrize("recipe", [STATIC, DYNAMIC])
def test_a_quantized_program_has_the_sizes_of_its_original(recipe: str) -> None:
    torch.manual_seed(0)
    model = Sound().eval()
    program, module = quantized(model, torch.randn(1, 1, 200), ({2: Dim.DYNAMIC(min=60, max=800)},), recipe)
    assert any("%" in guard for guard in program._guards_code)
    pte = lowered_here(quantize.export_again(module, program, False), recipe)
    for length in (60, 200, 333, 800):
        x = torch.randn(1, 1, length)
        assert sqnr_db(model(x).detach(), run(pte, [x])[0]) > 30


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class TwiceExceptForFour(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] != 4 else x


def test_a_condition_that_the_original_lacks_is_refused_with_the_names_of_inputs() -> None:
    program = torch.export.export(Twice(), (torch.randn(6, 4),), dynamic_shapes=({0: Dim("n", min=3, max=16)},))
    with pytest.raises(torch._dynamo.exc.UserError) as caught:
        quantize.export_again(TwiceExceptForFour(), program, False)
    error = stage_failed("TORCH_EXPORT", caught.value)
    assert re.search(r"\(s\d+\).+s\d+ = L\['x'\]", str(caught.value), re.DOTALL)
    assert error.message.startswith("Dim 0 of 'x' cannot be dynamic as requested")
    assert "3 <= dim 0 of 'x' <= 16 satisfy the generated guard dim 0 of 'x' != 4" in error.message
    assert not re.search(r"\bs\d+\b|L\[", f"{error.message} {error.metadata}")
