"""Convolutions of batches of any size, whatever the size of the example inputs is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

pytest.importorskip("executorch")

from etfarm.server.compile.lower import build, quantize
from etfarm.wire import recipes
from tests.support.compiling import DYNAMIC, STATIC, lowered_here, run, sqnr_db

pytestmark = [
    pytest.mark.numeric, pytest.mark.slow(reason="lowers models"),
    pytest.mark.filterwarnings("ignore:This API and all of its related functionality"),
]  # fmt: skip


class Classifier(nn.Module):
    """A network of images with a pool over all places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.norm = nn.Conv2d(1, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.body(F.relu(self.stem(x)))))
        return self.head(F.adaptive_avg_pool2d(y, 1).flatten(1))


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("recipe", ["xnnpack_fp32", STATIC, DYNAMIC])
def test_a_program_takes_the_batches_of_its_dim(recipe: str, size: int) -> None:
    torch.manual_seed(0)
    model = Classifier().eval()
    program = torch.export.export(model, (torch.randn(size, 1, 12, 12),), dynamic_shapes=({0: Dim("b", min=1, max=16)},))
    if recipe != "xnnpack_fp32":
        own = recipes.from_toml(f'recipe = "{recipe}"')
        module = quantize.quantize(program, build.quantization(own, "forward"), recipe, "forward", [])
        program = quantize.export_again(module, program, own.strict)
    pte = lowered_here(program, recipe)
    for batch in (1, 4, 15, 16):
        x = torch.randn(batch, 1, 12, 12)
        assert sqnr_db(model(x).detach(), run(pte, [x])[0]) > 15
