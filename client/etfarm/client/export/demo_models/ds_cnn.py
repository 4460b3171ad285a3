"""Demo:ds_cnn, keyword spotting on 49 frames of 10 MFCC features in twelve classes.

Source: MLPerf Tiny v1.0, keyword spotting; Zhang et al., "Hello Edge: Keyword Spotting on Microcontrollers", 2017.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

INPUT_SHAPE = (1, 1, 49, 10)
CLASSES = 12


class Separable(nn.Module):  # type: ignore[misc]
    """A depthwise 3 x 3 convolution, then a pointwise one."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.pointwise = nn.Conv2d(channels, channels, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to the same shape."""
        y = self.depthwise(x)
        y = self.norm1(y)
        y = torch.relu(y)
        y = self.pointwise(y)
        y = self.norm2(y)
        return torch.relu(y)


class DsCnn(nn.Module):  # type: ignore[misc]
    """float32 (N, 1, 49, 10) to logits (N, 12); 24 thousand weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 64, (10, 4), stride=2, padding=(5, 1), bias=False)
        self.norm = nn.BatchNorm2d(64)
        self.block1 = Separable(64)
        self.block2 = Separable(64)
        self.block3 = Separable(64)
        self.block4 = Separable(64)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classify = nn.Linear(64, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits, without the final softmax.

        The reference's dropouts do nothing in a program and are left out.
        """
        y = self.conv(features)
        y = self.norm(y)
        y = torch.relu(y)
        y = self.block1(y)
        y = self.block2(y)
        y = self.block3(y)
        y = self.block4(y)
        y = self.pool(y)
        y = y.flatten(1)
        return self.classify(y)
