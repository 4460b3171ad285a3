"""demo:mobilenet_v1_025, visual wake words: whether a 96 x 96 RGB image contains a person.

Source: MLPerf Tiny v1.0, visual wake words; Howard et al., "MobileNets", 2017, table 1 at a width of 0.25.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

INPUT_SHAPE = (1, 3, 96, 96)
CLASSES = 2


class Separable(nn.Module):  # type: ignore[misc]
    """A depthwise 3 x 3 convolution with the stride, then a pointwise one that sets the channels."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels_in, channels_in, 3, stride, padding=1, groups=channels_in, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_in)
        self.pointwise = nn.Conv2d(channels_in, channels_out, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C_in, H, W) to (N, C_out, H / stride, W / stride)."""
        y = self.depthwise(x)
        y = self.norm1(y)
        y = torch.relu(y)
        y = self.pointwise(y)
        y = self.norm2(y)
        return torch.relu(y)


class MobileNetV1(nn.Module):  # type: ignore[misc]
    """float32 (N, 3, 96, 96) to logits (N, 2); 220 thousand weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(
            Separable(8, 16, stride=1),
            Separable(16, 32, stride=2),
            Separable(32, 32, stride=1),
            Separable(32, 64, stride=2),
            Separable(64, 64, stride=1),
            Separable(64, 128, stride=2),
            *(Separable(128, 128, stride=1) for _ in range(5)),
            Separable(128, 256, stride=2),
            Separable(256, 256, stride=1),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classify = nn.Linear(256, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits, without the final softmax."""
        y = self.conv(image)
        y = self.norm(y)
        y = torch.relu(y)
        y = self.blocks(y)
        y = self.pool(y)
        y = y.flatten(1)
        return self.classify(y)
