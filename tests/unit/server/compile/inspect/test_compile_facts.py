"""Facts about programs and graphs: a compiled .pte's values and sizes, and where operators come from in the source."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.refusals import refuses

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from executorch.backends.xnnpack.recipes import XNNPackRecipeType  # noqa: E402
from executorch.devtools.backend_debug import get_delegation_info  # noqa: E402
from executorch.export import ExportRecipe, ExportSession  # noqa: E402
from torch import nn  # noqa: E402

from etfarm.server.compile.inspect import facts, signature, sizes  # noqa: E402
from etfarm.server.compile.program import places  # noqa: E402
from etfarm.server.compile.request import InspectRequest  # noqa: E402
from etfarm.v1 import child_pb2  # noqa: E402
from etfarm.wire.report_keys import project  # noqa: E402
from tests.support import models  # noqa: E402
from tests.support.compiling import plain  # noqa: E402

pytestmark = pytest.mark.slow(reason="exports and compiles real models")


class Block(nn.Module):
    """A convolution, and a sum that XNNPACK does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(self.conv(x), -1)


class Net(nn.Module):
    """Blocks, one of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.shared = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.erf(self.shared(self.shared(x)))


def as_sent(program: Any) -> Any:
    """Return a program after the way of a .pt2."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def lowered(program: Any) -> Any:
    session = ExportSession({"forward": program}, export_recipe=ExportRecipe.get_recipe(XNNPackRecipeType.FP32))
    session.export()
    return session


def test_operators_outside_of_delegates_have_places_under_their_tables_names() -> None:
    session = lowered(as_sent(torch.export.export(Net().eval(), (torch.randn(1, 4, 5),))))
    manager = session.get_edge_program_manager()
    result = places.undelegated(manager)["forward"]
    table = get_delegation_info(manager.exported_program().graph_module).delegation_by_operator
    assert {op: sum(place.count for place in rows) for op, rows in result.items()} == {
        op: row.non_delegated for op, row in table.items() if row.non_delegated and op not in ("getitem", "alloc")
    }
    sums = result["aten_cumsum_default"]
    assert [(place.module, place.count) for place in sums] == [("shared", 2), ("blocks.0", 1), ("blocks.1", 1)]
    source = sums[0].source
    assert source.file.endswith("test_compile_facts.py")
    assert source.code == "return torch.cumsum(self.conv(x), -1)"
    assert [place.HasField("module") for place in result["aten_erf_default"]] == [False], "the model itself"


def test_what_a_quantizer_left_in_fp32_has_places() -> None:
    [row] = places.fp32(as_sent(torch.export.export(Net().eval(), (torch.randn(1, 4, 5),))))
    assert (row.op, row.count) == ("conv1d", 4)
    assert row.places[0].module == "shared.conv"
    assert row.places[0].count == 2
    assert places.fp32(models.quantized()) == []


class WeightOnly(nn.Module):
    """A linear whose weight is int8, as it stands after folding, beside one that is not."""

    codes: torch.Tensor

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        self.register_buffer("codes", torch.ones(4, 4, dtype=torch.int8))
        self.plain = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.ops.quantized_decomposed.dequantize_per_tensor(self.codes, 0.1, 0, -128, 127, torch.int8)
        weight = weight.t().contiguous() if self.turned else weight
        return self.plain(nn.functional.linear(x, weight))


@pytest.mark.parametrize("turned", [False, True])
def test_a_quantized_weight_is_enough_not_to_be_fp32(turned: bool) -> None:
    [row] = places.fp32(as_sent(torch.export.export(WeightOnly(turned).eval(), (torch.randn(2, 4),))))
    assert (row.op, row.count) == ("linear", 1)
    assert row.places[0].module == "plain"


_CODEBOOK = """
import sys
from pathlib import Path
import torch
from etfarm.server.compile.lower import quantize
from etfarm.server.compile.program import loading

program = loading.load(Path(sys.argv[1]), Path(sys.argv[2]))
assert quantize.is_quantized(program)
print(program.module()(torch.ones(1, 16)).shape[1])
"""


def test_a_model_of_codebooks_loads_without_an_import_of_its_operators(tmp_path: Path) -> None:
    from torchao.prototype.quantization.codebook_coreml import codebook_ops  # noqa: F401 - registers the operator

    class Codebook(nn.Module):
        codes: torch.Tensor
        book: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.zeros(8, 16, dtype=torch.uint8))
            self.register_buffer("book", torch.randn(1, 1, 16, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = torch.ops.quant.dequantize_codebook(self.codes.to(torch.int32), self.book, 4, [-1, -1], torch.float32)
            return nn.functional.linear(x, weight)

    program = torch.export.export(Codebook().eval(), (torch.ones(1, 16),))
    assert places.fp32(program) == []
    with (tmp_path / "stored").open("wb") as file:
        torch.export.save(program, file)
    (tmp_path / "loaded").mkdir()
    command = [sys.executable, "-c", _CODEBOOK, str(tmp_path / "stored"), str(tmp_path / "loaded")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "8", done.stderr


_CUSTOM_OPERATORS = """
import sys
from pathlib import Path
import torch
from etfarm.server.compile.program import loading
from etfarm.server.reports.numerics import reference

program = reference.load(Path(sys.argv[1])) if sys.argv[3] == "reference" else loading.load(Path(sys.argv[1]), Path(sys.argv[2]))
print(program.module()(torch.tensor([[1, 2]]), torch.tensor([0])).shape[1])
"""


@pytest.mark.parametrize("reader", ["reference", "compile"])
def test_a_model_of_custom_operators_loads_without_an_import_of_them(tmp_path: Path, reader: str) -> None:
    from tests.support.language_models import VOCABULARY, custom

    with (tmp_path / "stored").open("wb") as file:
        torch.export.save(custom(), file)
    (tmp_path / "loaded").mkdir()
    command = [sys.executable, "-c", _CUSTOM_OPERATORS, str(tmp_path / "stored"), str(tmp_path / "loaded"), reader]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == str(VOCABULARY), done.stderr


def test_at_most_twenty_places_and_the_frequent_ones_first() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(25))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.blocks[24](x)

    [row] = places.fp32(torch.export.export(Many().eval(), (torch.randn(1, 4, 5),)))
    assert row.count == 26
    assert len(row.places) == places.MAX_PLACES
    assert (row.places[0].module, row.places[0].count) == ("blocks.24.conv", 2)


def written(program: Any, path: Path) -> Path:
    with path.open("wb") as file:
        lowered(program).get_executorch_program_manager().write_to_file(file)
    return path


def test_a_compiled_program_reports_its_values_and_sizes(tmp_path: Path) -> None:
    pte = written(models.dict_inputs(), tmp_path / "model.pte")
    result = plain(facts.inspect_pte(InspectRequest(pte, "model"), tmp_path, lambda _: None))
    method = result["facts"]["methods"]["forward"]
    assert [value["kind"] for value in method["inputs"]] == ["tensor", "tensor", "int", "tensor"]
    assert method["inputs"][2]["value"] == 3
    assert [value["kind"] for value in method["outputs"]] == ["tensor", "int"]
    assert set(result["facts"]) == {"methods"}
    assert result["sizes"] == project(sizes.of_program(sizes.read(pte)))
    assert result["sizes"]["methods"]["forward"]["planned_bytes"] == method["planned_bytes"]
    parts = [result["sizes"][part] for part in ("program_bytes", "constant_bytes", "delegate_bytes")]
    assert 0 < sum(parts) <= pte.stat().st_size
    assert (result["program"], result["etrecord"], result["stages"], result["checks"]) == (None, None, [], [])


def test_the_whole_contract_is_answered(tmp_path: Path) -> None:
    pte = written(models.elementwise(), tmp_path / "model.pte")
    answer = facts.inspect_pte(InspectRequest(pte, "model"), tmp_path, lambda _: None)
    result = child_pb2.CompileResult.FromString(answer)
    assert [field.name for field, _ in result.ListFields()] == ["compilation"]
    assert {field.name for field, _ in result.compilation.ListFields()} == {"facts", "sizes", "toolchain"}


def test_a_method_takes_its_names_and_ranges_from_the_exported_program(tmp_path: Path) -> None:
    program = models.dynamic()
    result = facts.of_program(sizes.read(written(program, tmp_path / "model.pte")).program)
    value = result.methods["forward"].inputs[0]
    assert [(dim.min, dim.max) for dim in value.dims] == [(0, 8), (0, 16)]
    assert signature.add_exported(result.methods["forward"], signature.of_exported(program)) == []
    assert (value.name, [(dim.min, dim.max) for dim in value.dims]) == ("x", [(1, 8), (16, 16)])


def test_a_dim_that_lowering_fixes_is_named(tmp_path: Path) -> None:
    result = facts.of_program(sizes.read(written(models.dynamic(), tmp_path / "model.pte")).program)
    exact = signature.of_exported(models.dynamic())
    exact.inputs[0].dims[0].max, exact.inputs[0].dims[1].min = 9, 2
    lost = signature.add_exported(result.methods["forward"], exact)
    assert lost == ["dim 0 of 'x' (1..9, at most 8 on the device)"]


def test_what_is_no_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pte").write_bytes(b"no program at all")
    with refuses("NOT_A_PTE"):
        facts.inspect_pte(InspectRequest(tmp_path / "model.pte", "model"), tmp_path, lambda _: None)


@pytest.mark.remedy("UNSUPPORTED_PROGRAM")
def test_a_description_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    pte = written(models.elementwise(), tmp_path / "model.pte")
    data = bytearray(pte.read_bytes())
    data[32:400] = b"\xff" * 368  # behind the header
    pte.write_bytes(data)
    with refuses("UNSUPPORTED_PROGRAM") as caught:
        sizes.read(pte)
    assert caught.value.remedy
    assert sizes.read(written(models.elementwise(), tmp_path / "again.pte"))


@pytest.mark.parametrize("where", ["a segment", "a value"])
def test_a_description_that_contradicts_itself_is_a_users_error(tmp_path: Path, where: str) -> None:
    pte = written(torch.export.export(Net().eval(), (torch.randn(1, 4, 5),)), tmp_path / "model.pte")
    described = sizes.read(pte)
    assert facts.describe(described)[0].methods["forward"].backends == ["XnnpackBackend"]
    plan = described.program.execution_plan[0]
    if where == "a segment":
        plan.delegates[0] = replace(plan.delegates[0], index=99)
    else:
        plan.inputs[0] = 9999
    with refuses("UNSUPPORTED_PROGRAM", match="contradicts itself"):
        facts.describe(described)
