"""Numbers in the runtime's messages and the operators that they stand for, on really lowered programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from torch import nn  # noqa: E402

from etfarm.server.compile.errors import program_cannot_run  # noqa: E402
from etfarm.server.compile.lower import build, lowering  # noqa: E402
from etfarm.server.compile.program import places  # noqa: E402
from etfarm.server.compile.program.refused_operators import of_program  # noqa: E402
from etfarm.server.compile.verify.smoke import explain  # noqa: E402
from etfarm.server.reports.trace import xnnpack  # noqa: E402
from etfarm.server.workers.pool import Workers  # noqa: E402
from etfarm.v1.compile_pb2 import Compilation, LocatedOperators  # noqa: E402
from etfarm.wire import recipes  # noqa: E402
from etfarm.wire.errors import EtfarmError, Fault, error_of  # noqa: E402
from etfarm.wire.located_failures import find_operator, locate  # noqa: E402
from tests.support import models  # noqa: E402
from tests.support.compiling import compiled  # noqa: E402

pytestmark = [
    pytest.mark.slow(reason="lowers a program"),
    pytest.mark.filterwarnings("ignore:This API and all of its related functionality"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        z = torch.sigmoid(y).mean((2, 3))
        ranks = z.argsort(1)
        return self.head(z) + ranks.sum()


@pytest.fixture(scope="module")
def lowered() -> Any:
    torch.manual_seed(0)
    programs = {"forward": torch.export.export(Net().eval(), (torch.randn(1, 3, 8, 8),))}
    recipe = build.export_recipe(recipes.parse("xnnpack_fp32"), ["forward"])
    pipeline = lowering.Pipeline(("TO_EDGE_TRANSFORM_AND_LOWER", "TO_EXECUTORCH"))
    return lowering.lower(
        programs, recipe, pipeline, "net", lowering.Stages(lambda event: None, programs, Compilation()), places.undelegated
    ).manager


@pytest.fixture(scope="module")
def located(lowered: Any) -> LocatedOperators:
    return of_program(lowered)["forward"]


def test_each_node_of_xnnpacks_graph_maps_to_its_operator(lowered: Any, located: LocatedOperators) -> None:
    kinds = {}
    for delegate in lowered.executorch_program.backend_delegate_data:
        for node in xnnpack.read(delegate.data).nodes:
            if node.debug_handle is not None:
                kinds[node.kind] = node.debug_handle
    lines = {
        "Conv2d": "y = self.conv(x)",
        "Sigmoid": "z = torch.sigmoid(y).mean((2, 3))",
        "FullyConnected": "return self.head(z)",
    }
    assert lines.keys() <= kinds.keys()
    for kind, line in lines.items():
        log = f"[XNNCompiler.cpp:812] Failed to create {kind} node {kinds[kind]} with code: xnn_status_invalid_parameter"
        assert line in find_operator(log, located), kind
        assert "test_refused_operators.py" in find_operator(log, located)


def test_an_instruction_maps_to_its_operator(lowered: Any, located: LocatedOperators) -> None:
    plan = lowered.executorch_program.execution_plan[0]
    names = {index: operator.name for index, operator in enumerate(plan.operators)}
    seen = {}
    for index, instruction in enumerate(plan.chains[0].instructions):
        if (number := getattr(instruction.instr_args, "op_index", None)) is not None:
            seen[names[number]] = find_operator(f"KernelCall failed at instruction 0:{index} in operator x.out: 0x12\n", located)
    assert "aten::sort" in seen and "ranks = z.argsort(1)" in seen["aten::sort"], seen
    delegates = [
        index
        for index, instruction in enumerate(plan.chains[0].instructions)
        if hasattr(instruction.instr_args, "delegate_index")
    ]
    first = find_operator(f"CALL_DELEGATE execute failed at instruction {delegates[0]}: 0x1\n", located)
    assert first.startswith("XnnpackBackend from aten::") and "y = self.conv(x)" in first
    assert all(description.startswith(name.rpartition(".")[0] or name) for name, description in seen.items()), seen


def test_a_log_without_a_number_names_no_operator(located: LocatedOperators) -> None:
    assert find_operator("", located) == find_operator("Failed to create Conv2d node 99999 with code: x", located) == ""
    assert find_operator("KernelCall failed at instruction 0:99 in operator aten::x.out: 0x12", located) == "aten::x.out"


@pytest.mark.parametrize(
    ("error", "log", "remedy"),
    [
        ("Error: 0x1", "[XNNCompiler.cpp:8] Failed to create BMM node 3 with code: xnn_status_invalid_parameter", "portable"),
        ("Error: 0x12", "[op_cat.cpp:30] Check failed (x)", "that line in another form"),
        ("Error: 0x14", "[method.cpp:8] Missing operator: [0] aten::x", "portable kernels lack"),
    ],
)
def test_the_remedy_fits_the_cause(error: str, log: str, remedy: str) -> None:
    why = explain(error, log)
    raised = program_cannot_run("forward", why, "", "aten::bmm at net.py:3 (x @ y)")
    assert remedy in raised.remedy and "net.py:3" in raised.message, json.dumps([why, raised.remedy])
    assert "that line" not in program_cannot_run("forward", "internal error (0x1)").remedy


@pytest.mark.parametrize("delegates", [True, False])
def test_another_recipe_is_a_remedy_only_for_what_a_backend_runs(delegates: bool) -> None:
    remedy = program_cannot_run("forward", "internal error (0x1)", "at its largest inputs (x: 4)", delegates=delegates).remedy
    assert "or export them as static" in remedy and ("use another recipe" in remedy) == delegates


@pytest.mark.asyncio(loop_scope="session")
async def test_an_operator_that_the_runtime_refuses_is_named_with_its_line(workers: Workers, tmp_path: Path) -> None:
    """The runtime's own message, not one that this test wrote."""
    with pytest.raises(EtfarmError) as caught:
        await compiled(workers, tmp_path, models.fft, "portable")
    assert caught.value.reason == "PROGRAM_CANNOT_RUN"
    assert "aten::_fft_r2c at " in caught.value.message and "return torch.fft.fft(x).abs()" in caught.value.message


class Cache(nn.Module):
    """Writes a row at a position, by a slice or by an index."""

    cache: torch.Tensor

    def __init__(self, *, slices: bool) -> None:
        super().__init__()
        self.slices = slices
        self.register_buffer("cache", torch.zeros(4, 3))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        if self.slices:
            at = position.item()
            torch._check(at >= 0)
            torch._check(at + 1 <= 4)
            self.cache.narrow(0, at, 1).copy_(x)
        else:
            self.cache[position.reshape(1)] = x
        return self.cache * 1


@pytest.mark.parametrize("slices", [True, False])
def test_a_write_past_the_end_is_blamed_on_its_position(slices: bool, capfd: pytest.CaptureFixture[str]) -> None:
    from executorch.runtime import Runtime

    row, exported = torch.ones(1, 3), Cache(slices=slices).eval()
    programs = {"forward": torch.export.export(exported, (row, torch.tensor(2)))}
    pipeline = lowering.Pipeline(("TO_EDGE_TRANSFORM_AND_LOWER", "TO_EXECUTORCH"))
    recipe = build.export_recipe(recipes.parse("portable"), ["forward"])
    stages = lowering.Stages(lambda event: None, programs, Compilation())
    manager = lowering.lower(programs, recipe, pipeline, "m", stages, places.undelegated)
    operators = of_program(manager.manager)["forward"]
    method = Runtime.get().load_program(manager.manager.buffer).load_method("forward")
    assert method is not None
    assert method.execute((row, torch.tensor(3)))[0][3].tolist() == [1, 1, 1]  # the remedy
    capfd.readouterr()
    with pytest.raises(RuntimeError):
        method.execute((row, torch.tensor(4)))
    log = capfd.readouterr().err
    error = error_of(Fault.USER, "PROGRAM_FAILED", f"It failed: {explain('0x12', log)}.", "", metadata={"log": log})
    located = locate(error, operators)
    assert "which takes positions 0 to 3 in dim 0 of cache (4x3)" in located.message
    assert "test_refused_operators.py:" in located.message
    assert "or clamp them in the model" in located.remedy
