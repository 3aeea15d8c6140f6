"""Convolutions over frames against the definition in float64."""

from __future__ import annotations

import pytest
import torch

from ingot.layers.encoder_blocks.convolution import FrameConvolution


@pytest.mark.parametrize(
    ("count", "inputs", "outputs", "frames"), [(1, 3, 5, 1), (3, 8, 4, 7), (2, 5, 6, 40)]
)
@pytest.mark.parametrize("stride", [1, 2])
def test_frames_follow_the_definition(
    count: int, inputs: int, outputs: int, frames: int, stride: int
) -> None:
    torch.manual_seed(frames)
    conv = FrameConvolution(inputs, outputs, stride, torch.float32)
    x = torch.randn(count, inputs, frames)
    with torch.no_grad():
        found = conv(x)
    weight, bias = conv.weight.detach().double(), conv.bias
    assert bias is not None
    for n in range(count):
        for place in range(-(-frames // stride)):
            wanted = bias.detach().double().clone()
            for k in range(3):
                frame = place * stride + k - 1
                if 0 <= frame < frames:
                    wanted += weight[:, :, k] @ x[n, :, frame].double()
            torch.testing.assert_close(found[n, :, place].double(), wanted, rtol=1e-5, atol=1e-5)
    assert found.shape == (count, outputs, -(-frames // stride))
