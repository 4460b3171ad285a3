"""What each module takes of a program: its constants as they are stored add up to the file's, its tensors to the plan's."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from executorch.export import ExportSession  # noqa: E402
from torch import nn  # noqa: E402

from etfarm.server.compile.inspect import footprint, sizes  # noqa: E402
from etfarm.server.compile.lower import build  # noqa: E402
from etfarm.wire import recipes  # noqa: E402
from tests.support.compiling import FOUR_BIT, STATIC  # noqa: E402

NO_HANDLE = 65535
"""What a node of XNNPACK's graph has for a debug handle where it has none."""

ALIGNMENT = 16
"""Constants outside of delegates begin at a multiple of it, so that up to 15 bytes behind each are padding."""


class Block(nn.Module):
    """A convolution with a norm that is folded into it, and a sum of both."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.norm(self.conv(x)))


class Net(nn.Module):
    """Two blocks, a parameter of the model's own, and a linear that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.scale = nn.Parameter(torch.randn(64))
        self.head = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks(x).mean((2,)).flatten(1) * self.scale
        return self.head(self.head(y))


class Counter(nn.Module):
    """Changes a buffer, which the plan has room for."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1.0)
        return self.linear(x) + self.calls


pytestmark = [
    pytest.mark.filterwarnings("ignore:This API and all of its related functionality"),
    pytest.mark.slow(reason="compiles real networks and weighs their constants"),
]

IMAGE = (torch.randn(1, 8, 8, 8),)


class Alike(nn.Module):
    """Linears that only what takes them tells apart, and a norm that nothing can be folded into."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.query = nn.Linear(16, 16)
        self.key = nn.Linear(16, 16, bias=False)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.last = nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        asked = torch.tanh(self.query(x))
        keyed = torch.sigmoid(self.key(x))
        return torch.relu(self.last(self.norm(asked + keyed)))


class CompiledProgram:
    """A compiled program with the footprint of its modules."""

    def __init__(self, recipe: str, modules: Mapping[str, Any], inputs: tuple[Any, ...], folder: Path, **more: Any) -> None:
        import executorch.kernels.quantized  # noqa: F401 - out variants

        written = recipes.from_toml(recipe) if "=" in recipe else recipes.parse(recipe)
        built = build.export_recipe(build.resolved(written), sorted(modules))
        if recipe == "portable":
            modules = {method: torch.export.export(module, inputs) for method, module in modules.items()}
        session = ExportSession(modules, {method: [inputs] for method in modules}, built)
        with footprint.kept_graphs() as graphs:
            session.export()
        self.manager = session.get_executorch_program_manager()
        pte = folder / "model.pte"
        pte.write_bytes(self.manager.buffer)
        self.sizes = sizes.of_program(sizes.read(pte))
        self.graphs = graphs
        self.rows = footprint.of_program(self.manager, graphs)

    def of(self, module: str, method: str = "forward") -> Any:
        (row,) = [row for row in self.rows if (row.module, row.method) == (module, method)]
        return row

    @property
    def constant_bytes(self) -> int:
        return sum(row.constant_bytes for row in self.rows)


def net() -> Any:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CompiledProgram]:
    """Programs by recipe."""
    known: dict[str, CompiledProgram] = {}
    for recipe in ("xnnpack_fp32", STATIC, FOUR_BIT, "portable"):
        known[recipe] = CompiledProgram(recipe, {"forward": net()}, IMAGE, tmp_path_factory.mktemp("compiled"))
    return known


@pytest.mark.parametrize("recipe", ["xnnpack_fp32", STATIC, FOUR_BIT])
def test_xnnpacks_constants_add_up_to_the_programs_constants(compiled: dict[str, CompiledProgram], recipe: str) -> None:
    program = compiled[recipe]
    assert program.graphs
    assert program.sizes.constant_bytes - _padding(program) <= program.constant_bytes <= program.sizes.constant_bytes


def test_undelegated_constants_add_up_to_the_programs_constants(compiled: dict[str, CompiledProgram]) -> None:
    program = compiled["portable"]
    assert not program.graphs
    assert program.sizes.constant_bytes - _padding(program) <= program.constant_bytes <= program.sizes.constant_bytes


def test_a_weight_has_the_size_that_its_recipe_stores_it_in(compiled: dict[str, CompiledProgram]) -> None:
    weight, bias = 64 * 64, 64 * 4
    assert compiled["xnnpack_fp32"].of("head").constant_bytes == 4 * weight + bias
    assert compiled["portable"].of("head").constant_bytes == 4 * weight + bias
    # A scale a channel, and the bias for each of the two calls: its scale is also their inputs'.
    assert compiled[STATIC].of("head").constant_bytes == weight + 64 * 4 + 2 * bias
    groups = compiled[FOUR_BIT].of("head").constant_bytes - weight // 2 - bias
    assert 64 * 2 <= groups <= 64 * 4 * 2  # two of them to a byte, and scales


def test_a_norm_that_is_folded_leaves_its_convolution_a_bias(compiled: dict[str, CompiledProgram]) -> None:
    conv = 8 * 8 * 9 * 4
    assert compiled["xnnpack_fp32"].of("blocks.0.conv").constant_bytes == conv + 8 * 4
    portable = compiled["portable"]
    assert portable.of("blocks.0.conv").constant_bytes == conv
    assert portable.of("blocks.0.norm").constant_bytes >= 8 * 4


def test_a_parameter_of_the_model_itself_is_the_model_s(compiled: dict[str, CompiledProgram]) -> None:
    for recipe in ("xnnpack_fp32", "portable"):
        assert compiled[recipe].of("").constant_bytes >= 64 * 4


def test_modules_have_the_tensors_that_their_operators_write(compiled: dict[str, CompiledProgram]) -> None:
    program = compiled["portable"]
    conv = program.of("blocks.0.conv")
    assert (conv.planned_bytes, conv.planned_tensors) == (8 * 8 * 8 * 4, 1)
    # Only what lives at one time is added: the sum and its relu do, for one operator.
    assert program.of("blocks.0").planned_bytes == 2 * 8 * 8 * 8 * 4
    (planned,) = program.sizes.methods["forward"].planned_bytes
    assert max(row.planned_bytes for row in program.rows) <= planned <= sum(row.planned_bytes for row in program.rows)


def test_inside_a_delegate_nothing_is_planned_and_its_outputs_are_those_of_the_module_that_holds_it(
    compiled: dict[str, CompiledProgram],
) -> None:
    program = compiled["xnnpack_fp32"]
    planned = {row.module: row.planned_tensors for row in program.rows if row.planned_tensors}
    assert planned == {"": 3, "blocks": 1}  # input, mean and output; both blocks are one delegate


def test_an_opaque_backends_tensors_are_counted_from_the_graph(compiled: dict[str, CompiledProgram]) -> None:
    rows = footprint.of_program(compiled["xnnpack_fp32"].manager, {})
    result = {row.module: row.constant_bytes for row in rows}
    assert result["head"] == 64 * 64 * 4 + 64 * 4
    assert result["blocks.0.norm"] == 4 * 8 * 4 - _equal_bytes([net().blocks[0].norm])


def test_methods_that_share_weights_pay_for_them_once(tmp_path: Path) -> None:
    shared = net()
    program = CompiledProgram("xnnpack_fp32", {"decode": shared, "encode": shared}, IMAGE, tmp_path)
    assert program.sizes.constant_bytes - _padding(program) <= program.constant_bytes <= program.sizes.constant_bytes
    by_method: dict[str, int] = defaultdict(int)
    for row in program.rows:
        by_method[row.method] += row.constant_bytes
    assert by_method["decode"] > 0 == by_method["encode"]
    assert program.of("", "encode").planned_tensors >= 1


@pytest.mark.parametrize("quantized", [False, True])
def test_stages_of_their_own_leave_each_module_what_it_takes(tmp_path: Path, quantized: bool) -> None:
    """There linears are decomposed, and XNNPACK's nodes for them have no debug handle."""
    before = ["QUANTIZE"] if quantized else []
    stages = [*before, "TORCH_EXPORT", "TO_EDGE", "TO_BACKEND", "TO_EXECUTORCH"]
    recipe = f'recipe = "{STATIC if quantized else "xnnpack_fp32"}"\nstages = {json.dumps(stages)}\n'
    torch.manual_seed(0)
    program = CompiledProgram(recipe, {"forward": Alike(norm=not quantized).eval()}, (torch.randn(1, 6, 16),), tmp_path)
    taken = {row.module: row.constant_bytes for row in program.rows if row.constant_bytes}
    if quantized:
        # A scale for each channel of a weight, and a bias with one.
        assert (taken["query"], taken["key"], taken["last"]) == (16 * (16 + 3 * 4), 16 * (16 + 4), 32 * (16 + 3 * 4))
    else:
        assert (taken["query"], taken["key"], taken["last"]) == (4 * 16 * 17, 4 * 16 * 16, 4 * 32 * 17)
        assert taken["norm"] >= 2 * 6 * 4
        assert {xnode.debug_handle for graph in program.graphs.values() for xnode in graph.xnodes} >= {NO_HANDLE}
    assert "" not in taken


def test_a_buffer_that_changes_is_planned_and_not_stored(tmp_path: Path) -> None:
    program = CompiledProgram("portable", {"forward": Counter().eval()}, (torch.randn(1, 4),), tmp_path)
    assert program.of("").planned_bytes >= 2 * 4 * 4
    assert program.sizes.constant_bytes - _padding(program) <= program.constant_bytes <= program.sizes.constant_bytes


def _padding(program: CompiledProgram) -> int:
    """At most so much: behind each constant outside of delegates."""
    placeholders = [
        node
        for method in program.manager.methods
        for node in program.manager.exported_program(method).graph.nodes
        if node.op == "placeholder"
    ]
    return (ALIGNMENT - 1) * len(placeholders)


def _equal_bytes(modules: Iterable[Any]) -> int:
    """Bytes of tensors that equal another one before them: ExecuTorch keeps one of them."""
    seen, equal = set(), 0
    for module in modules:
        for value in module.state_dict().values():
            key = (value.dtype, value.numpy().tobytes())
            equal += value.nbytes if key in seen and value.ndim else 0
            seen.add(key)
    return equal
