"""RMSNorm whose result is in 8 bits, for the products that take it so.

Owns the way from a norm's result to ``Int8Rows``: what rms_norm.py computes, rounded to the dtype as there,
is quantized by the rule of int8_rows.py within the same kernel. Knows no model.

    x8, residual = rms_norm_int8(x, weight, 1e-6, residual)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ingot.kernels.checks import expect_static, runs_on_gpu
from ingot.kernels.norm.rms_norm import expect_norm, launch_rms_norm, rms_norm_reference
from ingot.kernels.rows.int8_round import row_scales
from ingot.kernels.rows.int8_rows import Int8Rows, quantize_rows


def rms_norm_int8_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    static: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> tuple[Int8Rows, torch.Tensor]:
    """Launch the kernel; arguments as in :func:`rms_norm_int8`, unchecked."""
    values = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = row_scales(x.shape[0], static, x.device)
    s = launch_rms_norm(x, weight, eps, residual, values, scales, static is not None, tiles)
    return Int8Rows(values, scales), s


def rms_norm_int8_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    static: torch.Tensor | None = None,
) -> tuple[Int8Rows, torch.Tensor]:
    """The PyTorch twin; arguments as in :func:`rms_norm_int8`."""
    y, s = rms_norm_reference(x, weight, eps, residual)
    return quantize_rows(y, static=static), s


def rms_norm_int8(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    static: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> tuple[Int8Rows, torch.Tensor]:
    """``quantize_rows(rms_norm(x, weight, eps, residual))``, the same numbers, in one kernel.

    Args:
        x, weight, eps, residual, tiles: as of :func:`rms_norm`.
        static: fp32 [1], one scale for all rows; None: a scale a row.

    Returns:
        y [T, H] in 8 bits, and s [T, H] = x + residual (x itself without ``residual``).

    Raises:
        KernelArgumentError: a shape, dtype, device or stride that the kernel cannot take.
    """
    expect_norm(x, weight, residual)
    expect_static(static, x)
    if runs_on_gpu(x):
        return rms_norm_int8_triton(x, weight, eps, residual, static, tiles)
    return rms_norm_int8_reference(x, weight, eps, residual, static)
