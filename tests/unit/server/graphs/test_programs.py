"""Exported programs that are read with cached expressions, compared with what torch reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch.export import Dim
from torch.export.pt2_archive._package import load_pt2

from etfarm.server.graphs.programs import read_program


class Convolutions(nn.Module):
    """Sizes that are expressions, and a branch, whose graphs have the same ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, stride=2, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    height, width = Dim("height", min=16, max=512), Dim("width", min=16, max=512)
    program = torch.export.export(Convolutions().eval(), (torch.zeros(1, 3, 64, 48),), dynamic_shapes=({2: height, 3: width},))
    path = tmp_path_factory.mktemp("programs") / "model.pt2"
    torch.export.save(program, path)
    return path


def described(program: Any) -> tuple[Any, ...]:
    """Return a program's code, values and ranges, also those that its shape environment knows."""
    values = [(node.name, node.meta.get("val")) for node in program.graph.nodes]
    (environment,) = {
        id(value.fake_mode): value.fake_mode.shape_env for _, value in values if isinstance(value, torch._subclasses.FakeTensor)
    }.values()
    return (
        program.graph_module.code,
        [(name, str(value.shape), str(value.stride())) for name, value in values if isinstance(value, torch.Tensor)],
        {str(symbol): str(limits) for symbol, limits in program.range_constraints.items()},
        {str(symbol): str(limits) for symbol, limits in environment.var_to_range.items()},
        {str(symbol): str(size) for symbol, size in environment.backed_var_to_val.items()},
    )


def test_a_program_is_the_one_that_torch_reads(model: Path) -> None:
    assert described(read_program(str(model))) == described(load_pt2(str(model)).exported_programs["model"])


def test_each_expression_is_parsed_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    sympify = sympy.sympify

    def counted(expression: Any, **options: Any) -> Any:
        if isinstance(expression, str):
            parsed.append(expression)
        return sympify(expression, **options)

    monkeypatch.setattr(sympy, "sympify", counted)
    read_program(str(model))
    # Of a size with and without its example, each once.
    assert parsed and len(parsed) <= 2 * len(set(parsed))
    once = len(parsed)
    load_pt2(str(model))
    assert len(parsed) - once > 3 * once
