"""Embeddings that torchao has quantized, which ExecuTorch computes once the table and its lookup are one operator."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

import executorch.kernels.quantized  # noqa: E402, F401 - its operators, for runs in this process
from torch import nn  # noqa: E402
from torchao.quantization import IntxWeightOnlyConfig, quantize_  # noqa: E402
from torchao.quantization.granularity import PerAxis, PerGroup  # noqa: E402
from torchao.utils import unwrap_tensor_subclass  # noqa: E402

from etfarm.server.workers.pool import Workers  # noqa: E402
from etfarm.wire import recipes  # noqa: E402
from tests.support.compiling import compiled, run, sqnr_db  # noqa: E402
from tests.support.refusals import refuses  # noqa: E402

pytestmark = [pytest.mark.numeric, pytest.mark.slow(reason="each test compiles in children")]

IDS = torch.tensor([[3, 97, 0, 41]])


class Words(nn.Module):
    """Embeds words and counts its calls."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 64)
        self.padded = nn.Embedding(100, 64, padding_idx=0)
        self.head = nn.Linear(64, 10)
        self.register_buffer("calls", torch.ones(1))

    def forward(self, ids: Any) -> Any:
        self.calls.add_(1)
        return self.head(self.table(ids) + self.padded(ids)) * self.calls


def words(bits: int, granularity: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Words().eval()
    config = IntxWeightOnlyConfig(weight_dtype=getattr(torch, f"int{bits}"), granularity=granularity)
    quantize_(model, config, lambda module, name: isinstance(module, nn.Embedding))
    return unwrap_tensor_subclass(model)  # type: ignore[no-any-return]


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(("bits", "granularity"), [(8, PerAxis(0)), (4, PerGroup(32)), (2, PerGroup(32))])
@pytest.mark.parametrize("recipe", ["portable", "xnnpack_fp32"])
async def test_a_quantized_embedding_runs(workers: Workers, tmp_path: Path, recipe: str, bits: int, granularity: Any) -> None:
    model = words(bits, granularity)
    compilation = await compiled(workers, tmp_path, partial(torch.export.export, model, (IDS,)), recipe)
    operators = compilation.result["facts"]["methods"]["forward"]["operators"]
    name = "byte" if bits == 8 else f"{bits}bit"
    assert any(f"quantized_decomposed::embedding_{name}" in operator for operator in operators)
    expected = [model(IDS) for _ in range(2)][-1]
    assert sqnr_db(expected, run(compilation.pte, [IDS], times=2)[0]) > 100
    (stayed,) = [row["message"] for row in compilation.result["warnings"] if row["code"] == "STAYED_FP32"]
    assert stayed.startswith("The model's own quantization leaves operators of forward in fp32: 1 x linear at ")


@pytest.mark.asyncio(loop_scope="session")
async def test_a_recipe_file_leaves_the_fusion_out(workers: Workers, tmp_path: Path) -> None:
    file = 'recipe = "portable"\n[executorch]\ndo_quant_fusion_and_const_prop = false\n'
    make = partial(torch.export.export, words(8, PerAxis(0)), (IDS,))
    with refuses("UNSUPPORTED_QUANTIZED_OP") as error:
        await compiled(workers, tmp_path, make, recipes.from_toml(file))
    assert "do_quant_fusion_and_const_prop = false" in str(error.value)
