"""Operators in autocast and no_grad regions keep their lines through decomposition."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from torch._higher_order_ops.wrap import WrapWithAutocast, wrap_with_autocast  # noqa: E402 - needs torch

from etfarm.server.compile.lower import regions  # noqa: E402
from etfarm.server.graphs.sources import source_of  # noqa: E402


class Regions(torch.nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        y = x.sin()
        with torch.autocast("cpu", enabled=False):
            y = y * y.sigmoid()
            with torch.no_grad():
                y = y.cos()
        with torch.no_grad():
            y = y.tanh()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = y @ x
        return y.exp()


def codes(program: Any) -> dict[str, str]:
    decomposed = program.run_decompositions({})
    traces = {node.name: node.meta.get("stack_trace") for node in decomposed.graph.nodes if node.op == "call_function"}
    return {name: source.code if (source := source_of(trace)) else "" for name, trace in traces.items()}


def test_operators_of_regions_keep_their_lines() -> None:
    with torch.enable_grad():
        program = torch.export.export(Regions().eval(), (torch.rand(4, 4),))
    assert any(node.target is wrap_with_autocast for node in program.graph.nodes), "else this test shows nothing"
    without = codes(program)
    call = WrapWithAutocast.__call__
    with regions.interpreted():
        result = codes(program)
    assert WrapWithAutocast.__call__ is call
    assert result.keys() == without.keys()
    assert without["sigmoid"] != result["sigmoid"]
    wanted = {
        "sin": "y = x.sin()", "sigmoid": "y = y * y.sigmoid()", "mul": "y = y * y.sigmoid()", "cos": "y = y.cos()",
        "tanh": "y = y.tanh()", "exp": "return y.exp()",
    }  # fmt: skip
    assert {name: result[name] for name in wanted} == wanted
    assert {code for name, code in result.items() if name not in wanted} == {"y = y @ x"}


def test_regions_compute_the_same() -> None:
    program = torch.export.export(Regions().eval(), (torch.rand(4, 4),))
    with regions.interpreted():
        decomposed = program.run_decompositions({})
    x = torch.rand(4, 4)
    assert torch.equal(decomposed.module()(x), program.module()(x))
