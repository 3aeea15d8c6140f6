"""Token and position embeddings.

Owns the lookup of rows. Knows no tokenizer and no model.

    Embedding(vocab_size, hidden_size, ctx)(input_ids)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ingot.layers.context import BuildContext, empty_weight


class Embedding(nn.Module):
    """One row of ``weight`` [rows, size] an id."""

    def __init__(self, rows: int, size: int, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = empty_weight(rows, size, dtype=ctx.dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 → [T, size]."""
        return F.embedding(ids, self.weight)
