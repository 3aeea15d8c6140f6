"""Token and position embeddings; a table may stay in the host's memory.

Embedding(vocab_size, hidden_size, ctx)(input_ids)
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from ingot.errors import OutOfMemoryError
from ingot.kernels.weight.host_rows import host_rows
from ingot.layers.build_context import BuildContext, empty_weight


class Embedding(nn.Module):
    """One row of ``weight`` [rows, size] per id in ``dtype``, times ``scale``, rounded to it: the table's, or
    what the table ``computes_in``.
    """

    def __init__(self, rows: int, size: int, ctx: BuildContext, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.computes_in: torch.dtype | None = None
        self.weight = empty_weight(rows, size, dtype=ctx.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        return self.computes_in or self.weight.dtype

    def keep_on_host(self) -> None:
        """Move the weight into pinned memory of the host; one that is there stays. Raises as ``pinned``."""
        if self.weight.device.type != "cpu":
            self.weight = nn.Parameter(pinned(self.weight), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 → [T, size]."""
        near = self.weight.device == ids.device
        found = (F.embedding(ids, self.weight) if near else host_rows(self.weight, ids)).to(self.dtype)
        return found if self.scale == 1 else found.mul_(rounded_scale(self.scale, found.dtype))


def pinned(table: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory of the host, which a GPU reads at its own address.

    Raises:
        OutOfMemoryError: the system does not give so much of it.
    """
    try:
        return torch.empty(table.shape, dtype=table.dtype, device="cpu", pin_memory=True).copy_(table)
    except RuntimeError as error:
        raise OutOfMemoryError(
            "the embedding does not fit the host's pinned memory",
            seen=f"{table.nbytes} bytes: {str(error).splitlines()[0]}",
            fix="leave out `embedding`, or stop other processes that pin memory",
        ) from None


@cache
def rounded_scale(scale: float, dtype: torch.dtype) -> float:
    """The scale as a value of ``dtype``."""
    return torch.tensor(scale, dtype=dtype, device="cpu").item()
