"""What helps where decomposing an operator that is not on the list does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from etfarm.server.compile.screening.errors import OperatorNotAllowed  # noqa: E402
from etfarm.server.compile.screening.expressions import check_target  # noqa: E402
from etfarm.server.compile.screening.screen import screen_pt2  # noqa: E402


class Limited(torch.nn.Module):
    """A table whose rows have a maximum norm, before the export or in each run."""

    def __init__(self, *, before: bool) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, 2, max_norm=None if before else 0.5)
        if before:
            self.table.weight.data = torch.renorm(self.table.weight.data, 2.0, 0, 0.5)

    def forward(self, x: Any) -> Any:
        return self.table(x)


def test_what_helps_instead_of_a_norm_within_the_model() -> None:
    def check(before: bool) -> None:
        program = torch.export.export(Limited(before=before).eval(), (torch.arange(5),))
        for node in program.graph.nodes:
            if node.op == "call_function":
                check_target(f"torch.ops.{node.target}", "here")

    with pytest.raises(OperatorNotAllowed, match=r"Leave out max_norm.*torch\.renorm\(weight\.data, norm_type, 0, max_norm\)"):
        check(before=False)
    check(before=True)
    limited = Limited(before=True).table.weight
    torch.testing.assert_close(limited.norm(dim=1).clamp(max=0.5), limited.norm(dim=1))


def test_an_operator_that_is_not_on_the_list_has_its_line(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(Limited(before=False).eval(), (torch.arange(5),)), tmp_path / "model.pt2")
    line = r"loaded: .*test_operator_remedies\.py:\d+ \(return self\.table\(x\)\) uses the operator aten::embedding_renorm_"
    with pytest.raises(OperatorNotAllowed, match=line):
        screen_pt2(tmp_path / "model.pt2")


def test_lists_of_tensors_are_to_be_looped_over() -> None:
    with pytest.raises(OperatorNotAllowed, match="Write a loop over the tensors"):
        check_target("torch.ops.aten._foreach_add_.List", "here")
