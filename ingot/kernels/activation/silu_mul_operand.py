"""SiLU whose result has its columns in the operand's order, for products that take it so.

x = silu_mul_operand(gate_up)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ingot.kernels.activation.gated_mlp import Gate, expect_silu_mul, silu_mul_reference, silu_mul_triton
from ingot.kernels.kernel_checks import runs_on_gpu
from ingot.kernels.rows.operand_rows import OperandRows, operand_rows
from ingot.kernels.rows.row_endings import OperandOrder


def silu_mul_operand_triton(
    gate_up: torch.Tensor, tiles: Mapping[str, int] | None = None, activation: Gate = "silu"
) -> OperandRows:
    """Launch the kernel; arguments as in :func:`silu_mul_operand`, unchecked."""
    return OperandRows(silu_mul_triton(gate_up, tiles, activation, ordered=True))


def silu_mul_operand(
    gate_up: torch.Tensor, tiles: Mapping[str, int] | None = None, activation: Gate = "silu"
) -> OperandRows:
    """``silu_mul`` whose result has its columns in the operand's order; arguments as there, I a multiple of
    32.

    Raises:
        KernelArgumentError: a shape, dtype or stride that the kernel cannot take.
    """
    expect_silu_mul(gate_up)
    OperandOrder().expect(gate_up.shape[1] // 2, gate_up)
    if runs_on_gpu(gate_up):
        return silu_mul_operand_triton(gate_up, tiles, activation)
    return operand_rows(silu_mul_reference(gate_up, activation))
