"""The form of a network, and what several factories share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from tests.support.torchvision import torchvision_models


class Network(NamedTuple):
    """A module in eval mode with the positional arguments of its forward."""

    module: nn.Module
    args: tuple[torch.Tensor, ...]


class Named(nn.Module):
    """A model that is called by the names of its inputs, with constants for the others; its output is the model's own."""

    def __init__(self, model: nn.Module, *names: str, **constants: Any) -> None:
        super().__init__()
        self.model = model
        self.names = names
        self.constants = constants

    def forward(self, *args: torch.Tensor) -> Any:
        return self.model(**dict(zip(self.names, args, strict=True)), **self.constants)


def of_transformers(name: str, *names: str, constants: dict[str, Any] | None = None, **options: Any) -> nn.Module:
    """Return a model of transformers with random weights."""
    torchvision_models()
    import transformers

    config = getattr(transformers, f"{name}Config")(**options)
    return Named(getattr(transformers, f"{name}Model")(config).eval(), *names, **(constants or {})).eval()


def settled(module: nn.Module, *shape: int) -> Network:
    """Return a network for one image whose batch norms have seen images, so that outputs have the scale of a trained model's."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.momentum = 1.0
    with torch.no_grad():
        module.train()(torch.randn(4, *shape[1:]))
    return Network(module.eval(), (torch.randn(*shape),))
