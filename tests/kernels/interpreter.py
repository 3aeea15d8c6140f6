"""Two gaps of Triton's interpreter in bfloat16, filled, so that its numbers are those of a GPU.

Triton 3.6 to 3.9 truncate fp32 to bf16 where a GPU rounds, and multiply the bit patterns of bf16 matrices.

    fill_bfloat16_gaps(monkeypatch)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def fill_bfloat16_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round when fp32 becomes bf16; widen bf16 operands of a matrix product."""
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def rounding_convert(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            rounded = torch.from_numpy(np.array(data, dtype=np.float32)).bfloat16()
            return rounded.view(torch.int16).numpy().view(np.uint16)
        return convert(data, source, target, mode)

    def widening_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, _widened(a), _widened(b), *rest)

    monkeypatch.setattr(interpreter, "_convert_float", rounding_convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", widening_dot)


def _widened(operand: Any) -> Any:
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    wide = (operand.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)


def order_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum every element of a matrix product in one order, wherever it stands and however large the tile is.

    As a GPU's tensor cores do; the interpreter's own matrix library picks its order by shape and place.
    """

    def ordered_dot(self: Any, a: Any, b: Any, acc: Any, *rest: Any) -> Any:
        left, right = (_widened(operand).data.astype(np.float32) for operand in (a, b))
        total = acc.data.copy()
        for k in range(left.shape[1]):
            total += left[:, k : k + 1] * right[k : k + 1]
        return interpreter.TensorHandle(total, acc.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", ordered_dot)
