"""Demo:resnet8, image classification on 32 x 32 RGB images in ten classes.

Source: MLPerf Tiny v1.0, image classification; He et al., "Deep Residual Learning", 2015, the CIFAR-10 variant.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

INPUT_SHAPE = (1, 3, 32, 32)
CLASSES = 10


class Block(nn.Module):  # type: ignore[misc]
    """Two 3 x 3 convolutions beside a shortcut, which is a 1 x 1 convolution where the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C_in, H, W) to (N, C_out, H / stride, W / stride)."""
        y = self.conv1(x)
        y = self.norm1(y)
        y = torch.relu(y)
        y = self.conv2(y)
        y = self.norm2(y)
        if self.shortcut is not None:
            x = self.shortcut(x)
        y = x + y
        return torch.relu(y)


class ResNet8(nn.Module):  # type: ignore[misc]
    """float32 (N, 3, 32, 32) to logits (N, 10); 78 thousand weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.block1 = Block(16, 16, stride=1)
        self.block2 = Block(16, 32, stride=2)
        self.block3 = Block(32, 64, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classify = nn.Linear(64, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits, without the final softmax."""
        y = self.conv(image)
        y = self.norm(y)
        y = torch.relu(y)
        y = self.block1(y)
        y = self.block2(y)
        y = self.block3(y)
        y = self.pool(y)
        y = y.flatten(1)
        return self.classify(y)
