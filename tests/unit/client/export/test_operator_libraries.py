"""Operators of the user's own libraries: those that torch can write with others are, and everything else stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from etfarm.client.export import ModelSource, export_source
from etfarm.server.compile.screening import screen
from tests.support.exports import read_program
from tests.support.refusals import refuses


@pytest.fixture(scope="module")
def library() -> Iterator[Any]:
    """Operators with a composite kernel, of which one calls another, and one without."""
    acme = torch.library.Library("acme", "DEF")
    kernels: dict[str, Callable[[Tensor], Tensor]] = {
        "twice": lambda x: x * 2,
        "mixed": lambda x: torch.ops.acme.twice(x) + F.linear(x, torch.ones(x.shape[-1], x.shape[-1])),
        "shifted": lambda x: x + torch.tensor(2.0),
        "moved": lambda x: x + torch.full((), 2.0),
    }
    for name, kernel in kernels.items():
        acme.define(f"{name}(Tensor x) -> Tensor")
        acme.impl(name, kernel, "CompositeImplicitAutograd")
    acme.define("opaque(Tensor x) -> Tensor")
    acme.impl("opaque", lambda x: x * 2, "CPU")
    acme.impl("opaque", torch.empty_like, "Meta")
    yield torch.ops.acme
    acme._destroy()


class Network(nn.Module):
    """A convolution with a batch norm and a linear layer, and then a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(8, 5)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(self.norm(self.conv(x)))
        return F.scaled_dot_product_attention(y, y, y) + self.function(y)


def exported(function: Callable[[Tensor], Tensor]) -> bytes:
    source = ModelSource.of(
        Network(function).eval(), (torch.rand(2, 3, 8, 8),), dynamic_shapes={"x": {0: Dim("n", min=2, max=6)}}
    )
    pt2 = export_source(source, name="m").methods["forward"].pt2
    assert isinstance(pt2, bytes)
    return pt2


def loaded(pt2: bytes) -> torch.export.ExportedProgram:
    return read_program(pt2)


def targets(program: torch.export.ExportedProgram) -> list[str]:
    parts = [part for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    return [str(node.target) for part in parts for node in part.graph.nodes if node.op == "call_function"]


def screened(pt2: bytes, folder: Path) -> None:
    (folder / "m.pt2").write_bytes(pt2)
    screen.screen_pt2(folder / "m.pt2")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.ops.acme.twice(x),
        lambda x: torch.ops.acme.mixed(x),
        lambda x: torch.cond(x.sum() > 0, lambda v: torch.ops.acme.twice(v), lambda v: v + 1, (x,)),
    ],
)
def test_composite_operators_are_written_with_others_and_layers_stay_whole(
    library: Any, tmp_path: Path, function: Callable[[Tensor], Tensor]
) -> None:
    pt2 = exported(function)
    screened(pt2, tmp_path)
    program = loaded(pt2)
    names = targets(program)
    assert not any("acme" in name for name in names)
    layers = {
        "aten.conv2d.default",
        "aten.batch_norm.default",
        "aten.linear.default",
        "aten.scaled_dot_product_attention.default",
    }
    assert layers <= set(names)
    called, module = program.module(), Network(function).eval()
    for count in (2, 5):
        x = torch.rand(count, 3, 8, 8)
        torch.testing.assert_close(called(x), module(x))


def test_a_program_without_such_operators_is_not_touched() -> None:
    names = targets(loaded(exported(lambda x: F.layer_norm(x, x.shape[-1:]).add_(1))))
    assert {"aten.layer_norm.default", "aten.add_.Tensor"} <= set(names)


@pytest.mark.remedy("UNKNOWN_OPERATOR")
def test_the_remedy_for_an_operator_without_a_composite_kernel_works_for_modules_and_programs(
    library: Any, tmp_path: Path
) -> None:
    with refuses("UNKNOWN_OPERATOR", match="acme::opaque") as caught:
        screened(exported(library.opaque), tmp_path)
    assert 'lib.impl(name, function, "CompositeImplicitAutograd")' in caught.value.remedy
    assert "as program.run_decompositions() does with a program" in caught.value.remedy
    screened(exported(library.twice), tmp_path)
    module = Network(library.twice).eval()
    torch.export.save(torch.export.export(module, (torch.rand(2, 3, 8, 8),)).run_decompositions(), tmp_path / "program.pt2")
    screen.screen_pt2(tmp_path / "program.pt2")


def test_tensors_of_numbers_in_an_operator_have_a_remedy(library: Any, tmp_path: Path) -> None:
    with refuses("EXPORT_FAILED") as caught:
        exported(library.shifted)
    assert "write torch.full((), 2.0) for torch.tensor(2.0)" in caught.value.remedy
    screened(exported(library.moved), tmp_path)


def test_an_operator_that_a_plugin_allows_stays_whole(library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "acme_ops-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-ops\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[etfarm.operators]\nacme.twice.default = acme_ops\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "acme.twice.default" in targets(loaded(exported(library.twice)))
