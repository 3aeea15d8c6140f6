"""The forms in which a kernel's rows end: as they are, in the operand's order, or in 8 bits.

``BlockSteps`` (block_rows.py) is an ending too.

    rows, arguments = ending.launched(num_rows, width, like=x)
    kernel[grid](..., **arguments)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
import triton.language as tl

from ingot.kernels.kernel_checks import KernelArgumentError, expect_static
from ingot.kernels.rows.int8_round import (
    as_wide,
    block_numbers,
    row_scales,
    store_int8_groups,
    store_int8_row,
)
from ingot.kernels.rows.int8_rows import Int8Rows, quantize_rows
from ingot.kernels.rows.operand_rows import OPERAND_SPAN, OperandRows, operand_place, operand_rows

Rows = torch.Tensor | OperandRows | Int8Rows
WHOLE_ROWS: dict[str, Any] = {
    "scale_ptr": None, "order_ptr": None, "step_ptr": None, "zero_ptr": None,
    "STATIC": False, "ORDERED": False, "GROUP": 0, "BITS": 0,
}  # fmt: skip


class Ending(Protocol):
    """What happens to a kernel's rows before they are stored."""

    def expect(self, width: int, like: torch.Tensor) -> None:
        """Raise unless rows [width] on the device of ``like`` can end so."""
        ...

    def launched(self, num_rows: int, width: int, like: torch.Tensor) -> tuple[Rows, dict[str, Any]]:
        """(what the kernel writes, its arguments) for rows in the dtype of ``like``: those of
        ``WHOLE_ROWS``, ``y_ptr`` and ``WIDTH``, the written columns.
        """
        ...

    def of(self, y: torch.Tensor) -> Rows:
        """The PyTorch reference: rows y [M, width] in this form."""
        ...


class AsTheyAre:
    """Rows in their dtype."""

    def expect(self, width: int, like: torch.Tensor) -> None:
        """Any width."""

    def launched(self, num_rows: int, width: int, like: torch.Tensor) -> tuple[Rows, dict[str, Any]]:
        y = torch.empty((num_rows, width), dtype=like.dtype, device=like.device)
        return y, WHOLE_ROWS | {"y_ptr": y, "WIDTH": width}

    def of(self, y: torch.Tensor) -> Rows:
        return y


AS_THEY_ARE = AsTheyAre()


@dataclass(frozen=True, slots=True)
class OperandOrder:
    """Columns in the operand's order (operand_rows.py); attention's output can end so too."""

    def expect(self, width: int, like: torch.Tensor) -> None:
        """As of ``Ending``: columns are whole spans."""
        if width % OPERAND_SPAN:
            what = "the operand's order needs whole spans of columns"
            raise KernelArgumentError(what, seen=f"{width} columns", allowed=f"a multiple of {OPERAND_SPAN}")

    def launched(self, num_rows: int, width: int, like: torch.Tensor) -> tuple[Rows, dict[str, Any]]:
        y = torch.empty((num_rows, width), dtype=like.dtype, device=like.device)
        return OperandRows(y), WHOLE_ROWS | {"y_ptr": y, "ORDERED": True, "WIDTH": width}

    def of(self, y: torch.Tensor) -> Rows:
        return operand_rows(y)


@dataclass(frozen=True, slots=True)
class InInt8:
    """Rows in 8 bits: one scale per row, or per ``group`` of its columns, or a ``static`` one, fp32 [1], for
    all (int8_rows.py); ``dtype`` is int8 or e4m3.
    """

    static: torch.Tensor | None = None
    dtype: torch.dtype = torch.int8
    group: int = 0

    def expect(self, width: int, like: torch.Tensor) -> None:
        """As of ``Ending``: a static scale is [1], and groups, a power of two, fill the width."""
        expect_static(self.static, like)
        if self.group and (width % self.group or self.static is not None):
            what = "groups must divide the width and have scales of their own"
            raise KernelArgumentError(what, seen=self.group, allowed=f"a divisor of {width}")

    def launched(self, num_rows: int, width: int, like: torch.Tensor) -> tuple[Rows, dict[str, Any]]:
        values = torch.empty((num_rows, width), dtype=self.dtype, device=like.device)
        groups = width // self.group if self.group else 1
        scales = row_scales(num_rows * groups, self.static, like.device)
        own = {"y_ptr": values, "scale_ptr": scales, "STATIC": self.static is not None, "WIDTH": width}
        rows = Int8Rows(values, scales.view(num_rows, groups) if self.group else scales, self.group)
        return rows, WHOLE_ROWS | own | {"GROUP": self.group}

    def of(self, y: torch.Tensor) -> Rows:
        return quantize_rows(y, self.group, self.static, self.dtype)


@triton.jit
def store_row(
    y: tl.tensor,
    y_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    order: tl.tensor,
    step: tl.tensor,
    zero: tl.tensor,
    row: tl.tensor,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    STATIC: tl.constexpr,
    ORDERED: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Store a row [BLOCK] of COUNT values, already rounded to their dtype, at ``y_ptr + row * WIDTH``.

    BITS: quantized by blocks, with ``step`` and ``zero`` of each column, after ``order`` if there is one;
    ``scale_ptr``: in 8 bits, with GROUP by so many columns; ORDERED: in the operand's order.
    """
    cols = tl.arange(0, y.shape[0])
    if BITS > 0:
        wide = y.to(tl.float32)
        if order is not None:
            wide = tl.gather(wide, order, axis=0)
        values = block_numbers(wide, cols, step, zero, COUNT, BITS)
        tl.store(as_wide(y_ptr + row * WIDTH + cols, y.dtype), values, mask=cols < WIDTH)
    elif scale_ptr is not None and GROUP > 0:
        own = scale_ptr + row.to(tl.int64) * (COUNT // GROUP)
        store_int8_groups(y.to(tl.float32), y_ptr + row * WIDTH, own, COUNT, GROUP, y.dtype)
    elif scale_ptr is not None:
        inside = cols < COUNT
        store_int8_row(y.to(tl.float32), y_ptr + row * WIDTH, scale_ptr, row, inside, STATIC, y.dtype)
    else:
        tl.store(y_ptr + row * WIDTH + operand_place(cols, ORDERED), y, mask=cols < COUNT)
