"""Models of several methods that hold a buffer in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from etfarm.client.export import ModelSource


class Holder(nn.Module):
    """The buffer, which is reached under another name in each method."""

    n: Tensor

    def __init__(self, start: float = 0.0, shape: tuple[int, ...] = (2,)) -> None:
        super().__init__()
        self.register_buffer("n", torch.full(shape, start))


class Add(nn.Module):
    """Adds to the buffer, and keeps a number of its own under the same name as another method."""

    own: Tensor

    def __init__(self, holder: Holder) -> None:
        super().__init__()
        self.counter = holder
        self.register_buffer("own", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.own += 1
        self.counter.n += x
        return self.counter.n + 100 * self.own


class Set(nn.Module):
    """Sets the buffer."""

    own: Tensor

    def __init__(self, holder: Holder) -> None:
        super().__init__()
        self.state = holder
        self.register_buffer("own", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.own += 1
        self.state.n.copy_(x)
        return self.state.n + 100 * self.own


class Get(nn.Module):
    """Only reads the buffer."""

    def __init__(self, holder: Holder) -> None:
        super().__init__()
        self.held = holder

    def forward(self, x: Tensor) -> Tensor:
        return self.held.n * x


class Weigh(nn.Module):
    """Takes the buffer as a weight, which XNNPACK packs into its delegate."""

    def __init__(self, holder: Holder) -> None:
        super().__init__()
        self.held = holder

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.held.n)


def weights() -> ModelSource:
    """Return `set` and `weigh` of one buffer."""
    holder = Holder(shape=(2, 2))
    methods: dict[str, nn.Module] = {"set": Set(holder).eval(), "weigh": Weigh(holder).eval()}
    return ModelSource(methods=methods, example_inputs=dict.fromkeys(methods, (torch.ones(2, 2),)))


def counter(start: float = 0.0, **more: Any) -> ModelSource:
    """Return `set`, `add` and `get` of one buffer."""
    holder = Holder(start)
    methods = {"set": Set(holder).eval(), "add": Add(holder).eval(), "get": Get(holder).eval()}
    return ModelSource(methods=methods, example_inputs=dict.fromkeys(methods, (torch.ones(2),)), **more)
