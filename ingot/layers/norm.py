"""The norm modules: (branch, residual) → (normalised sum, sum).

hidden, residual = RMSNorm(4096, 1e-6, ctx)(delta, residual)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ingot.config.decoder_config import DecoderConfig
from ingot.config.kernel_plan import TileTable
from ingot.kernels.norm.layer_norm import layer_norm, layer_norm_behind
from ingot.kernels.norm.norm_kernel import Parts
from ingot.kernels.norm.rms_norm import rms_norm
from ingot.kernels.norm.sum_norm import sum_norm
from ingot.kernels.rows.row_endings import AS_THEY_ARE, Ending
from ingot.layers.build_context import BuildContext, empty_weight


class Norm(nn.Module):
    """What both norms share."""

    weight: nn.Parameter
    eps: float
    tiles: TileTable

    @property
    def shift(self) -> torch.Tensor | None:
        """The bias of a LayerNorm."""
        return None

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        tiles: Mapping[str, int] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual), both [T, size]; ``tiles`` override the plan's."""
        return self.ended(x, residual, self.tiles.at(x.shape[0], tiles))

    def ended(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        tiles: Mapping[str, int] | None,
        ending: Ending = AS_THEY_ARE,
    ) -> tuple[Any, torch.Tensor]:
        """The same in the form of an ending, without the plan's tiles."""
        if self.shift is None:
            return rms_norm(x, self.weight, self.eps, residual, tiles, ending)
        return layer_norm(x, self.weight, self.shift, self.eps, residual, tiles, ending)

    def of_parts(
        self,
        parts: Parts,
        residual: torch.Tensor,
        bias: torch.Tensor | None,
        ending: Ending = AS_THEY_ARE,
    ) -> tuple[Any, torch.Tensor]:
        """(norm(s), s), s = sum of a product's parts + bias + residual, rounded once."""
        return sum_norm(parts, residual, self.weight, self.eps, bias, ending=ending, shift=self.shift)


class RMSNorm(Norm):
    """x / rms(x) · weight, over the last dimension; ``wide``: the weight is fp32 in any dtype."""

    def __init__(self, size: int, eps: float, ctx: BuildContext, wide: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.tiles = ctx.plan.table("rms_norm", h=size)
        self.wide = wide
        self.weight = empty_weight(size, dtype=torch.float32 if wide else ctx.dtype)


class HeadNorm(nn.Module):
    """The RMSNorm weight of one head's channels, which the rotary kernel applies; ``wide`` as of RMSNorm."""

    def __init__(self, head_dim: int, ctx: BuildContext, wide: bool = False) -> None:
        super().__init__()
        self.wide = wide
        self.weight = empty_weight(head_dim, dtype=torch.float32 if wide else ctx.dtype)


def is_wide(module: nn.Module) -> bool:
    """Whether a module is a norm whose weight is fp32 in any dtype."""
    return isinstance(module, (RMSNorm, HeadNorm)) and module.wide


class LayerNorm(Norm):
    """(x - mean) / std · weight + bias, over the last dimension."""

    def __init__(self, size: int, eps: float, ctx: BuildContext) -> None:
        super().__init__()
        self.eps = eps
        self.tiles = ctx.plan.table("layer_norm", h=size)
        self.weight = empty_weight(size, dtype=ctx.dtype)
        self.bias = empty_weight(size, dtype=ctx.dtype)

    @property
    def shift(self) -> torch.Tensor | None:
        return self.bias

    def behind(
        self, x: torch.Tensor, lacking: tuple[torch.Tensor, ...], *, keeps: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(s), s), s = x + biases that products before it did not add; x unless it ``keeps`` s."""
        return layer_norm_behind(x, self.weight, self.bias, self.eps, lacking, keeps=keeps)


def make_norm(config: DecoderConfig, ctx: BuildContext) -> Norm:
    """The norm that the config names, over the hidden size."""
    if config.norm == "rms_norm":
        return RMSNorm(config.hidden_size, config.norm_eps, ctx, config.wide_norms)
    return LayerNorm(config.hidden_size, config.norm_eps, ctx)
