"""Models of one function, and programs that are exported and read back."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from etfarm.client.export import ModelSource, export_source


class Function(nn.Module):
    """A model that is one function of its input."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Unwritten(nn.Module):
    """A model whose convolution reads what ExecuTorch 1.5 leaves unwritten: zeros at first, later values of the last execution.

    XNNPACK's partitioner does not delegate the convolution, since its output is not quantized. It delegates what is before it, as
    a delegate without outputs. etfarm's own lowering prevents that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.full((2, 2, 1, 1), 10, dtype=torch.int8))
        self.register_buffer("scales", torch.full((2,), 0.01))
        self.register_buffer("zero_points", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        quantized = torch.ops.quantized_decomposed
        y = quantized.quantize_per_tensor(x, 0.01, 0, -128, 127, torch.int8)
        y = quantized.dequantize_per_tensor(y, 0.01, 0, -128, 127, torch.int8)
        weight = quantized.dequantize_per_channel(self.weight, self.scales, self.zero_points, 0, -127, 127, torch.int8)
        y = nn.functional.conv2d(y, weight)
        return (y.cumsum(0) + 0.5).cumsum(1).atan()


class Body(nn.Module):
    """A model whose function is also given the model, which has one attribute."""

    value: Any

    def __init__(self, body: Callable[[Any, Tensor], Tensor], value: Any = None) -> None:
        super().__init__()
        self.value = value
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def read_program(pt2: Any) -> torch.export.ExportedProgram:
    """Return the program of an archive."""
    return torch.export.load(io.BytesIO(pt2))


def export_program(source: ModelSource, method: str = "forward", **options: Any) -> torch.export.ExportedProgram:
    """Return what a method's archive has."""
    return read_program(export_source(source, name="m", **options).methods[method].pt2)


def export_called(source: ModelSource, method: str = "forward", **options: Any) -> Any:
    """Return the module that a method's archive calls."""
    return export_program(source, method, **options).module()
