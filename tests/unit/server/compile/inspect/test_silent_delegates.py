"""Uploaded programs with delegates that write no output are named, and what the warning says helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

import executorch.kernels.quantized  # noqa: E402, F401 - registers out variants
import torch.nn.functional as F  # noqa: E402
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner  # noqa: E402
from executorch.exir import to_edge_transform_and_lower  # noqa: E402
from torch import nn  # noqa: E402

from etfarm.server.compile.inspect import facts, silent_delegates  # noqa: E402
from etfarm.server.compile.lower import build, quantize  # noqa: E402
from etfarm.server.compile.request import InspectRequest  # noqa: E402
from etfarm.server.workers.pool import Workers  # noqa: E402
from etfarm.wire import recipes  # noqa: E402
from tests.support.compiling import STATIC, compiled, plain, run, sqnr_db  # noqa: E402

pytestmark = [pytest.mark.numeric, pytest.mark.slow(reason="lowers models")]


class Enlarged(nn.Module):
    """Resizes an image to the size that it had between two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        return F.interpolate(self.second(y), size=y.shape[-2:], mode="nearest")


IMAGE = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def quantized(*, is_dynamic: bool) -> Any:
    shapes = ({2: 4 * torch.export.Dim("height", min=2, max=12)},) if is_dynamic else None
    program = torch.export.export(Enlarged().eval(), (IMAGE,), dynamic_shapes=shapes)
    module = quantize.quantize(program, build.quantization(recipes.parse(STATIC), "forward"), STATIC, "forward", [])
    return torch.export.export(module, (IMAGE,), dynamic_shapes=shapes)


def warnings_of(pte: bytes, folder: Path) -> dict[str, str]:
    (folder / "model.pte").write_bytes(pte)
    result = plain(facts.inspect_pte(InspectRequest(folder / "model.pte", "model"), folder, lambda event: None))
    return {warning["code"]: warning["message"] for warning in result["warnings"]}


@pytest.mark.asyncio(loop_scope="session")
async def test_a_delegate_without_outputs_is_named_and_the_recipe_helps(workers: Workers, tmp_path: Path) -> None:
    own = to_edge_transform_and_lower(quantized(is_dynamic=True), partitioner=[XnnpackPartitioner()]).to_executorch().buffer
    expected = Enlarged().eval()(IMAGE)
    assert run(own, [IMAGE])[0].shape != expected.shape, "ExecuTorch alone: not even the size is right"
    message = warnings_of(own, tmp_path)[silent_delegates.DELEGATE_WITHOUT_OUTPUTS]
    assert "in memory: number 0 of forward. " in message and "(.pt2)" in message
    helped = await compiled(workers, tmp_path / "helped", lambda: quantized(is_dynamic=True), "xnnpack_fp32")
    assert sqnr_db(expected, run(helped.pte, [IMAGE])[0]) > 20 and warnings_of(helped.pte, tmp_path) == {}


def test_programs_whose_delegates_all_write_are_not_named(tmp_path: Path) -> None:
    own = to_edge_transform_and_lower(quantized(is_dynamic=False), partitioner=[XnnpackPartitioner()]).to_executorch().buffer
    assert warnings_of(own, tmp_path) == {}
