"""Debug handles and lines of operators within branches and loops, and the outputs of these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.experimental.control_flow import map as mapped
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

pytest.importorskip("executorch")

from etfarm.server.compile.lower import branches, etrecord
from etfarm.server.compile.program.refused_operators import of_program
from etfarm.server.reports.numerics import edge
from etfarm.server.reports.trace.graph import BadRecord, base_name, read_program, read_record
from tests.support.compiling import lowered_here, run


class Nested(nn.Module):
    """Branches in a row, one of which has branches itself."""

    def forward(self, x: Tensor) -> Tensor:
        positive = x.sum() > 0

        def inner(v: Tensor) -> Tensor:
            return torch.cond(v.sum() > 5, lambda w: w.sin(), lambda w: w.cos(), [v])

        first = torch.cond(positive, inner, lambda v: v.tanh(), [x])
        return torch.cond(positive, lambda v: v.exp(), lambda v: v.sigmoid(), [first])


class Scanned(nn.Module):
    """A loop over the rows of a tensor."""

    def forward(self, carry: Tensor, xs: Tensor) -> Any:
        def step(total: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            following = total.sin() + x
            return following, following.clone()

        return scan(step, carry, xs)


@pytest.mark.parametrize(
    ("module", "inputs", "inside"),
    [
        (Nested(), (torch.ones(2, 3),), {"sin", "cos", "tanh", "exp", "sigmoid"}),
        (Scanned(), (torch.zeros(3), torch.ones(4, 3)), {"sin", "add"}),
    ],
)
def test_kernels_of_branches_have_the_line_of_their_operator(
    module: nn.Module, inputs: tuple[Tensor, ...], inside: set[str], tmp_path: Path
) -> None:
    from executorch.exir import to_edge_transform_and_lower

    program = torch.export.export(module, inputs)
    with branches.kept_handles():
        manager = to_edge_transform_and_lower(program, generate_etrecord=True).to_executorch()
    (tmp_path / "model.pte").write_bytes(manager.buffer)
    etrecord.save(manager.get_etrecord(), {"forward": program}, {}, tmp_path / "model.etrecord")
    record = read_record(tmp_path / "model.etrecord", "forward")
    located = of_program(manager)["forward"]
    sources = {}
    for (_, at), instruction in read_program(tmp_path / "model.pte", "forward").items():
        origin = record.origin(record.handles.get(at, ()), kernel=instruction.name)
        if instruction.name.startswith("aten.") and base_name(instruction.name) in inside:
            assert origin.source is not None, json.dumps([at, instruction.name])
            assert base_name(origin.op_types[0]) == base_name(instruction.name)
            place = located.by_instruction[at]
            assert place.startswith(f"aten::{base_name(instruction.name)} at ") and "test_branches.py" in place
            sources[base_name(instruction.name)] = origin.source
    assert sources.keys() == inside
    assert all(source.file.endswith("test_branches.py") for source in sources.values())


def test_a_graph_that_cannot_be_serialized_has_lines_and_no_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from executorch.exir import to_edge_transform_and_lower

    serialize = etrecord.serialize

    def serialize_exported(program: Any) -> Any:
        if program.dialect == "EDGE":
            raise ValueError("unknown operator")
        return serialize(program)

    program = torch.export.export(Nested(), (torch.ones(2, 3),))
    manager = to_edge_transform_and_lower(program, generate_etrecord=True).to_executorch()
    monkeypatch.setattr(etrecord, "serialize", serialize_exported)
    etrecord.save(manager.get_etrecord(), {"forward": program}, {}, tmp_path / "model.etrecord")
    read_record(tmp_path / "model.etrecord", "forward")
    with pytest.raises(BadRecord, match="only the lines of 'forward'"):
        edge.read(tmp_path / "model.etrecord", "forward")


class Rows(nn.Module):
    """Branches in a row, whose outputs are all used at the end; the second has branches itself."""

    def forward(self, x: Tensor, p: Tensor) -> Any:
        def inner(v: Tensor) -> Tensor:
            return torch.cond(v.sum() > 3, lambda w: w * 3, lambda w: w * 5, [v]) - torch.cond(
                v.sum() > 6, lambda w: w * 7, lambda w: w * 11, [v]
            )

        first = torch.cond(p.sum() > 0, lambda v: v * 2, lambda v: v - 1, [x])
        second = torch.cond(p.sum() > 1, inner, lambda v: v + 10, [first])
        return {"first": first, "second": second, "product": first * second}


class State(nn.Module):
    """Keeps the output of a branch in a buffer, after another branch."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4))

    def forward(self, x: Tensor, p: Tensor) -> Tensor:
        update = torch.cond(p.sum() > 0, lambda v: v * 2, lambda v: v - 1, [x])
        gain = torch.cond(p.sum() > 1, lambda v: v + 5, lambda v: v / 2, [x])
        self.cache.copy_(self.cache + update)
        return gain + self.cache


class View(nn.Module):
    """Reshapes the output of a branch."""

    def forward(self, x: Tensor, p: Tensor) -> Tensor:
        return torch.cond(p.sum() > 0, lambda v: v * 2, lambda v: v - 1, [x]).reshape(2, 2) + 1


class ViewOfLoops(nn.Module):
    """Reshapes the outputs of loops, after a branch whose output is used later."""

    def forward(self, x: Tensor, p: Tensor) -> Any:
        scale = torch.cond(p.sum() > 0, lambda v: v * 2, lambda v: v - 1, [x])
        last, steps = scan(lambda total, v: (total * 0.5 + v, total + v), x.sum() * 0, x)
        return mapped(lambda v: v * 3 + 1, x).reshape(2, 2), steps.reshape(2, 2) + last, scale


class Single(nn.Module):
    """One branch, whose output no other branch can overwrite."""

    def forward(self, x: Tensor, p: Tensor) -> Tensor:
        return torch.cond(p.sum() > 0, lambda v: v * 2, lambda v: v - 1, [x]) + 1


class ViewsInLoops(nn.Module):
    """Reshapes what is constant, computed, kept in a buffer and carried on in the bodies of loops, and slices of the input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(2, 2))
        self.register_buffer("state", torch.ones(2, 2))

    def forward(self, x: Tensor, p: Tensor) -> Any:
        self.state.mul_(2)
        state, scaled = self.state, self.weight * p
        rows = torch.stack([x, x + 1, x * 2])

        def mapping(row: Tensor) -> Tensor:
            return row.reshape(2, 2).sin() + (self.weight.reshape(4) * scaled.reshape(4) + state.reshape(4)).sum()

        def step(total: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            return total + row, total.reshape(2, 2) * row.reshape(2, 2) + scaled.reshape(1, 4).sum() + self.weight.reshape(4)[0]

        return mapped(mapping, rows), *scan(step, torch.zeros(4), rows)


@pytest.mark.slow(reason="each compiles branches")
@pytest.mark.numeric
@pytest.mark.filterwarnings("ignore:This API and all of its related functionality")
@pytest.mark.parametrize("delegated", [False, True])
def test_views_of_the_arguments_of_a_loop_are_the_models(delegated: bool) -> None:
    module, inputs = ViewsInLoops().eval(), (torch.randn(4), torch.randn(1))
    pte = lowered_here(torch.export.export(module, inputs), "xnnpack_fp32" if delegated else "portable")
    for got, want in zip(run(pte, inputs), module(*inputs), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.slow(reason="each compiles branches")
@pytest.mark.numeric
@pytest.mark.parametrize("delegated", [False, True])
@pytest.mark.parametrize("kind", [Rows, State, View, ViewOfLoops, Single])
def test_each_output_of_a_branch_is_the_models(kind: type[nn.Module], delegated: bool) -> None:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    x = torch.arange(4.0)
    inputs = [(x, torch.tensor([value])) for value in (1.0, -1.0, 2.0)] + [(-x, torch.tensor([1.0]))]
    program = torch.export.export(kind(), inputs[0])
    edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()] if delegated else None)
    copied = branches.copy_outputs(edge.exported_program())
    assert bool(copied) is (kind is not Single) or (delegated and kind is View)
    lowered = edge.to_executorch()
    pte = lowered.buffer  # which the runtime does not copy
    method = Runtime.get().load_program(pte).load_method("forward")
    assert method is not None
    eager = kind()
    for args in inputs:
        expected = torch.utils._pytree.tree_leaves(eager(*args))
        for got, want in zip(method.execute([each.clone() for each in args]), expected, strict=True):
            torch.testing.assert_close(got, want)
