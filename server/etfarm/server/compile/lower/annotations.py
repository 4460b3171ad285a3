"""Quantizers that change what another one has annotated."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch.fx.graph import _PyTreeCodeGen
from torchao.quantization.pt2e.quantizer import Quantizer


class Reviewed(Quantizer):  # type: ignore[misc]
    """A quantizer that changes what another one has annotated.

    Args:
        quantizer: XNNPACK's, which annotates all operators first.
    """

    def __init__(self, quantizer: Quantizer) -> None:
        super().__init__()
        self._quantizer = quantizer

    def transform_for_annotation(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """Let the inner quantizer change a model's graph."""
        return self._quantizer.transform_for_annotation(model) if _is_whole(model) else model

    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """Annotate all operators, and change what was annotated.

        The body of a loop, which torchao quantizes too, stays in fp32: nothing is delegated there, and archives have no tensors
        there, such as the scales of channels.
        """
        if _is_whole(model):
            model = self._quantizer.annotate(model)
            self.review(model)
        return model

    @abstractmethod
    def review(self, model: torch.fx.GraphModule) -> None:
        """Change the annotations of a graph."""

    def validate(self, model: torch.fx.GraphModule) -> None:
        """Let the inner quantizer check its annotations."""
        self._quantizer.validate(model)


def _is_whole(model: torch.fx.GraphModule) -> bool:
    return isinstance(model.graph._codegen, _PyTreeCodeGen)
