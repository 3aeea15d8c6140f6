"""What a linear scheme does to its input, and what its products hold while they run.

Owns the part of ``LinearScheme`` (schemes.py) that schemes share whose activations keep their dtype, and the
bytes of the CPU's integer products. Knows no layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from ingot.kernels.weight.stored_weight import PIECE

Tensors = Mapping[str, torch.Tensor | None]

PIECE_BYTES = 8  # a value of a weight's piece: its part of the words, the quantized value, the product
_ROUNDING = 3  # copies of an input that rounding it on a CPU holds


class KeptActivations:
    """Of schemes whose products take activations as they are."""

    rounds: ClassVar[bool] = False
    by_place: ClassVar[bool] = False
    packs_fp32: ClassVar[bool] = False
    cancels: ClassVar[bool] = False

    def rounded(self, x: torch.Tensor, tensors: Tensors, *, flips: bool = False) -> torch.Tensor:
        """The input itself."""
        return x

    def workspace_bytes(
        self, out_features: int, in_features: int, tokens: int, dtype: torch.dtype, *, kernels: bool
    ) -> int:
        """Of a weight that is widened for a step; a CPU widens a piece of it."""
        values = out_features * in_features
        return values * dtype.itemsize if kernels else min(values, PIECE) * PIECE_BYTES


def integer_bytes(own: int, out_features: int, in_features: int, tokens: int, *, kernels: bool) -> int:
    """Bytes of a product in 8 bits: of its ``own`` input and weight, and on a CPU of its temporaries."""
    if kernels:
        return own
    rows = min(out_features, max(1, PIECE // in_features))
    sums = min(in_features, 1024) * (tokens + rows) * 4 + tokens * (4 * rows + out_features) * 4
    return max(own + sums, own + _ROUNDING * tokens * in_features * 4)
