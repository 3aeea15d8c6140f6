"""Activations quantized with a static step and zero per block of columns (RPTQ): x = (q - zero) · step.

Kernels that write such rows are tested against this file; products read them as ``Int8Rows`` with groups
whose scales all rows share. Products sum q; what zeros subtract from an output does not depend on x:
``shift``, which joins the bias.

    x8 = quantize_in_blocks(x, steps)                     # [M, K] → int8 [M, whole blocks]
    y = int8_product(x8, weight, torch.float16, shift)    # the weight's columns in the same order, padded
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ingot.kernels.kernel_checks import KernelArgumentError, expect, expect_range
from ingot.kernels.rows.int8_rows import Int8Rows
from ingot.kernels.rows.row_endings import WHOLE_ROWS

BLOCKS = (16, 256)  # fewest and most columns


@dataclass(frozen=True, slots=True)
class BlockSteps:
    """How a row [K] is quantized.

    Attributes:
        steps, zeros: fp32 [blocks]; zeros are whole numbers.
        block: columns per block; the last may be padded.
        bits: 8 or 4: quantized values are -2^(bits-1) … 2^(bits-1) - 1, one per byte.
        order: int32 [K], column j is channel ``order[j]``; None: no reordering.
    """

    steps: torch.Tensor
    zeros: torch.Tensor
    block: int
    bits: int
    order: torch.Tensor | None = None

    @property
    def low(self) -> int:
        """The lowest quantized value."""
        return -(1 << (self.bits - 1))

    @property
    def high(self) -> int:
        """The highest quantized value."""
        return (1 << (self.bits - 1)) - 1

    @property
    def width(self) -> int:
        """Columns in whole blocks."""
        return self.steps.shape[0] * self.block

    def rows(self, values: torch.Tensor) -> Int8Rows:
        """Quantized values int8 [M, width] with the steps as scales that all rows share."""
        return Int8Rows(values, self.steps.expand(values.shape[0], -1), self.block)

    def expect(self, width: int, like: torch.Tensor) -> None:
        """As of ``Ending`` (row_endings.py)."""
        """Raise unless the steps fit rows [width] on the device of ``like``."""
        if self.bits not in (4, 8):
            raise KernelArgumentError("unsupported bit width", seen=self.bits, allowed=[4, 8])
        expect_range("the block", self.block, *BLOCKS)
        blocks = -(-width // self.block)
        expect("steps", self.steps, (blocks,), like=like, dtype=torch.float32)
        expect("zeros", self.zeros, (blocks,), like=like, dtype=torch.float32)
        if self.order is not None:
            expect("order", self.order, (width,), like=like, dtype=torch.int32)

    def fill(self, width: int) -> bool:
        """Whether rows [width] are whole blocks without an order, as attention's output must be."""
        return self.order is None and self.width == width

    def launched(self, num_rows: int, width: int, like: torch.Tensor) -> tuple[Int8Rows, dict[str, Any]]:
        """As of ``Ending``; columns by ``order``, in whole blocks."""
        values = torch.empty((num_rows, self.width), dtype=torch.int8, device=like.device)
        own = {"y_ptr": values, "WIDTH": self.width, "GROUP": self.block, "BITS": self.bits}
        by_block = {"order_ptr": self.order, "step_ptr": self.steps, "zero_ptr": self.zeros}
        return self.rows(values), WHOLE_ROWS | own | by_block

    def of(self, y: torch.Tensor) -> Int8Rows:
        return quantize_in_blocks(y, self)


def quantize_in_blocks(x: torch.Tensor, steps: BlockSteps) -> Int8Rows:
    """Quantize activations x [M, K] of any float dtype; the rule that every kernel follows.

    q = clamp(round(x · (1 / step)) + zero), ties to even, in fp32. Columns that pad the last block are 0.
    """
    wide = x.float() if steps.order is None else x.float()[:, steps.order.long()]
    missing = steps.width - x.shape[1]
    pieces = F.pad(wide, (0, missing)).unflatten(1, (-1, steps.block))
    exact = (pieces * (1.0 / steps.steps)[:, None]).round() + steps.zeros[:, None]
    values = exact.clamp(steps.low, steps.high).to(torch.int8).flatten(1)
    if missing:
        values[:, x.shape[1] :] = 0
    return steps.rows(values)
