"""Regions of torch.no_grad and torch.autocast in programs of clients, and in archives that servers read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from etfarm.client.export import ModelSource, export_source
from etfarm.server.graphs.programs import read_program
from etfarm.server.reports.numerics import reference
from etfarm.wire.regions import inline_regions
from etfarm.wire.shared_state import written_buffers


class Model(nn.Module):
    """Has a state, and a body with regions."""

    state: Tensor

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.body = body
        self.line = nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def off() -> torch.autocast:
    return torch.autocast("cpu", enabled=False)


def on() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def buffer(m: Any, x: Tensor) -> Any:
    y = m.line(x)
    with off():
        m.state.lerp_(y.mean(0), 0.5)
        y = y * 2
    return m.line(y - m.state)


def mean_then_norm(m: Any, x: Tensor) -> Any:
    y = m.line(x)
    with torch.no_grad():
        m.state.lerp_(y.mean(0), 0.1)
    with off():
        return y.float().softmax(-1)


def only_writes(m: Any, x: Tensor) -> Any:
    with off():
        m.state.add_(x.mean(0))
    return x * 2


def nested(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        y = m.line(x)
        with off():
            y = y.float() @ x
            with torch.enable_grad():
                z = y.cos()
        return m.line(y), z, x


def with_a_branch(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        y = torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (x,))
    with off():
        y = torch.cond(y.sum() > 0, lambda v: v * 3, lambda v: v.sin(), (y,))
    return m.line(y)


def in_a_branch(m: Any, x: Tensor) -> Any:
    def full(v: Tensor) -> Tensor:
        with torch.no_grad(), off():
            return v.exp() * 2

    return torch.cond(x.sum() > 0, full, lambda v: v * 1.0, (x,))


GONE = {body.__name__: body for body in (buffer, mean_then_norm, only_writes, nested, with_a_branch, in_a_branch)}


def half(m: Any, x: Tensor) -> Any:
    with on():
        m.state.add_(1)
        return m.line(x).float() + m.state


def full_in_half(m: Any, x: Tensor) -> Any:
    with on():
        y = m.line(x)
        with torch.no_grad(), off():
            y = m.line(y.float())
        return m.line(y).float()


STAYS = {"half": (half, 1), "full in half": (full_in_half, 4)}


def example() -> Tensor:
    return torch.linspace(-1, 2, 16).reshape(4, 4)


def regions(program: Any) -> list[Any]:
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    return [node for graph in graphs for node in graph.nodes if str(node.target).startswith("wrap_with_")]


def of_client(model: nn.Module, folder: Path) -> Any:
    method = export_source(ModelSource.of(model, (example(),)), name="m").methods["forward"]
    assert isinstance(method.pt2, bytes) and not method.differs
    (folder / "model.pt2").write_bytes(method.pt2)
    return torch.export.load(folder / "model.pt2")


def of_archive(model: nn.Module, folder: Path) -> Any:
    torch.export.save(torch.export.export(model, (example(),)), folder / "model.pt2")
    return read_program(str(folder / "model.pt2"))


def must_compute(program: Any, model: nn.Module) -> None:
    """Compare two calls, also in what they leave in the state."""
    module = program.module()
    for _ in range(2):
        expected, actual = model(example()), module(example())
        for one, other in zip(*(each if isinstance(each, tuple) else [each] for each in (expected, actual)), strict=True):
            assert torch.allclose(one, other)


@pytest.mark.parametrize("name", GONE)
def test_regions_that_change_no_operator_are_part_of_the_program(name: str, tmp_path: Path) -> None:
    model = Model(GONE[name]).eval()
    program = of_client(copy.deepcopy(model), tmp_path)
    assert not regions(program)
    must_compute(program, model)


@pytest.mark.parametrize("name", ["buffer", "in_a_branch"])  # torch reads few archives with regions
def test_an_archive_of_torch_is_read_without_regions(name: str, tmp_path: Path) -> None:
    model = Model(GONE[name]).eval()
    program = of_archive(copy.deepcopy(model), tmp_path)
    assert not regions(program)
    must_compute(program, model)
    program.validate()


@pytest.mark.parametrize("name", STAYS)
@pytest.mark.parametrize("exported", [of_client, of_archive])
def test_regions_that_change_operators_stay(exported: Any, name: str, tmp_path: Path) -> None:
    body, count = STAYS[name]
    model = Model(body).eval()
    program = exported(copy.deepcopy(model), tmp_path)
    assert len(regions(program)) == count
    must_compute(program, model)


class Lines(nn.Module):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            y = x.sin()
            with off():
                z = y.cos()
        return z.exp()


def test_operators_of_regions_keep_their_lines(tmp_path: Path) -> None:
    program = of_client(Lines().eval(), tmp_path)
    lines = {str(node.target): str(node.meta["stack_trace"]) for node in program.graph.nodes if node.op == "call_function"}
    assert "y = x.sin()" in lines["aten.sin.default"] and "z = y.cos()" in lines["aten.cos.default"]


def test_the_returned_values_keep_their_names() -> None:
    program = torch.export.export(Model(nested).eval(), (example(),))
    inline_regions(program)
    returned = [node.name for node in program.graph.output_node().args[0]]
    assert [spec.arg.name for spec in program.graph_signature.output_specs] == returned


@pytest.mark.parametrize("body", [buffer, half])
def test_what_a_region_writes_is_reset_between_samples(body: Any) -> None:
    program = torch.export.export(Model(body).eval(), (example(),))
    assert regions(program) and written_buffers(program) == {"state"}
    samples = [[reference.from_torch("x", example())]] * 2
    (first,), (second,) = reference.run(program, samples)
    assert first == second
    assert not program.state_dict["state"].any()
