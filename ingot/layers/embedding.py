"""Token and position embeddings.

Embedding(vocab_size, hidden_size, ctx)(input_ids)
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from ingot.layers.build_context import BuildContext, empty_weight


class Embedding(nn.Module):
    """One row of ``weight`` [rows, size] per id, times ``scale``, rounded to its dtype."""

    def __init__(self, rows: int, size: int, ctx: BuildContext, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.weight = empty_weight(rows, size, dtype=ctx.dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 → [T, size]."""
        found = F.embedding(ids, self.weight)
        return found if self.scale == 1 else found.mul_(rounded_scale(self.scale, found.dtype))


@cache
def rounded_scale(scale: float, dtype: torch.dtype) -> float:
    """The scale as a value of ``dtype``."""
    return torch.tensor(scale, dtype=dtype, device="cpu").item()
