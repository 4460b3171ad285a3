"""Operators that write their result to a tensor that is given as `out`: the program has them without, and computes the same."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from etfarm.client.export import ModelSource, export_source
from etfarm.server.compile.screening import screen
from tests.support.exports import read_program


class Local(nn.Module):
    """Writes to tensors of its own, of which one has another dtype, behind a layer with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        scaled, doubled = torch.empty_like(y), torch.zeros(2, 4, dtype=torch.float64)
        torch.mul(y, 3, out=scaled)
        return torch.add(scaled, y, out=doubled) + scaled


class Buffer(nn.Module):
    """Writes to a buffer, and to a part of it."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        torch.add(self.total, x, out=self.total)
        torch.neg(x[0], out=self.total[1])
        return self.total * 2


class Several(nn.Module):
    """Writes several results."""

    def forward(self, x: Tensor) -> Any:
        values, indices = torch.empty(2), torch.empty(2, dtype=torch.int64)
        torch.max(x, 1, out=(values, indices))
        return values, indices


@pytest.mark.parametrize("module", [Local(), Buffer(), Several()])
def test_results_that_are_written_to_a_tensor_are_computed(module: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    archive = export_source(ModelSource.of(module.eval(), (x,)), name="m").methods["forward"].pt2
    assert isinstance(archive, bytes)
    (tmp_path / "model.pt2").write_bytes(archive)
    screen.screen_pt2(tmp_path / "model.pt2")
    program, eager = read_program(archive).module(), copy.deepcopy(module)
    with torch.no_grad():
        for factor in (1, 2):
            torch.testing.assert_close(program(x * factor), eager(x * factor), rtol=0, atol=0)
