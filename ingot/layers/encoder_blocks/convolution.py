"""Convolutions over frames as matrix products, since cuDNN would round fp32 to TF32 and transposes its input.

conv = FrameConvolution(80, 384, stride=1, dtype=torch.float16)
hidden = conv(features)              # [N, 80, frames] → [N, 384, frames]
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 3  # frames per output


class FrameConvolution(nn.Conv1d):
    """A convolution of width 3, zero-padded; each frame's channels are contiguous in the result."""

    def __init__(self, inputs: int, outputs: int, stride: int, dtype: torch.dtype) -> None:
        super().__init__(inputs, outputs, WIDTH, stride=stride, padding=WIDTH // 2, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, inputs, frames] → [N, outputs, frames / stride]."""
        frames = F.pad(x.transpose(1, 2), (0, 0, WIDTH // 2, WIDTH // 2))
        seen = frames.unfold(1, WIDTH, self.stride[0]).flatten(2)  # [N, frames / stride, inputs * 3]
        return F.linear(seen, self.weight.flatten(1), self.bias).transpose(1, 2)
