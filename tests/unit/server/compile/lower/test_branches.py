"""Debug handles and lines of operators within branches and loops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("executorch")

from etfarm.server.compile.lower import branches, etrecord
from etfarm.server.compile.program.refused_operators import of_program
from etfarm.server.reports.numerics import edge
from etfarm.server.reports.trace.graph import BadRecord, base_name, read_program, read_record


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
        from torch._higher_order_ops.scan import scan

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
