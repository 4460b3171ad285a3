"""Remedies for int8, each applied to the small model that got it: the sentence names the cause and the line, and it helps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from etfarm.server.workers.pool import Workers  # noqa: E402
from etfarm.wire.errors import UserError  # noqa: E402
from etfarm.wire.recipes import Recipe  # noqa: E402
from tests.support.compiling import DYNAMIC, STATIC, compiled, with_quantizer  # noqa: E402

pytestmark = [pytest.mark.numeric, pytest.mark.slow(reason="each test compiles in children")]


class Two(nn.Module):
    """Two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.b = nn.Conv2d(8, 8, 3, padding=1)


class Increased(Two):
    """Adds a number before a convolution."""

    def forward(self, x: Any) -> Any:
        y = self.a(x)
        y = y + 1.0
        return self.b(y)


class Padded(Two):
    """Pads a product."""

    def forward(self, x: Any) -> Any:
        x = self.a(x)
        x = x * self.b(x)
        x = F.pad(x, (1, 1, 1, 1))
        return F.max_pool2d(x, 3, 2)


class Nested(Two):
    """Chooses within a branch."""

    def forward(self, x: Any) -> Any:
        def inner(v: Any) -> Any:
            return torch.cond(v.max() > 1, lambda w: w * 2, lambda w: w + 1, (v,))

        return torch.cond(x.sum() > 0, inner, lambda v: v - 1, (self.a(x),))


class Rotated(Two):
    """Multiplies by an imaginary number."""

    def forward(self, x: Any) -> Any:
        y = self.a(x).unflatten(-1, (3, 2)).contiguous()
        return torch.view_as_real(torch.view_as_complex(y) * 2j)


class Increment(Two):
    """Adds an imaginary number, as a keyword."""

    def forward(self, x: Any) -> Any:
        return torch.view_as_real(torch.add(torch.complex(x, x), 1, alpha=2j))


class Parts(Two):
    """Computes what `Rotated` does with real and imaginary parts."""

    def forward(self, x: Any) -> Any:
        real, imaginary = self.a(x).unflatten(-1, (3, 2)).unbind(-1)
        return torch.stack([imaginary * -2.0, real * 2.0], -1)


IMAGE: Final = torch.randn(1, 3, 6, 6, generator=torch.Generator().manual_seed(3))
PRODUCT: Final = f"test_quantized_remedies.py:{Padded.forward.__code__.co_firstlineno + 2}"
Model = tuple[nn.Module, str | Recipe]
COMPLEX: Final = ["UNSUPPORTED_DTYPES", "no kernel for these dtypes (complex)", "compute real and imaginary parts separately"]

CASES: Final[dict[str, tuple[Model, list[Model], list[str]]]] = {
    "a condition within a branch": (
        (Nested(), STATIC), [(Nested(), "xnnpack_fp32")],
        ["QUANTIZE failed", "inside of a branch or loop of another: torch.cond at ", "(return torch.cond(x.sum()", "fp32"],
    ),
    "a condition within a branch, with dynamic scales": (
        (Nested(), DYNAMIC), [(Nested(), "xnnpack_fp32")], ["does not work with control flow inside of a branch"],
    ),
    "a complex number in int8": ((Rotated(), STATIC), [(Parts(), "xnnpack_fp32")], [*COMPLEX, "aten::mul at ", "* 2j)"]),
    "a complex number": ((Rotated(), "xnnpack_fp32"), [(Parts(), "xnnpack_fp32")], [*COMPLEX, "aten::mul at ", "* 2j)"]),
    "a complex keyword": ((Increment(), "portable"), [(Parts(), "portable")], [*COMPLEX, "aten::add at ", "alpha=2j)"]),
    "a pad behind a quantized product": (
        (Padded(), STATIC), [(Padded(), with_quantizer(STATIC, f'skip_operators = ["{PRODUCT}"]')), (Padded(), DYNAMIC)],
        ["PROGRAM_CANNOT_RUN", "(x = F.pad(x, (1, 1, 1, 1)))", "aten::mul at ", "skip_operators = [", PRODUCT],
    ),
}  # fmt: skip


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
async def test_what_does_not_work_in_half_precision_is_refused(workers: Workers, tmp_path: Path, dtype: Any) -> None:
    model = Increased()

    def make() -> Any:
        return torch.export.export(model.to(dtype).eval(), (IMAGE.to(dtype),))

    with pytest.raises(
        UserError, match=r"QUANTIZE failed: static quantization does not work .*conv2d at .*self.a.x.*model.float"
    ):
        await compiled(workers, tmp_path / "broken", make, STATIC)
    answer = await compiled(workers, tmp_path / "mended", lambda: torch.export.export(model.float().eval(), (IMAGE,)), STATIC)
    assert answer.result["warnings"] == []


@pytest.mark.asyncio(loop_scope="session")
async def test_linears_in_bfloat16_with_dynamic_scales_are_refused(workers: Workers, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval()

    def make(dtype: Any) -> Callable[[], Any]:
        return lambda: torch.export.export(model.to(dtype), (IMAGE.to(dtype),))

    with pytest.raises(UserError, match=r"QUANTIZE failed: dynamic quantization does not work .*linear.*model.float"):
        await compiled(workers, tmp_path / "broken", make(torch.bfloat16), DYNAMIC)
    answer = await compiled(workers, tmp_path / "mended", make(torch.float32), DYNAMIC)
    assert answer.result["warnings"] == []


@pytest.mark.asyncio(loop_scope="session")
async def test_linears_in_float16_are_quantized(workers: Workers, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).half().eval()
    answer = await compiled(workers, tmp_path, lambda: torch.export.export(model, (IMAGE.half(),)), STATIC)
    assert answer.result["warnings"] == []
    assert all(output["sqnr_db"] > 30 for check in answer.result["checks"] for output in check["outputs"])


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("name", CASES)
async def test_a_remedy_helps(workers: Workers, tmp_path: Path, name: str) -> None:
    (broken, recipe), mended, words = CASES[name]

    def make(module: nn.Module) -> Callable[[], Any]:
        return lambda: torch.export.export(module.eval(), (IMAGE,))

    with pytest.raises(UserError) as raised:
        await compiled(workers, tmp_path / "broken", make(broken), recipe)
    sentences = f"{raised.value.reason} {raised.value}"
    missing = [word for word in words if word not in sentences]
    assert not missing, f"{missing} not in: {sentences}"
    for index, (module, other) in enumerate(mended):
        answer = await compiled(workers, tmp_path / f"mended-{index}", make(module), other)
        assert [warning["message"] for warning in answer.result["warnings"]] == []
        assert all(check["ran"] and not check["why"] for check in answer.result["checks"]) and answer.result["checks"]
