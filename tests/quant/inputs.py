"""Weights and inputs as language models have them: a few loud channels, neighbours that move together.

Owns nothing but seeds.
"""

from __future__ import annotations

import torch

from ingot.quant.methods.gptq import Compensated
from ingot.quant.methods.rounding import (
    CLIP_RATIOS,
    as_quantized,
    best_grid,
    dequantize,
    in_groups,
    value_dtype,
    weighed,
)
from ingot.quant.quantized_values import Quantized


def weights(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Normally distributed, unit output for unit input."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) / columns**0.5


def inputs(tokens: int, columns: int, seed: int = 0, loud: int = 4, gain: float = 20.0) -> torch.Tensor:
    """Correlated channels (an eighth as many sources, and noise), ``loud`` of them much larger."""
    generator = torch.Generator().manual_seed(seed + 1000)
    sources = torch.randn(tokens, max(columns // 8, 1), generator=generator)
    mixing = torch.randn(sources.shape[1], columns, generator=generator) / sources.shape[1] ** 0.5
    x = sources @ mixing + 0.3 * torch.randn(tokens, columns, generator=generator)
    places = torch.randperm(columns, generator=generator)[:loud]
    x[:, places] *= gain
    return x


def output_error(difference: torch.Tensor, hessian: torch.Tensor) -> float:
    """tr(E H Eᵀ) for E = W - Ŵ [N, K]: mean over tokens of |E x|² for H = mean of x·xᵀ."""
    wide = difference.to(hessian.dtype)
    return float((wide @ hessian * wide).double().sum())


def gptq_error(found: Compensated, weight: torch.Tensor, hessian: torch.Tensor) -> float:
    """Mean over tokens of the squared distance of the outputs."""
    near = dequantize(found.quantized)
    if found.order is not None:
        near = torch.empty_like(near).index_copy_(1, found.order, near)
    return output_error(weight.float() - near, hessian)


def shrunk(
    weight: torch.Tensor, bits: int, group: int = 0, importance: torch.Tensor | None = None
) -> Quantized:
    """``quantize``'s values in ranges shrunk as GPTQ's ``clip`` does; ``importance`` [K]: of columns."""
    blocks = in_groups(weight.float(), group)
    grid = best_grid(blocks, bits, True, torch.float16, CLIP_RATIOS, weighed(importance, group))
    values = grid.nearest(blocks).flatten(1)[:, : weight.shape[1]].to(value_dtype(bits, True))
    return as_quantized(values, grid.scales, grid.zeros, bits, group, True, torch.float16)
