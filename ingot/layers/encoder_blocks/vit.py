"""The vision transformer: patches of a picture, a class token, positions, pre-norm layers.

seen = VisionTransformer(stack, patch_size=14, grid=16, ctx=ctx)(pixels, forward_pass)   # [N * 257, size]
Source: EVA (arXiv:2211.07636) as BLIP-2 uses it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ingot.config.encoder_config import StackConfig
from ingot.layers.build_context import BuildContext, empty_weight
from ingot.layers.embedding import Embedding
from ingot.layers.encoder_blocks.encoder import EncoderStack
from ingot.layers.encoder_pass import MODULE_BY_MODULE, EncoderPass


class PatchEmbedding(nn.Conv2d):
    """Non-overlapping patches as rows of a matrix product: cuDNN would round fp32 to TF32."""

    def __init__(self, size: int, patch_size: int, dtype: torch.dtype) -> None:
        super().__init__(3, size, patch_size, patch_size, dtype=dtype)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """[N, 3, H, W] → [N, patches, size], row by row."""
        side = self.kernel_size[0]
        patches = pixels.unfold(2, side, side).unfold(3, side, side)  # [N, 3, H / side, W / side, side, side]
        rows = patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return F.linear(rows, self.weight.flatten(1), self.bias)


class VisionTransformer(nn.Module):
    """[N, 3, side, side] → [N * (1 + grid²), size], each picture's class token first."""

    def __init__(self, stack: StackConfig, patch_size: int, grid: int, ctx: BuildContext) -> None:
        super().__init__()
        size = stack.hidden_size
        self.patch_embedding = PatchEmbedding(size, patch_size, ctx.dtype)
        self.class_embedding = empty_weight(size, dtype=ctx.dtype)
        self.embed_positions = Embedding(1 + grid**2, size, ctx)
        self.layers = EncoderStack(stack, ctx.at("layers"))

    def forward(self, pixels: torch.Tensor, forward_pass: EncoderPass = MODULE_BY_MODULE) -> torch.Tensor:
        first = self.class_embedding.expand(len(pixels), 1, -1)
        hidden = torch.cat([first, self.patch_embedding(pixels)], dim=1) + self.embed_positions.weight
        found: torch.Tensor = self.layers(hidden.flatten(0, 1), len(pixels), forward_pass)
        return found
