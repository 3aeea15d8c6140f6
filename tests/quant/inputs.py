"""Weights and inputs as language models have them: a few loud channels, neighbours that move together.

Owns nothing but seeds.
"""

from __future__ import annotations

import torch


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
