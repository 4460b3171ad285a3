"""Delegates that do not wait for each other's outputs, and what is left to the portable kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

import torch.nn.functional as F  # noqa: E402
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner  # noqa: E402
from executorch.exir import to_edge_transform_and_lower  # noqa: E402
from torch import nn  # noqa: E402
from torch.export import Dim  # noqa: E402

from etfarm.server.workers.pool import Workers  # noqa: E402
from tests.support.compiling import STATIC, compiled, lowered_here, run, sample  # noqa: E402

pytestmark = [pytest.mark.numeric, pytest.mark.slow(reason="lowers models")]


class Twice(nn.Module):
    """Calls one attention in both of its forms."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Any, mask: Any) -> Any:
        y, weights = self.attention(x, x, x, attn_mask=mask, need_weights=True)
        z, _ = self.attention(x, x, x, attn_mask=mask, need_weights=False)
        return y, z, weights


class Resized(nn.Module):
    """Resizes an image."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Any) -> Any:
        return F.interpolate(x, **self.how)


class Enlarged(nn.Module):
    """Resizes an image to the size that it had between two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        return F.interpolate(self.second(y), size=y.shape[-2:], mode="nearest")


class Function(nn.Module):
    """A function of one tensor."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


MASKED = (torch.randn(1, 5, 16), torch.full((5, 5), -torch.inf).triu(1))


def test_executorch_alone_makes_partitions_that_wait_for_each_other() -> None:
    program = torch.export.export(Twice().eval(), MASKED)
    with pytest.raises(AssertionError, match="dependency cycles"), torch.no_grad():
        to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])


@pytest.mark.asyncio(loop_scope="session")
async def test_partitions_do_not_wait_for_each_other(workers: Workers, tmp_path: Path) -> None:
    result = (await compiled(workers, tmp_path, lambda: torch.export.export(Twice().eval(), MASKED), "xnnpack_fp32")).result
    assert result["warnings"] == []
    assert all(output["sqnr_db"] > 100 for check in result["checks"] for output in check["outputs"]) and result["checks"]
    delegated = {row["op"]: row["delegated"] for row in result["delegation"]["forward"]["operators"]}
    assert delegated["aten_linear_default"] == 4 and delegated["aten_bmm_default"] == 4


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("size", "how", "delegated"),
    [
        (15, {"scale_factor": 1.5}, False),
        (15, {"scale_factor": 0.7}, False),
        (15, {"scale_factor": (1.5, 2.0)}, False),
        (16, {"scale_factor": 1.5}, True),
        (10, {"scale_factor": 1.1}, True),
        (15, {"scale_factor": 1.5, "align_corners": True}, True),
        (15, {"scale_factor": 1.5, "recompute_scale_factor": True}, True),
        (15, {"size": (22, 22)}, True),
    ],
)
async def test_a_resize_has_the_scale_of_the_model(
    workers: Workers, tmp_path: Path, size: int, how: dict[str, Any], delegated: bool
) -> None:
    module, image = Resized(mode="bilinear", **how), torch.randn(1, 3, size, size)
    result = (await compiled(workers, tmp_path, lambda: torch.export.export(module, (image,)), "xnnpack_fp32")).result
    assert [warning["code"] for warning in result["warnings"]] == ([] if delegated else ["RESIZE_NOT_DELEGATED"])
    assert all(output["sqnr_db"] > 100 for check in result["checks"] for output in check["outputs"]) and result["checks"]
    rows = {row["op"]: row for row in result["delegation"]["forward"]["operators"]}
    row = rows["aten_upsample_bilinear2d_vec"]
    assert (row["delegated"], row["non_delegated"]) == (1, 0) if delegated else (0, 1)
    if not delegated:
        assert "takes its scale from the sizes" in row["places"][0]["undelegated_reason"]


@pytest.mark.filterwarnings("ignore:This API and all of its related functionality")
@pytest.mark.parametrize(
    ("layer", "weights", "shape", "delegates"),
    [
        (nn.Linear(8, 8), 1, (3, 8), 2),
        (nn.Linear(8, 8), 5, (3, 5, 8), 2),
        (nn.Conv1d(4, 8, 3), 8, (1, 4, 9), 2),
        (nn.Conv2d(4, 8, 3), 8, (1, 4, 9, 9), 1),
    ],
)
def test_a_prelu_behind_any_layer_is_lowered(layer: nn.Module, weights: int, shape: tuple[int, ...], delegates: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(layer, nn.PReLU(weights), nn.Flatten(), nn.LazyLinear(2)).eval()
    x = torch.randn(shape)
    module(x)
    pte = lowered_here(torch.export.export(module, (x,)), "xnnpack_fp32")
    torch.testing.assert_close(run(pte, [x])[0], module(x), atol=1e-5, rtol=1e-4)
    assert pte.count(b"XnnpackBackend") == delegates


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(("make", "operator", "places"), [
    (lambda: Function(lambda x: torch.stack([x * 2, x + 1], -1)), "aten_unsqueeze_copy_default", 2),
    (lambda: Function(lambda x: torch.cat([(x * 2).unsqueeze(-1), (x + 1).unsqueeze(-1)], -1)), "aten_unsqueeze_copy_default", 2),
    (lambda: nn.Conv1d(3, 4, 3, padding=1), "aten_convolution_default", 1),
    (lambda: nn.ConvTranspose1d(3, 4, 3), "aten_convolution_default", 1),
    (lambda: nn.BatchNorm1d(3), "aten__native_batch_norm_legit_no_training_default", 1),
], ids=["stack", "cat", "convolution", "transposed convolution", "batch norm"])  # fmt: skip
async def test_several_dynamic_dims_are_reshaped_outside_of_delegates(
    workers: Workers, tmp_path: Path, make: Callable[[], nn.Module], operator: str, places: int
) -> None:
    batch, time, model, x = Dim("batch", max=4), Dim("time", min=4, max=40), make().eval(), torch.rand(3, 3, 21)

    def exported(shapes: Any) -> Callable[[], Any]:
        return lambda: torch.export.export(model, (x,), dynamic_shapes=(shapes,))

    result = (await compiled(workers, tmp_path / "several", exported({0: batch, 2: time}), "xnnpack_fp32")).result
    assert result["warnings"] == []
    assert [(check["inputs"], check["ran"]) for check in result["checks"]] == [("EXAMPLE", True), ("MIN", True), ("MAX", True)]
    (row,) = [row for row in result["delegation"]["forward"]["operators"] if row["op"] == operator]
    assert (row["delegated"], row["non_delegated"]) == (0, places)
    assert row["places"][0]["undelegated_reason"] == "XNNPACK reshapes tensors with one dynamic dim at most"
    result = (await compiled(workers, tmp_path / "one", exported({2: time}), "xnnpack_fp32")).result
    (row,) = [row for row in result["delegation"]["forward"]["operators"] if row["op"] == operator]
    assert (row["delegated"], row["non_delegated"]) == (places, 0)


@pytest.mark.asyncio(loop_scope="session")
async def test_a_quantized_layer_whose_size_is_read_gets_its_input(workers: Workers, tmp_path: Path) -> None:
    images, height = [torch.rand(1, 3, 16, 16) for _ in range(2)], Dim("height", min=2, max=12)

    def exported() -> Any:
        return torch.export.export(Enlarged().eval(), (images[0],), dynamic_shapes=({2: 4 * height},))

    calibration = {"forward": [sample(tmp_path / f"{index}.ett", image) for index, image in enumerate(images)]}
    answer = await compiled(workers, tmp_path / "compiled", exported, STATIC, calibration=calibration)
    assert answer.codes == []
    sizes = {check["inputs"]: check["shapes"] for check in answer.result["checks"]}
    assert sizes == {"EXAMPLE": ["1x3x16x16"], "MIN": ["1x3x8x16"], "MAX": ["1x3x48x16"]}
    assert all(output["sqnr_db"] > 20 for check in answer.result["checks"] for output in check["outputs"])
