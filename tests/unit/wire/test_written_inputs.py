"""The inputs that exported programs write to, and their copies on the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from etfarm.client.export import ModelSource, export_source
from etfarm.client.export.mutation import keep_mutations
from etfarm.server.compile.program.input_copies import copy_written_inputs, describe_copies
from etfarm.server.compile.program.values import output_names
from etfarm.wire.pt2 import read_archive
from etfarm.wire.written_inputs import written_inputs


class Runs(nn.Module):
    def __init__(self, forward: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.run = forward
        self.register_buffer("state", torch.zeros(2, 3))
        self.dropout = nn.Dropout()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.run(self, x, y)


def part_of_a_view(module: Runs, x: Tensor, y: Tensor) -> Any:
    x.view(-1)[1:3].mul_(2)
    return x + y


def after_a_dropout(module: Runs, x: Tensor, y: Tensor) -> Any:
    return torch.relu_(module.dropout(x)) + y


def without_gradients(module: Runs, x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        y.add_(1)
    return x * y


def both(module: Runs, x: Tensor, y: Tensor) -> Any:
    x.add_(1)
    y[0] = 9
    return {"x": x * 2, "sum": x + y}


def only_intermediates(module: Runs, x: Tensor, y: Tensor) -> Any:
    (x + 1).add_(y).relu_()
    module.state.add_(x)
    return module.state + x.clone().mul_(2)


def converted(module: Runs, x: Tensor, y: Tensor) -> Any:
    return x.double().mul_(2), y.type_as(x.double()).add_(1), y.float() + y.type_as(x)


def not_converted(module: Runs, x: Tensor, y: Tensor) -> Any:
    x.float().add_(1)
    return y.float().add_(1) + x


def converted_to_a_copy(module: Runs, x: Tensor, y: Tensor) -> Any:
    return x.to(torch.float32, copy=True).mul_(2), y.to(x, copy=True).add_(1), x + y


def itself(module: Runs, x: Tensor, y: Tensor) -> Any:
    return x.mul_(3), y


CASES = [
    (part_of_a_view, ["x"]), (after_a_dropout, ["x"]), (without_gradients, ["y"]), (both, ["x", "y"]),
    (only_intermediates, []), (itself, ["x"]), (converted, []), (not_converted, ["x", "y"]),
    (converted_to_a_copy, []),
]  # fmt: skip


def inputs() -> tuple[Tensor, Tensor]:
    return torch.arange(-3.0, 3.0).reshape(2, 3), torch.ones(2, 3)


def expected_names(run: Any, written: list[str], functional: bool) -> list[str]:
    """Return the written inputs; torch's decomposition of a dropout in evaluation copies, unlike the operator itself."""
    return [] if functional and run is after_a_dropout else written


def exported(run: Any, *, functional: bool = False) -> Any:
    program = torch.export.export(Runs(run).eval(), inputs())
    return program.run_decompositions({}) if functional else program


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize(("run", "written"), CASES)
def test_a_program_works_on_copies_of_what_it_writes_to(run: Any, written: list[str], functional: bool) -> None:
    program, written = exported(run, functional=functional), expected_names(run, written, functional)
    assert list(written_inputs(program)) == written
    names = output_names(program)
    copied = copy_written_inputs(program)
    assert copied == dict.fromkeys(written, 0 if functional else 24)  # a functional program needs no copies
    assert not written or ("neither changes" if functional else "(24 bytes)") in describe_copies("forward", copied)
    assert not written_inputs(program) and output_names(program) == names
    mine, original = inputs(), inputs()
    result = pytree.tree_leaves(program.module()(*mine))
    assert all(torch.equal(a, b) for a, b in zip(mine, original, strict=True)), "the inputs stay as they are"
    expected = pytree.tree_leaves(Runs(run).eval()(*original))
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    assert not program.run_decompositions({}).graph_signature.user_inputs_to_mutate


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize(("run", "written"), CASES)
def test_kept_mutations_are_outputs_with_the_names_of_the_inputs(run: Any, written: list[str], functional: bool) -> None:
    program, written = exported(run, functional=functional), expected_names(run, written, functional)
    names = output_names(program)
    assert keep_mutations(program) == tuple(written)
    clashing = set(names) & set(written)
    assert len(output_names(program)) == len(names) + len(written)
    assert clashing or output_names(program) == [*names, *written]
    copy_written_inputs(program)
    result = pytree.tree_leaves(program.module()(*inputs()))
    original = inputs()
    expected = [*pytree.tree_leaves(Runs(run).eval()(*original)), *(original["xy".index(name)] for name in written)]
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def test_a_source_keeps_mutations_on_request() -> None:
    source = ModelSource.of(Runs(part_of_a_view).eval(), inputs(), keep_mutations=True)
    method = export_source(source, name="m").methods["forward"]
    assert method.output_names == read_archive(method.pt2).output_names == ("0", "x")
