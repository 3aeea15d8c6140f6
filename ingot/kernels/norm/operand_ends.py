"""Norms and SiLU whose results have their columns in the operand's order, for products that take them so.

Owns the way to ``OperandRows``: what rms_norm.py, sum_norm.py and gated_mlp.py compute, stored in another
order by the same kernels. Knows no model.

    x, residual = rms_norm_operand(x, weight, 1e-6)
    x, residual = sum_norm_operand(parts, residual, weight, 1e-6, bias)
    x = silu_mul_operand(gate_up)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ingot.kernels.activation.gated_mlp import Gate, expect_silu_mul, silu_mul_reference, silu_mul_triton
from ingot.kernels.checks import KernelArgumentError, runs_on_gpu
from ingot.kernels.norm.rms_norm import expect_norm, launch_rms_norm, rms_norm_reference
from ingot.kernels.norm.sum_norm import Parts, expect_sum_norm, launch_sum_norm, sum_norm_reference
from ingot.kernels.rows.operand_rows import OPERAND_SPAN, OperandRows, operand_rows


def rms_norm_operand_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> tuple[OperandRows, torch.Tensor]:
    """Launch the kernel; arguments as in :func:`rms_norm_operand`, unchecked."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return OperandRows(y), launch_rms_norm(x, weight, eps, residual, y, None, False, tiles, ordered=True)


def rms_norm_operand(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> tuple[OperandRows, torch.Tensor]:
    """``rms_norm`` whose y has its columns in the operand's order; arguments as there, H a multiple of 32.

    Raises:
        KernelArgumentError: a shape, dtype, device or stride that the kernel cannot take.
    """
    expect_norm(x, weight, residual)
    expect_spans(x.shape[1])
    if runs_on_gpu(x):
        return rms_norm_operand_triton(x, weight, eps, residual, tiles)
    y, s = rms_norm_reference(x, weight, eps, residual)
    return operand_rows(y), s


def sum_norm_operand_triton(
    parts: Parts,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> tuple[OperandRows, torch.Tensor]:
    """Launch the kernel; arguments as in :func:`sum_norm_operand`, unchecked."""
    y = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    s = launch_sum_norm(parts, residual, weight, eps, bias, y, None, False, tiles, ordered=True)
    return OperandRows(y), s


def sum_norm_operand(
    parts: Parts,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> tuple[OperandRows, torch.Tensor]:
    """``sum_norm`` whose y has its columns in the operand's order; arguments as there, H a multiple of 32.

    Raises:
        KernelArgumentError: a shape, dtype, device or stride that the kernel cannot take.
    """
    expect_sum_norm(parts, residual, weight, bias)
    expect_spans(residual.shape[1])
    if runs_on_gpu(residual):
        return sum_norm_operand_triton(parts, residual, weight, eps, bias, tiles)
    y, s = sum_norm_reference(parts, residual, weight, eps, bias)
    return operand_rows(y), s


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
    expect_spans(gate_up.shape[1] // 2)
    if runs_on_gpu(gate_up):
        return silu_mul_operand_triton(gate_up, tiles, activation)
    return operand_rows(silu_mul_reference(gate_up, activation))


def expect_spans(width: int) -> None:
    """Raise unless the operand's order can take rows of this width."""
    if width % OPERAND_SPAN:
        raise KernelArgumentError(
            "the operand's order needs whole spans of columns",
            seen=f"{width} columns",
            allowed=f"a multiple of {OPERAND_SPAN}",
        )
