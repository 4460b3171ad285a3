"""What helps instead of an operator that is not on the list."""

from __future__ import annotations

import re
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


class Product(torch.nn.Module):
    """Writes a product to a new tensor, and one to a buffer, as `out` or as the remedy says."""

    def __init__(self, *, as_out: bool) -> None:
        super().__init__()
        self.as_out = as_out
        self.register_buffer("last", torch.zeros(3, 3))

    def forward(self, x: Any) -> Any:
        if self.as_out:
            t = torch.matmul(x, x, out=torch.empty(3, 3))
            torch.linalg.inv(x, out=self.last)
        else:
            t = torch.matmul(x, x)
            self.last.copy_(torch.linalg.inv(x))
        return t + self.last


def test_a_result_is_to_be_assigned_instead_of_written_as_out(tmp_path: Path) -> None:
    x = torch.rand(3, 3) + 3 * torch.eye(3)
    with torch.no_grad():
        for as_out in (True, False):
            torch.export.save(torch.export.export(Product(as_out=as_out).eval(), (x,)), tmp_path / f"{as_out}.pt2")
    with pytest.raises(
        OperatorNotAllowed,
        match=r"aten::matmul\.out, which.*Write t = torch\.matmul\(\.\.\.\) for torch\.matmul\(\.\.\., out=t\), or t\.",
    ):
        check_target("torch.ops.aten.matmul.out", "here")
    with pytest.raises(OperatorNotAllowed, match=r"t\.copy_\(torch\.linalg\.inv\(\.\.\.\)\) if t is a buffer"):
        screen_pt2(tmp_path / "True.pt2")
    screen_pt2(tmp_path / "False.pt2")
    assert torch.equal(Product(as_out=False)(x), Product(as_out=True)(x))


@pytest.mark.parametrize(
    ("operator", "remedy"),
    [
        ("index_reduce.default", r"Use scatter_add for sums, and .* for maxima\. If it only computes"),
        ("put.default", r"Use x\.flatten\(\)\.scatter\(0, index, values\)"),
        ("quantile.scalar", r"Use torch\.lerp\("),
        ("from_file.default", r"Use other operators\. If it only computes"),
    ],
)
def test_what_computes_the_same_is_said_where_it_is_known(operator: str, remedy: str) -> None:
    with pytest.raises(OperatorNotAllowed) as caught:
        check_target(f"torch.ops.aten.{operator}", "here")
    assert re.match(remedy, caught.value.remedy)


def test_what_is_said_instead_of_put_passes(tmp_path: Path) -> None:
    class Written(torch.nn.Module):
        def forward(self, x: Any, index: Any, values: Any) -> Any:
            return x.flatten().scatter(0, index, values).view(x.shape)

    x, index, values = torch.zeros(2, 3), torch.tensor([0, 4]), torch.ones(2)
    torch.export.save(torch.export.export(Written(), (x, index, values)), tmp_path / "model.pt2")
    screen_pt2(tmp_path / "model.pt2")
