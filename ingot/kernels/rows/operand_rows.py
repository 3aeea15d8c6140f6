"""Activations with their columns in the order in which packed words meet them in registers.

In a warpgroup's product a thread holds, of 16 columns of its left operand, two pairs of neighbours that lie
apart; packed words give it eight consecutive columns (stored_weight.py). So the right operand's columns
change places within 32. A kernel that ends in this order leaves rows as packed_direct.py multiplies them.

    y = operand_rows(x)                  # OperandRows
    y.natural()                          # x again
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

OPERAND_SPAN = 32  # columns within which they change places


@dataclass(frozen=True, slots=True)
class OperandRows:
    """Activations [M, K], K a multiple of 32.

    Attributes:
        values: fp16 or bf16 [M, K], rows contiguous; column c of 32 is column
            ``c // 2 % 4 * 8 + c // 16 * 4 + c // 8 % 2 * 2 + c % 2`` of x.
    """

    values: torch.Tensor

    def natural(self) -> torch.Tensor:
        """The rows [M, K] with their columns in natural order."""
        rows, width = self.values.shape
        spans = self.values.reshape(rows, width // OPERAND_SPAN, 2, 2, 4, 2)
        return spans.permute(0, 1, 4, 2, 3, 5).reshape(rows, width)


def operand_rows(x: torch.Tensor) -> OperandRows:
    """x [M, K] with its columns in the operand's order, in plain PyTorch."""
    rows, width = x.shape
    spans = x.reshape(rows, width // OPERAND_SPAN, 4, 2, 2, 2)
    return OperandRows(spans.permute(0, 1, 3, 4, 2, 5).reshape(rows, width))


@triton.jit
def operand_place(column: tl.tensor, ORDERED: tl.constexpr) -> tl.tensor:
    """Where each column of x is in the operand; without ORDERED the column itself."""
    place = column
    if ORDERED:
        place = (
            column // 32 * 32 + column // 4 % 2 * 16 + column // 2 % 2 * 8 + column // 8 % 4 * 2 + column % 2
        )
        place = tl.max_contiguous(tl.multiple_of(place, 2), 2)
    return place
