"""A small multi-method model, as a user would write it: a vision encoder, a token embedding and a text decoder in one program."""

from __future__ import annotations

import torch
from torch import nn
from torch.export import Dim

from etfarm.client.export import ModelSource

WIDTH = 32
LENGTH = 24


class VisionEncoder(nn.Module):
    """An image to a sequence of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 8, stride=8)
        self.out = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.out(torch.relu(self.patches(image)))
        return x.flatten(2).transpose(1, 2)


class TokenEmbedding(nn.Module):
    """Token ids to vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)


class TextDecoder(nn.Module):
    """Vectors to logits; counts its calls from 7 on in a buffer, and takes any length up to LENGTH."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 100)
        self.register_buffer("calls", torch.full((1,), 7.0))

    def forward(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1.0)
        x = vectors + self.down(torch.relu(self.up(vectors)))
        return self.head(x), self.calls * 1.0


def assistant() -> ModelSource:
    """Return the factory. Seeded: what tests say about its numbers does not depend on chance."""
    torch.manual_seed(0)
    length = Dim("length", min=2, max=LENGTH)
    vectors = [(torch.randn(1, n, WIDTH),) for n in (8, 4, 12, 20, 6, 8, 10, 24)]
    images = [(torch.rand(1, 3, 32, 32),) for _ in range(8)]
    return ModelSource(
        methods={
            "vision_encoder": VisionEncoder().eval(),
            "token_embedding": TokenEmbedding().eval(),
            "text_decoder": TextDecoder().eval(),
        },
        example_inputs={
            "vision_encoder": images[0],
            "token_embedding": (torch.arange(8).reshape(1, 8),),
            "text_decoder": vectors[0],
        },
        calibration_inputs={"vision_encoder": images, "text_decoder": vectors},
        dynamic_shapes={"token_embedding": {"tokens": {1: length}}, "text_decoder": {"vectors": {1: length}}},
        constant_methods={"get_max_length": LENGTH, "get_width": WIDTH},
    )
