"""Programs that compute with the sizes of their inputs, and return them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from torch import nn  # noqa: E402 - needs torch
from torch.export import Dim  # noqa: E402

from etfarm.server.workers.pool import Workers  # noqa: E402
from etfarm.wire.errors import EtfarmError  # noqa: E402
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


class Scaled(nn.Module):
    """Multiplies by a number that depends on a size."""

    def __init__(self, factor: Callable[[int], Any]) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> Any:
        return x * self.factor(x.shape[0])


def scaled(factor: Callable[[int], Any]) -> Any:
    return torch.export.export(Scaled(factor), (torch.rand(6, 4),), dynamic_shapes={"x": {0: Dim("n", min=2, max=16)}})


@pytest.mark.slow(reason="compiles a model for each function")
@pytest.mark.parametrize(
    "factor",
    [
        lambda n: max(n, 4),
        lambda n: torch.sym_float(n),
        lambda n: -(-n // 4),
        lambda n: (3 * n + 5) // 10,
        lambda n: torch.tensor(n).sqrt(),
        lambda n: torch.tensor(n) ** -0.5,
        lambda n: torch.tensor(n - 4).abs(),
    ],
)
async def test_numbers_that_depend_on_a_size_are_computed(workers: Workers, tmp_path: Path, factor: Callable[[int], Any]) -> None:
    one = await compiled(workers, tmp_path, lambda: scaled(factor))
    for size in (2, 5, 16):
        x = torch.rand(size, 4)
        torch.testing.assert_close(run(one.pte, [x])[0], x * factor(size))


@pytest.mark.slow(reason="compiles two models for each operator")
@pytest.mark.parametrize(
    ("factor", "operator", "words", "mended"),
    [
        (lambda n: n**2, "pow", "n * n for n ** 2", lambda n: n * n),
        (lambda n: n << 2, "lshift", "n * 4 for n << 2", lambda n: n * 4),
        (lambda n: n >> 2, "rshift", "n // 4 for n >> 2", lambda n: n // 4),
    ],
)
async def test_operators_on_sizes_that_executorch_lacks_have_others_instead(
    workers: Workers, tmp_path: Path, factor: Callable[[int], Any], operator: str, words: str, mended: Callable[[int], Any]
) -> None:
    with pytest.raises(EtfarmError) as caught:
        await compiled(workers, tmp_path, lambda: scaled(factor))
    assert f"ExecuTorch cannot emit {operator} of a size at " in caught.value.message
    assert words in caught.value.remedy
    one = await compiled(workers, tmp_path / "mended", lambda: scaled(mended))
    for size in (2, 5, 16):
        x = torch.rand(size, 4)
        torch.testing.assert_close(run(one.pte, [x])[0], x * factor(size))
