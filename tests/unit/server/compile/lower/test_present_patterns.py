"""A quantizer that skips the patterns of absent operators gives the graph of one that looks for all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("executorch")

from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from etfarm.server.compile.lower import build, quantize
from etfarm.wire import recipes
from tests.support.compiling import STATIC


class Normalized(nn.Module):
    """Convolutions with batch norms: one is folded into its convolution, the other stays, as the convolution has a second use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.second, self.second_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first_norm(self.first(x)))
        y = self.second(x)
        return torch.relu(self.second_norm(y)) + y


class Plain(nn.Module):
    """Layers without a batch norm, and an operator whose result is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.layer = nn.Conv2d(3, 4, 3), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.convolution(x))
        torch.add(y, y)
        return self.layer(y) * 2


@pytest.mark.parametrize("module", [Normalized, Plain])
def test_the_graph_is_that_of_all_patterns(module: type[nn.Module]) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 8, 8)
    program = torch.export.export(module().eval(), (x,))
    of_ours = quantize.quantize(program, build.quantization(recipes.parse(STATIC), "forward"), STATIC, "forward", [])
    (quantizer,) = build.quantization(recipes.parse(STATIC), "forward").quantizers
    prepared = prepare_pt2e(program.module(check_guards=False), quantizer)
    prepared(x)
    of_all = convert_pt2e(prepared)
    assert [str(node.target) for node in of_ours.graph.nodes] == [str(node.target) for node in of_all.graph.nodes]
    assert torch.equal(of_ours(x), of_all(x))
