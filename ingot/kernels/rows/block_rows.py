"""Activations in whole numbers with a fixed step and zero for each block of columns (RPTQ).

Owns the form of the steps, and the rule that rounds by them. Knows no kernel: those that write such rows are
held against this file; products read them as ``Int8Rows`` with groups whose scales all rows share.

    x8 = quantize_in_blocks(x, steps)                     # [M, K] → int8 [M, whole blocks]
    y = int8_product(x8, weight, torch.float16, shift)    # the weight's columns in the same order, padded

x = (q - zero) · step. Products sum q; what zeros take from an output does not depend on x: ``shift``, with
the bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ingot.kernels.kernel_checks import KernelArgumentError, expect, expect_range
from ingot.kernels.rows.int8_rows import Int8Rows
from ingot.kernels.rows.row_endings import WHOLE_ROWS

BLOCKS = (16, 256)  # columns, the least and the most


@dataclass(frozen=True, slots=True)
class BlockSteps:
    """How a row [K] becomes numbers.

    Attributes:
        steps, zeros: fp32 [blocks]; zeros are whole.
        block: columns of a block; the last may be filled up.
        bits: 8 or 4: numbers are -2^(bits-1) … 2^(bits-1) - 1, one to a byte.
        order: int32 [K], column j is channel ``order[j]``; None: as they come.
    """

    steps: torch.Tensor
    zeros: torch.Tensor
    block: int
    bits: int
    order: torch.Tensor | None = None

    @property
    def low(self) -> int:
        """The lowest number."""
        return -(1 << (self.bits - 1))

    @property
    def high(self) -> int:
        """The highest number."""
        return (1 << (self.bits - 1)) - 1

    @property
    def width(self) -> int:
        """Columns of the numbers: whole blocks."""
        return self.steps.shape[0] * self.block

    def rows(self, values: torch.Tensor) -> Int8Rows:
        """Numbers int8 [M, width] with the steps as scales that all rows share."""
        return Int8Rows(values, self.steps.expand(values.shape[0], -1), self.block)

    def expect(self, width: int, like: torch.Tensor) -> None:
        """Raise unless these are steps of rows [width], as an ending of a kernel (row_endings.py)."""
        expect_steps(self, width, like)

    def launched(self, num_rows: int, width: int, like: torch.Tensor) -> tuple[Int8Rows, dict[str, Any]]:
        """As of ``Ending``; columns by ``order``, in whole blocks."""
        values = torch.empty((num_rows, self.width), dtype=torch.int8, device=like.device)
        own = {"y_ptr": values, "WIDTH": self.width, "GROUP": self.block, "BITS": self.bits}
        by_block = {"order_ptr": self.order, "step_ptr": self.steps, "zero_ptr": self.zeros}
        return self.rows(values), WHOLE_ROWS | own | by_block

    def of(self, y: torch.Tensor) -> Int8Rows:
        """As of ``Ending``."""
        return quantize_in_blocks(y, self)


def quantize_in_blocks(x: torch.Tensor, steps: BlockSteps) -> Int8Rows:
    """Activations x [M, K] of any float dtype; the rule that every kernel follows.

    Numbers are x · (1 / step), rounded to the nearest, ties to even, plus the zero, cut to the numbers that
    there are, all in fp32. Columns that fill the last block are 0.
    """
    wide = x.float() if steps.order is None else x.float()[:, steps.order.long()]
    missing = steps.width - x.shape[1]
    pieces = F.pad(wide, (0, missing)).unflatten(1, (-1, steps.block))
    exact = (pieces * (1.0 / steps.steps)[:, None]).round() + steps.zeros[:, None]
    values = exact.clamp(steps.low, steps.high).to(torch.int8).flatten(1)
    if missing:
        values[:, x.shape[1] :] = 0
    return steps.rows(values)


def expect_steps(steps: BlockSteps, width: int, like: torch.Tensor) -> None:
    """Raise unless the steps are ones of rows [width] on the device of ``like``."""
    if steps.bits not in (4, 8):
        raise KernelArgumentError("unsupported bit width", seen=steps.bits, allowed=[4, 8])
    expect_range("the block", steps.block, *BLOCKS)
    blocks = -(-width // steps.block)
    expect("steps", steps.steps, (blocks,), like=like, dtype=torch.float32)
    expect("zeros", steps.zeros, (blocks,), like=like, dtype=torch.float32)
    if steps.order is not None:
        expect("order", steps.order, (width,), like=like, dtype=torch.int32)
