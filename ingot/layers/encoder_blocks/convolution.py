"""Convolutions over frames as matrix products, since cuDNN would round fp32 to TF32 and transposes its input.

conv = FrameConvolution(80, 384, stride=1, dtype=torch.float16)
hidden = conv(features)              # [N, 80, frames] → [N, 384, frames]
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ingot.kernels.product.prompt_gate_up import prompt_up, reads_up

WIDTH = 3  # frames per output
LEAST_WINDOWS = 2  # of one it was not measured


class FrameConvolution(nn.Conv1d):
    """A convolution of width 3, zero-padded; each frame's channels are contiguous in the result."""

    def __init__(self, inputs: int, outputs: int, stride: int, dtype: torch.dtype) -> None:
        super().__init__(inputs, outputs, WIDTH, stride=stride, padding=WIDTH // 2, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, inputs, frames] → [N, outputs, frames / stride]."""
        frames = F.pad(x.transpose(1, 2), (0, 0, WIDTH // 2, WIDTH // 2))
        seen = frames.unfold(1, WIDTH, self.stride[0]).flatten(2)  # [N, frames / stride, inputs * 3]
        return F.linear(seen, self.weight.flatten(1), self.bias).transpose(1, 2)


def takes_convolutions(first: FrameConvolution, second: FrameConvolution, windows: torch.Tensor) -> bool:
    """Whether :func:`gelu_convolutions` is the faster way for windows [N, inputs, frames]: of several, with
    whole tiles of outputs, on Hopper, in 16 bits.
    """
    even = windows.shape[2] % 2 == 0
    return (
        len(windows) >= LEAST_WINDOWS
        and even
        and all(reads_up(conv.in_channels, conv.out_channels, conv.weight) for conv in (first, second))
    )


def gelu_convolutions(
    first: FrameConvolution, second: FrameConvolution, windows: torch.Tensor
) -> torch.Tensor:
    """GELU of two convolutions, the second of which halves the frames: [N, inputs, frames] → [N, frames / 2,
    outputs]. What a product reads for one frame and for the next one overlaps in memory: nothing is copied
    between, and GELU ends the products.
    """
    count, inputs, frames = windows.shape
    padded = windows.new_zeros(count * (frames + 2) + 2, inputs)
    padded[2:].view(count, frames + 2, inputs)[:, :frames] = windows.transpose(1, 2)
    rows = padded.as_strided((count * (frames + 2), WIDTH * inputs), (inputs, 1))
    hidden = prompt_up(rows, _by_frame(first), _bias(first))
    size = hidden.shape[1]
    # The rows before a window's first frame, and after its last one.
    hidden.view(count, frames + 2, size)[:, :: frames + 1] = 0
    rows = hidden.as_strided((count * (frames + 2) // 2 - 1, WIDTH * size), (2 * size, 1))
    hidden = prompt_up(rows, _by_frame(second), _bias(second))
    size = hidden.shape[1]
    return hidden.as_strided((count, frames // 2, size), ((frames + 2) // 2 * size, size, 1))


def _by_frame(convolution: FrameConvolution) -> torch.Tensor:
    """[outputs, WIDTH * inputs], a frame's inputs together."""
    return convolution.weight.transpose(1, 2).flatten(1)


def _bias(convolution: FrameConvolution) -> torch.Tensor:
    assert convolution.bias is not None
    return convolution.bias
