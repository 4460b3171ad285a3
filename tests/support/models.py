"""Tiny models that each show one thing to the compile room. Seeded: equal calls give equal bytes."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim


class ConvRelu(nn.Module):
    """A convolution, an activation, a linear: delegated and quantized whole."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.out = nn.Linear(8, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv(image))
        return self.out(x.mean((2, 3)))


class Fft(nn.Module):
    """Compiles, and cannot run: ExecuTorch has no complex kernels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x).abs()


class DictInputs(nn.Module):
    """Nested inputs, a keyword, a Python number, two outputs of which one is a number."""

    def forward(self, batch: dict[str, torch.Tensor], scale: int, *, bias: torch.Tensor) -> dict[str, Any]:
        return {"sum": batch["left"] * scale + batch["right"] + bias, "scale": scale}


class Dynamic(nn.Module):
    """A linear over any batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Counter(nn.Module):
    """A buffer that changes and does not begin at zero."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.full((1,), 41.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x + self.count


class Normalized(nn.Module):
    """A batch norm, for training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x))


class Elementwise(nn.Module):
    """Nothing that XNNPACK's dynamic quantization touches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x) * 2


class Histogram(nn.Module):
    """An operator that has a name of ExecuTorch's, and no kernel in its runtime."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.histc(x, 4, -1.0, 1.0)


class Histograms(nn.Module):
    """Two operators without a kernel, one of them twice."""

    def forward(self, x: torch.Tensor) -> Any:
        return torch.histc(x, 4, -1.0, 1.0), torch.polygamma(1, x), torch.histc(x, 8, -1.0, 1.0)


class Unknown(nn.Module):
    """An operator without an ExecuTorch kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(x)


class Table(nn.Module):
    """Rows of a table by their indices, through a linear; fails on an index outside of the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.linear = nn.Linear(4, 4)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.linear(self.table(index))


class Unbounded(nn.Module):
    """An output whose size depends on values without a bound; no memory can be planned for it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bincount(x)


def conv() -> Any:
    return _exported(ConvRelu(), (torch.randn(1, 3, 8, 8),))


def fft() -> Any:
    return _exported(Fft(), (torch.randn(8),))


def dict_inputs() -> Any:
    batch = {"left": torch.ones(2, 3), "right": torch.ones(2, 3)}
    return _exported(DictInputs(), (batch, 3), {"bias": torch.full((3,), 0.5)})


def dynamic(maximum: int | None = 8) -> Any:
    return _exported(Dynamic(), (torch.randn(4, 16),), dynamic_shapes={"x": {0: Dim("batch", min=1, max=maximum)}})


def marked_dynamic() -> Any:
    """A model whose dimension is given as a hint, so that `torch.export` marks the sample inputs."""
    return _exported(Dynamic(), (torch.randn(4, 16),), dynamic_shapes={"x": {0: Dim.DYNAMIC(min=2, max=8)}})


def counter() -> Any:
    return _exported(Counter(), (torch.zeros(2),))


def train_mode() -> Any:
    return _exported(Normalized().train(), (torch.randn(2, 3, 4, 4),), evaluate=False)


def elementwise() -> Any:
    return _exported(Elementwise(), (torch.randn(4),))


def unknown() -> Any:
    return _exported(Unknown(), (torch.randn(4, 4),))


def histogram() -> Any:
    return _exported(Histogram(), (torch.randn(4),))


def histograms() -> Any:
    return _exported(Histograms(), (torch.rand(4),))


def table() -> Any:
    return _exported(Table(), (torch.tensor([0, 1]),))


def unbounded() -> Any:
    return _exported(Unbounded(), (torch.tensor([1, 2, 3]),))


def quantized() -> Any:
    """ConvRelu, quantized to int8 by the user."""
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    quantizer = XNNPACKQuantizer()
    quantizer.set_global(get_symmetric_quantization_config(is_per_channel=True))
    inputs = (torch.randn(1, 3, 8, 8),)
    prepared = prepare_pt2e(torch.export.export(ConvRelu().eval(), inputs).module(), quantizer)
    prepared(*inputs)
    return torch.export.export(convert_pt2e(prepared), inputs)


def four_bit() -> Any:
    """Return a linear whose weights torchao made 4-bit before the export, as a client does it."""
    from torchao.quantization import quantize_
    from torchao.quantization.granularity import PerAxis
    from torchao.quantization.quant_api import Int8DynamicActivationIntxWeightConfig
    from torchao.utils import unwrap_tensor_subclass

    module = nn.Sequential(nn.Linear(32, 32), nn.ReLU()).eval()
    quantize_(module, Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerAxis(0)))
    unwrap_tensor_subclass(module)
    return torch.export.export(module, (torch.randn(1, 32),))


def resnet8() -> Any:
    """MLPerf Tiny's image classifier, from ExecuTorch's examples."""
    from executorch.examples.models import MODEL_NAME_TO_MODEL
    from executorch.examples.models.model_factory import EagerModelFactory

    torch.manual_seed(0)
    module, inputs, _, _ = EagerModelFactory.create_model(*MODEL_NAME_TO_MODEL["resnet8"])
    return torch.export.export(module, inputs)


def save(make: Callable[[], Any], path: Path) -> Path:
    """Write what `make` exports, seeded, as a .pt2 whose bytes do not depend on the path."""
    torch.manual_seed(0)
    buffer = io.BytesIO()
    torch.export.save(make(), buffer)
    path.write_bytes(buffer.getvalue())
    return path


def _exported(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, evaluate: bool = True, **more: Any
) -> Any:
    return torch.export.export(module.eval() if evaluate else module, args, kwargs, **more)
