"""What is said of whole .pt2 archives that this torch does not read."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from torch._export.serde.schema import SCHEMA_VERSION  # noqa: E402

from etfarm.server.compile.program import loading  # noqa: E402
from etfarm.wire.errors import EtfarmError  # noqa: E402
from tests.support import models  # noqa: E402
from tests.support.compiling import lowered_here, run  # noqa: E402
from tests.support.refusals import refuses  # noqa: E402

OURS = torch.__version__.partition("+")[0]
NEXT = {"major": SCHEMA_VERSION[0] + 1, "minor": 0}


def refused(folder: Path, **fields: Any) -> EtfarmError:
    """Return the error that refuses a program with changed JSON fields; fields that are None are removed."""
    saved, changed = folder / "saved.pt2", folder / "changed"
    torch.export.save(models.elementwise(), saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(changed, "w") as new:
        for member in old.infolist():
            data = old.read(member)
            if member.filename.endswith("models/model.json"):
                program = json.loads(data) | fields
                data = json.dumps({key: value for key, value in program.items() if value is not None}).encode()
            new.writestr(member, data)
    (folder / "loaded").mkdir()
    with pytest.raises(EtfarmError) as caught:
        loading.load(changed, folder / "loaded")
    return caught.value


OF_ANOTHER_LIBRARY = """
import dataclasses, sys, torch

@dataclasses.dataclass
class Box:
    value: torch.Tensor

class Net(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return self.kind(x + 1)

torch.export.register_dataclass(Box, serialized_type_name="boxes.Box")
for name, kind in (("box", Box), ("tuple", lambda x: (x,))):
    torch.export.save(torch.export.export(Net(kind).eval(), (torch.ones(2),)), f"{sys.argv[1]}/{name}.pt2")
"""


@pytest.mark.remedy("UNKNOWN_STRUCTURE")
def test_a_class_of_another_library_is_refused_and_a_tuple_in_its_place_is_not(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", OF_ANOTHER_LIBRARY, str(tmp_path)], check=True, timeout=120)
    for name in ("refused", "loaded"):
        (tmp_path / name).mkdir()
    with refuses("UNKNOWN_STRUCTURE", match=r"boxes\.Box"):
        loading.load(tmp_path / "box.pt2", tmp_path / "refused")
    assert loading.load(tmp_path / "tuple.pt2", tmp_path / "loaded")


@pytest.mark.remedy("PT2_OF_ANOTHER_TORCH")
def test_a_newer_torchs_file_is_refused_with_its_version(tmp_path: Path) -> None:
    error = refused(tmp_path, torch_version="3.1.0+cu140", schema_version=NEXT)
    assert error.reason == "PT2_OF_ANOTHER_TORCH"
    assert error.message == (
        f"The .pt2 was written by torch 3.1.0+cu140, and this farm's torch {OURS} cannot read it: its schema is version "
        f"{NEXT['major']}, not {SCHEMA_VERSION[0]}."
    )
    assert error.remedy == f"Export it with torch {OURS}."
    (tmp_path / "again").mkdir()
    assert loading.load(tmp_path / "saved.pt2", tmp_path / "again"), "this torch wrote it"


def test_the_same_schema_of_another_torch_has_torchs_own_words(tmp_path: Path) -> None:
    error = refused(tmp_path, torch_version="2.14.0a0+git1a2b3c", graph_module={})
    assert error.reason == "PT2_OF_ANOTHER_TORCH"
    assert "written by torch 2.14.0a0+git1a2b3c" in error.message


@pytest.mark.parametrize(
    "expected",
    [None, "", "3.1.0\n; rm -rf /", "\x1b[2J", "9" * 5000, "1." + "0" * 5000, 3, {"a": []}, ["3.1.0"]],
    ids=["none", "empty", "two_lines", "control", "long", "long_part", "number", "object", "list"],
)
def test_what_is_no_version_is_not_repeated(tmp_path: Path, expected: object) -> None:
    error = refused(tmp_path, torch_version=expected, schema_version=NEXT)
    assert error.reason == "PT2_OF_ANOTHER_TORCH"
    assert "was written by another torch, and" in error.message


@pytest.mark.parametrize("schema", [{"major": 10**4000, "minor": 0}, {"major": "9", "minor": 0}, {"major": None}])
def test_a_broken_program_of_this_torch_is_no_pt2(tmp_path: Path, schema: dict[str, Any]) -> None:
    error = refused(tmp_path, schema_version=schema)
    assert error.reason == "NOT_A_PT2"
    assert len(error.message) < 1000


class Region(torch.nn.Module):
    """Has a region without gradients, which returns something or nothing."""

    def __init__(self, *, returns: bool) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))
        self.returns = returns

    def forward(self, x: torch.Tensor) -> Any:
        y = x.sin()
        with torch.no_grad():
            z = y * 2 + x if self.returns else self.count.add_(1)
        return y + (z if self.returns else x)


def load_region(folder: Path, model: Region, change: Any = lambda node: None, *, gradients: bool = True) -> Any:
    """Return a program that is loaded with the node of its region changed."""
    with torch.set_grad_enabled(gradients):
        torch.export.save(torch.export.export(model.eval(), (torch.rand(4, 4),)), folder / "saved.pt2")
    with zipfile.ZipFile(folder / "saved.pt2") as old, zipfile.ZipFile(folder / "changed", "w") as new:
        for member in old.infolist():
            data = old.read(member)
            if member.filename.endswith("models/model.json"):
                program = json.loads(data)
                nodes = program["graph_module"]["graph"]["nodes"]
                for node in nodes:
                    if "wrap_with_set_grad_enabled" in node["target"]:
                        change(node)
                data = json.dumps(program).encode()
            new.writestr(member, data)
    (folder / "loaded").mkdir()
    return loading.load(folder / "changed", folder / "loaded")


def return_nothing(node: Any) -> None:
    (graph,) = (each["arg"]["as_graph"]["graph"] for each in node["inputs"] if "as_graph" in each["arg"])
    graph["outputs"] = []


@pytest.mark.parametrize("change", [
    lambda node: node["inputs"].pop(), lambda node: node.update(inputs=node["inputs"][:1]), return_nothing,
])  # fmt: skip
def test_a_region_that_does_not_fit_its_graph_is_named(change: Any, tmp_path: Path) -> None:
    with pytest.raises(EtfarmError, match="does not fit the graph that it calls") as caught:
        load_region(tmp_path, Region(returns=True), change)
    assert caught.value.reason == "NOT_A_PT2"


def test_a_region_that_returns_nothing_has_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(EtfarmError, match="that returns nothing") as caught:
        load_region(tmp_path, Region(returns=False))
    assert caught.value.remedy.startswith("Export it within torch.no_grad()")
    (tmp_path / "again").mkdir()
    assert load_region(tmp_path / "again", Region(returns=False), gradients=False)


class Divided(torch.nn.Module):
    def __init__(self, factor: Any) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor(x.shape[0])


@pytest.mark.filterwarnings("ignore:This API and all of its related functionality")
@pytest.mark.numeric
@pytest.mark.parametrize("factor", [lambda n: 1.0 / n, lambda n: (n - 1) / n, lambda n: max(n, 5) / n, lambda n: 7 % n])
def test_numbers_that_are_divided_by_a_size_are_loaded(factor: Any, tmp_path: Path) -> None:
    model, dims = Divided(factor), {"x": {0: torch.export.Dim("n", min=2, max=9)}}
    torch.export.save(torch.export.export(model, (torch.rand(6, 4),), dynamic_shapes=dims), tmp_path / "saved.pt2")
    (tmp_path / "loaded").mkdir()
    pte = lowered_here(loading.load(tmp_path / "saved.pt2", tmp_path / "loaded"), "portable")
    for size in (2, 6, 9):
        x = torch.rand(size, 4)
        torch.testing.assert_close(run(pte, [x])[0], model(x))


@pytest.mark.parametrize(("factor", "remedy", "mended"), [
    (lambda n: 2**n, "2 ** torch.tensor(n) for 2 ** n", lambda n: 2 ** torch.tensor(n)),
    (lambda n: n**-0.5, "torch.tensor(n) ** -0.5 for n ** -0.5", lambda n: torch.tensor(n) ** -0.5),
    (lambda n: torch.sym_ite(n > 5, 2, 3), "torch.where(torch.tensor(n) > 5, 2, 3) for torch.sym_ite(n > 5, 2, 3)",
     lambda n: torch.where(torch.tensor(n) > 5, 2, 3)),
    (lambda n: n & 3, "n % 4 for n & 3", lambda n: n % 4),
    (lambda n: n | 3, "n // 4 * 4 + 3 for n | 3", lambda n: n // 4 * 4 + 3),
    (lambda n: n % 2.3, "torch.tensor(n) % 2.5 for n % 2.5", lambda n: torch.tensor(n) % 2.3),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:This API and all of its related functionality")
@pytest.mark.numeric
def test_functions_of_sizes_that_programs_lack_have_a_remedy(factor: Any, remedy: str, mended: Any, tmp_path: Path) -> None:
    def loaded(of_size: Any) -> Any:
        dims = {"x": {0: torch.export.Dim("n", min=2, max=9)}}
        torch.export.save(torch.export.export(Divided(of_size), (torch.rand(6, 4),), dynamic_shapes=dims), tmp_path / "saved.pt2")
        (tmp_path / "loaded").mkdir(exist_ok=True)
        program = loading.load(tmp_path / "saved.pt2", tmp_path / "loaded")
        loading.check(program, "forward")
        return program

    with pytest.raises(EtfarmError) as caught:
        loaded(factor)
    assert remedy in caught.value.remedy
    pte = lowered_here(loaded(mended), "portable")
    for size in (2, 6, 9):
        x = torch.rand(size, 4)
        torch.testing.assert_close(run(pte, [x])[0], Divided(factor)(x))


class Branches(torch.nn.Module):
    def __init__(self, branch: Any) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, self.branch, lambda v: v * 2, [x])


def test_training_mode_within_a_branch_is_named_with_its_line() -> None:
    program = torch.export.export(Branches(lambda v: torch.dropout(v, 0.5, train=True)).eval(), (torch.ones(2),))
    with pytest.raises(EtfarmError) as caught:
        loading.check(program, "forward")
    assert caught.value.reason == "TRAINING_MODE" and "test_loading.py:" in str(caught.value)
    loading.check(torch.export.export(Branches(lambda v: torch.dropout(v, 0.5, train=False)).eval(), (torch.ones(2),)), "forward")
