"""Programs that compute with the sizes of their inputs, and return them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from torch import nn  # noqa: E402 - needs torch
from torch.export import Dim  # noqa: E402

from etfarm.server.workers.pool import Workers  # noqa: E402
from tests.support.compiling import compiled, run  # noqa: E402

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Detector(nn.Module):
    """Returns features with their height and width, as detectors do for their boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, image: torch.Tensor) -> Any:
        features = self.features(image)
        typed = features.to(torch.result_type(features, torch.ones(1)))
        return typed, torch.tensor([features.shape[2], features.shape[3]])


async def test_a_tensor_of_dynamic_sizes_is_an_output(workers: Workers, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Detector().eval()
    dims = {"image": {2: Dim("h", min=4, max=16), 3: Dim("w", min=4, max=16)}}
    program = torch.export.export(module, (torch.rand(1, 3, 8, 8),), dynamic_shapes=dims)
    one = await compiled(workers, tmp_path, lambda: program)
    for height, width in ((8, 8), (4, 9), (16, 5)):
        image = torch.rand(1, 3, height, width)
        features, sizes = run(one.pte, [image])
        torch.testing.assert_close(features, module(image)[0], atol=1e-5, rtol=1e-4)
        assert sizes.tolist() == [height, width]
