"""Constants that operators of one XNNPACK delegate use in different ways."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("executorch")

from etfarm.server.compile.lower import build, quantize
from etfarm.wire import recipes
from tests.support.compiling import DYNAMIC, STATIC, lowered_here, sample, sqnr_db

pytestmark = [
    pytest.mark.numeric, pytest.mark.slow(reason="lowers models"),
    pytest.mark.filterwarnings("ignore:This API and all of its related functionality"),
]  # fmt: skip

FP32 = "xnnpack_fp32"
WIDTH = 64
RUN = """
import os
from pathlib import Path
import torch
from executorch.runtime import Runtime
for folder in Path().iterdir():
    if not os.fork():
        method = Runtime.get().load_program(folder / "model.pte").load_method("forward")
        torch.save(list(method.execute(torch.load(folder / "inputs.pt"))), folder / "outputs.pt")
        os._exit(0)
    os.wait()
"""
"""Runs each folder's program from its file in a process of its own: what the runtime frees is then no longer in memory."""

Body = Callable[[Any, Tensor], Any]


class Model(nn.Module):
    """Applies a function of parameters to a tensor."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.weight, self.bias = (nn.Parameter(torch.randn(shape) / 8) for shape in ((WIDTH, WIDTH), (WIDTH,)))
        self.kernel, self.other = (nn.Parameter(torch.randn(4, 4, size, size)) for size in (4, 3))

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def product(m: Any, x: Tensor) -> Tensor:
    """Multiply matrices in two ways: as a layer, and as a batch."""
    return x @ m.weight + torch.einsum("bij,jk->bik", x, m.weight)


def lowered(model: nn.Module, x: Tensor, recipe: str, folder: Path) -> bytes:
    program = torch.export.export(model, (x,))
    own = recipes.from_toml(f'recipe = "{recipe}"')
    if (quantization := build.quantization(own, "forward")) is not None:
        calibration = [sample(folder / f"{factor}.ett", x * factor) for factor in (0.5, 1)]
        module = quantize.quantize(program, quantization, recipe, "forward", calibration)
        program = quantize.export_again(module, program, own.strict)
    return lowered_here(program, recipe)


CASES: dict[str, tuple[str, tuple[int, ...], Body]] = {
    "product": (FP32, (2, 4, WIDTH), product),
    "elements": (FP32, (WIDTH, WIDTH), lambda m, x: (F.linear(x, m.weight) * m.weight, x - m.weight)),
    "bias": (FP32, (WIDTH, WIDTH), lambda m, x: F.linear(x * m.weight, m.weight, m.bias) + m.bias),
    "input": (FP32, (WIDTH, WIDTH), lambda m, x: F.linear(m.weight, m.weight) + F.linear(x, m.weight)),
    "channels last": (FP32, (4, 4, 8, 8), lambda m, x: (F.conv2d(x, m.kernel), x[..., :4, :4] * m.kernel)),
    "transposed": (FP32, (1, 4, 8, 8), lambda m, x: F.conv_transpose2d(F.conv2d(x, m.other), m.other)),
    "dynamic": (DYNAMIC, (4, WIDTH), lambda m, x: F.linear(x, m.weight, m.bias) + m.bias),
    "static": (STATIC, (2, 4, WIDTH), product),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the programs, each with the outputs of the model, and its own unless it crashes."""
    root = tmp_path_factory.mktemp("programs")
    for name, (recipe, shape, body) in CASES.items():
        torch.manual_seed(0)
        model, x, own = Model(body).eval(), torch.randn(shape), root / name
        own.mkdir()
        (own / "model.pte").write_bytes(lowered(model, x, recipe, tmp_path_factory.mktemp("samples")))
        with torch.no_grad():
            expected = model(x)
        torch.save([x], own / "inputs.pt")
        torch.save(expected if isinstance(expected, tuple) else (expected,), own / "expected.pt")
    subprocess.run([sys.executable, "-c", RUN], cwd=root, check=True, capture_output=True)
    return root


@pytest.mark.parametrize("name", CASES)
def test_a_program_that_is_loaded_from_a_file_computes_as_the_model(name: str, folder: Path) -> None:
    actual, expected = (torch.load(folder / name / file) for file in ("outputs.pt", "expected.pt"))
    least = 80 if CASES[name][0] == FP32 else 30
    assert [sqnr_db(*pair) > least for pair in zip(expected, actual, strict=True)] == [True] * len(expected)


def test_a_constant_with_two_uses_is_in_the_program_once(tmp_path: Path) -> None:
    x = torch.randn(2, 4, WIDTH)
    once, twice = (
        len(lowered(Model(body).eval(), x, FP32, tmp_path)) for body in (lambda m, x: torch.relu(x @ m.weight), product)
    )
    assert once > WIDTH * WIDTH * 4 and twice - once < WIDTH * WIDTH
