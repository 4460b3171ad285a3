"""Model factories as a user has them in a file, each with something for etfarm to say about. Given as FILE:FACTORY."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Small(nn.Module):
    """A convolution, an activation, a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.out = nn.Linear(8, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(image)))
        return self.out(x.mean((2, 3)))


class Branching(nn.Module):
    """What it does depends on the values of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x + 1
        return x - 1


class Fourier(nn.Module):
    """Compiles and cannot run: there are no complex kernels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x).abs()


class Slow(nn.Module):
    """Seconds for one execution, so that a deadline passes in the middle of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(40):
            x = torch.tanh(x @ x)
        return x


class Hungry(nn.Module):
    """Plans tebibytes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        big = x.expand(1 << 19, 1 << 19) * 2
        return (big + 1).sum()


class Mixed(nn.Module):
    """One part for XNNPACK, and one that stays with the runtime's own kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return torch.cumsum(y, dim=-1)


IMAGE = (torch.zeros(1, 3, 16, 16),)


def small() -> Any:
    return Small().eval(), IMAGE


def mixed() -> Any:
    return Mixed().eval(), (torch.rand(2, 16),)


def train_mode() -> Any:
    return Small().train(), IMAGE


def branching() -> Any:
    return Branching().eval(), (torch.ones(4),)


def unbounded() -> Any:
    from torch.export import Dim

    from etfarm.client.export import ModelSource

    return ModelSource.of(Mixed().eval(), (torch.rand(2, 16),), dynamic_shapes={"x": {0: Dim("batch")}})


def something_else() -> Any:
    return {"model": Small()}


def fourier() -> Any:
    return Fourier().eval(), (torch.rand(16),)


def slow() -> Any:
    return Slow().eval(), (torch.rand(700, 700),)


def hungry() -> Any:
    return Hungry().eval(), (torch.rand(1),)


def channels_last() -> Any:
    return Small().eval(), (torch.rand(1, 3, 16, 16).to(memory_format=torch.channels_last),)


class Encoder(nn.Module):
    """A picture to a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.out = nn.Linear(8, 64)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv(image))
        return self.out(x.mean((2, 3)))


class Decoder(nn.Module):
    """Linears that torchao makes 4-bit, around an operator that nothing delegates."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.out = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y = torch.cumsum(y, dim=-1)
        return self.out(y)


def decoder() -> Any:
    return Decoder().eval(), (torch.rand(2, 64),)


def several() -> Any:
    """Two methods, one dynamic and calibrated from a generator, and a constant."""
    from torch.export import Dim

    from etfarm.client.export import ModelSource

    return ModelSource(
        methods={"encode": Encoder().eval(), "decode": Decoder().eval()},
        example_inputs={"encode": (torch.rand(1, 3, 16, 16),), "decode": (torch.rand(2, 64),)},
        calibration_inputs={"decode": lambda: ((torch.rand(2, 64),) for _ in range(20))},
        dynamic_shapes={"decode": {"x": {0: Dim("n", max=8)}}},
        constant_methods={"bos": 3},
    )


def without_bias() -> Any:
    """Return a user's own source transform."""
    from etfarm.client.export import ModelSource

    def transform(method: str, module: nn.Module) -> nn.Module:
        for part in module.modules():
            if isinstance(part, nn.Linear):
                part.bias = None
        return module

    return ModelSource.of(Decoder().eval(), (torch.rand(2, 64),), source_transforms=[transform])
