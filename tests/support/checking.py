"""Programs lowered in a child and checked there, as the pipeline does; with models that each show one thing to the checks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from etfarm.wire.report_keys import project
from tests.support import models
from tests.support.exports import Function, Unwritten


@dataclass(frozen=True)
class CheckRequest:
    """What to lower and how to check it; models by their names here or in `tests.support.models`."""

    original: str
    lowered: str = ""
    """Another model than the original, for outputs that differ."""
    portable: bool = False
    quantized: bool = False
    external: bool = False
    """Constants in a data file."""
    data_files: int = 1
    """How many data files the program is said to have, where it has one."""
    backends: tuple[str, ...] = ()
    """Instead of the program's own."""
    max_input_bytes: int = 0


def check(request: CheckRequest, folder: Path, emit: Callable[[bytes], None]) -> bytes:
    """Task: lowers and checks. Answers {"checks", "warnings", "sizes", "inputs", "left"} as JSON."""
    from etfarm.server.compile.inspect import facts, sizes
    from etfarm.server.compile.verify import checks, trials
    from etfarm.server.compile.verify.smoke import SmokeRunner

    smoke = SmokeRunner(folder / "smoke.log")
    try:
        torch.set_num_threads(2)
        if request.max_input_bytes:
            trials.MAX_INPUT_BYTES = request.max_input_bytes  # type: ignore[misc]
        original = make(request.original)
        data = lower(make(request.lowered) if request.lowered else original, request, folder / "model.pte")
        described = sizes.read(folder / "model.pte")
        methods = facts.of_program(described.program).methods
        files = {f"{name}-{n}": path for name, path in data.items() for n in range(request.data_files)}
        before = {name: buffer.clone() for name, buffer in original.state_dict.items()}
        inputs = checks.example_files({"forward": original}, folder)
        checked = checks.check_program(
            smoke, originals={"forward": original}, pte=folder / "model.pte", data=files,
            backends={"forward": request.backends or methods["forward"].backends}, folder=folder, quantized=request.quantized,
        )  # fmt: skip
    finally:
        smoke.close()
    for name, buffer in original.state_dict.items():
        assert torch.equal(buffer, before[name]), f"{name} was changed"
    left = sorted(path.name for path in folder.iterdir() if path.is_dir())
    return json.dumps(
        {
            "checks": [project(each) for each in checked.checks],
            "warnings": [project(warning) for warning in checked.warnings],
            "sizes": project(sizes.of_program(described, data)), "inputs": inputs, "left": left,
        }
    ).encode()  # fmt: skip


def lower(program: Any, request: CheckRequest, pte: Path) -> dict[str, Path]:
    """Write the .pte; return its data files."""
    from executorch.backends.xnnpack.recipes import XNNPackRecipeType
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig
    from executorch.export import ExportRecipe, ExportSession, LoweringRecipe

    recipe = ExportRecipe.get_recipe(XNNPackRecipeType.FP32)
    if request.portable:
        recipe = ExportRecipe(
            lowering_recipe=LoweringRecipe(edge_compile_config=EdgeCompileConfig(_check_ir_validity=False)),
            executorch_backend_config=ExecutorchBackendConfig(external_constants=request.external),
        )
    session = ExportSession({"forward": program}, export_recipe=recipe)
    session.export()
    manager = session.get_executorch_program_manager()
    with pte.open("wb") as file:
        manager.write_to_file(file)
    manager.write_tensor_data_to_file(str(pte.parent))
    return {path.name: path for path in pte.parent.glob("*.ptd")}


def make(name: str) -> Any:
    """Return a model by its name."""
    result = VARIANTS.get(name) or globals().get(name) or getattr(models, name)
    return result()


class Derived(nn.Module):
    """Two inputs whose dims hang together, with indices into a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, tokens: torch.Tensor, pairs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        result = self.table(tokens) + pairs.reshape(-1, 2, 3).sum(1)
        return torch.where(mask[:, None], result, -result)


class Sums(nn.Module):
    """A sum that is long enough for torch to divide it among threads, whose number changes its last bits."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        self.register_buffer("weight", sign * torch.rand(1 << 20, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x * self.weight).sum(), (x * x).sum()])


class PartlyRandom(nn.Module):
    """An output that depends on the weight, and one by chance."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        self.register_buffer("weight", sign * torch.arange(1.0, 5.0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * self.weight, x + torch.rand(4)


class Twice(nn.Module):
    """One tensor as two outputs."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        self.register_buffer("weight", sign * torch.arange(1.0, 5.0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = x * self.weight
        return result, result


class Classes(nn.Module):
    """The classes of many pixels in bfloat16, where two scores are often nearly equal; or the same computed in float32."""

    def __init__(self, sign: float, *, wide: bool = False) -> None:
        super().__init__()
        weight = sign * torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
        self.register_buffer("weight", weight.bfloat16())
        self.wide = wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x.float() @ self.weight.float() if self.wide else x @ self.weight
        return (scores * 1.1 + 30).argmax(-1)


class Chosen(nn.Module):
    """What scores of long sums choose: the best class, and features of the best pixels."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 4096), nn.Linear(4096, 300)
        self.sign = sign

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.sign * self.second(torch.relu(self.first(x)))
        return scores.argmax(-1), x[scores[:, 0].topk(16).indices] * self.sign


class Picks(nn.Module):
    """Indices into an input: the smallest input has none of them."""

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, index) * 2


def derived() -> Any:
    batch = Dim("batch", max=6)
    inputs = (torch.tensor([4, 1, 3]), torch.randn(6, 3), torch.tensor([True, False, True]))
    shapes = {"tokens": {0: batch}, "pairs": {0: 2 * batch}, "mask": {0: batch}}
    return torch.export.export(Derived().eval(), inputs, dynamic_shapes=shapes)


def sums(sign: float = 1.0) -> Any:
    return torch.export.export(Sums(sign), (torch.rand(1 << 20, generator=torch.Generator().manual_seed(1)),))


def classes(sign: float = 1.0, *, wide: bool = False) -> Any:
    pixels = torch.randn(4096, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    return torch.export.export(Classes(sign, wide=wide), (pixels,))


def chosen(sign: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Any:
    pixels = torch.randn(256, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    return torch.export.export(Chosen(sign).to(dtype), (pixels,))


def _in_steps(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    shapes = {"x": {0: Dim.AUTO(min=3, max=63)}}
    return torch.export.export(Function(function), (torch.randn(8, 2),), dynamic_shapes=shapes)


VARIANTS: Mapping[str, Callable[[], Any]] = {
    # Sizes that go in steps of two.
    "stepped": lambda: _in_steps(lambda x: x.reshape(2, -1) * 2),
    # Sizes that ExecuTorch 1.5's memory planning takes for smaller ones than they are.
    "unplanned": lambda: _in_steps(lambda x: x.reshape(-1, 4) * 2),
    "negative_sums": lambda: sums(-1.0),
    "partly_random": lambda: torch.export.export(PartlyRandom(1.0), (torch.ones(4),)),
    "negative_partly_random": lambda: torch.export.export(PartlyRandom(-1.0), (torch.ones(4),)),
    "twice": lambda: torch.export.export(Twice(1.0), (torch.ones(4),)),
    "negative_twice": lambda: torch.export.export(Twice(-1.0), (torch.ones(4),)),
    "unwritten": lambda: torch.export.export(Unwritten(), (torch.zeros(1, 2, 4, 4),)),
    "wide_classes": lambda: classes(wide=True),
    "negative_classes": lambda: classes(-1.0),
    "negative_chosen": lambda: chosen(-1.0),
    "chosen_in_float32": lambda: chosen(dtype=torch.float32),
    "bytes": lambda: torch.export.export(Function(lambda x: x + 1), (torch.ones(4, dtype=torch.uint8),)),
    "wide_bytes": lambda: torch.export.export(Function(lambda x: (x + 1).long()), (torch.ones(4, dtype=torch.uint8),)),
    # Other outputs each time.
    "random": lambda: torch.export.export(Function(lambda x: x + torch.rand(4)), (torch.zeros(4),)),
    # `dynamic`, and more of it.
    "wider": lambda: models.dynamic(16),
}


def picks() -> Any:
    shapes = {"x": {0: Dim("rows", min=1, max=8)}, "index": None}
    return torch.export.export(Picks(), (torch.randn(4, 3), torch.tensor([3, 0])), dynamic_shapes=shapes)


def other_conv() -> Any:
    """`conv` with other weights."""
    torch.manual_seed(7)
    module = models.ConvRelu().eval()
    return torch.export.export(module, (torch.randn(1, 3, 8, 8),))


def without_inputs() -> Any:
    """`conv` as an exporter without example inputs leaves it."""
    program = models.conv()
    program.example_inputs = None
    return program
