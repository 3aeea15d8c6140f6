"""The end of a product split along its columns, and the norm after it: partial sums, bias, residual, norm.

Owns the formula s = cast(sum of parts + bias + residual); y = norm(s), rounded as in rms_norm.py, or with a
shift as in layer_norm.py. The parts are summed in their order, so that a row's bits never change; exact sums
of 8-bit numbers are scaled here, once. y ends in any form of rows (rows/endings.py). Knows no model.

    y, hidden = sum_norm(parts, hidden, weight, 1e-6)
    x8, hidden = sum_norm(parts, hidden, weight, 1e-6, ending=InInt8())
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ingot.kernels.kernel_checks import (
    expect,
    expect_float,
    expect_range,
    merge_tiles,
    next_power_of_two,
    runs_on_gpu,
)
from ingot.kernels.launch_overlap import overlaps
from ingot.kernels.norm.layer_norm import layer_norm_reference
from ingot.kernels.norm.norm_kernel import MAX_HIDDEN, Parts, expect_ending, expect_norm_weight, launch_norm
from ingot.kernels.norm.rms_norm import rms_norm_reference
from ingot.kernels.rows.int8_rows import Int8Sums
from ingot.kernels.rows.row_endings import AS_THEY_ARE, Ending


def default_tiles(hidden: int, device: torch.device) -> dict[str, int]:
    """Tile choices for an H200: 4 elements a thread."""
    warps = min(max(next_power_of_two(hidden) // 128, 1), 32)
    return {"num_warps": warps, "OVERLAP": 2 if overlaps(device) else 1}


def sum_norm_triton(
    parts: Parts,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
    ending: Ending = AS_THEY_ARE,
    shift: torch.Tensor | None = None,
) -> tuple[Any, torch.Tensor]:
    """Launch the kernel; arguments as in :func:`sum_norm`, unchecked."""
    choice = merge_tiles(default_tiles(residual.shape[1], residual.device), tiles)
    return launch_norm(parts, weight, eps, residual, bias, ending, choice, shift)


def sum_norm_reference(
    parts: Parts,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    ending: Ending = AS_THEY_ARE,
    shift: torch.Tensor | None = None,
) -> tuple[Any, torch.Tensor]:
    """The PyTorch reference; arguments as in :func:`sum_norm`."""
    products = parts.product() if isinstance(parts, Int8Sums) else parts.sum(dim=0)
    total = products + residual.float()
    if bias is not None:
        total = total + bias.float()
    s = total.to(residual.dtype)
    if shift is not None:
        return layer_norm_reference(s, weight, shift, eps, None, ending)
    return rms_norm_reference(s, weight, eps, None, ending)


def sum_norm(
    parts: Parts,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
    ending: Ending = AS_THEY_ARE,
    shift: torch.Tensor | None = None,
) -> tuple[Any, torch.Tensor]:
    """s = cast(sum of parts + bias + residual); y = :func:`rms_norm` of s, or :func:`layer_norm`.

    Args:
        parts: [S, M, H] fp32, contiguous: the partial products of :func:`small_linear_parts`; or those of
            :func:`int8_linear_parts`.
        residual: [M, H] fp16, bf16 or fp32; H up to 16384.
        weight: [H], dtype of residual or fp32.
        eps: added to the mean square.
        bias: [H] or None, dtype of residual or fp32.
        tiles: ``num_warps``, ``OVERLAP`` (as in launch_overlap.py).
        ending: what becomes of y: the same numbers as ``ending.of(y)``.
        shift: [H], dtype of residual: the bias of a LayerNorm; None: the norm is an RMSNorm.

    Returns:
        y [M, H] as its ending makes it, and s [M, H], dtype of residual.

    Raises:
        KernelArgumentError: a shape, dtype, device or stride that the kernel cannot take.
    """
    _expect(parts, residual, bias)
    expect_norm_weight("weight", weight, residual, shift)
    expect_ending(ending, residual.shape[1], residual)
    if runs_on_gpu(residual):
        return sum_norm_triton(parts, residual, weight, eps, bias, tiles, ending, shift)
    return sum_norm_reference(parts, residual, weight, eps, bias, ending, shift)


def _expect(parts: Parts, residual: torch.Tensor, bias: torch.Tensor | None) -> None:
    expect_float("residual", residual)
    expect("residual", residual, (None, None), like=residual)
    rows, hidden = residual.shape
    expect_range("the hidden size", hidden, 1, MAX_HIDDEN)
    if isinstance(parts, Int8Sums):
        expect("parts", parts.parts, (None, rows, hidden), like=residual, dtype=torch.int32)
        scales = parts.row_scales
        size = 1 if scales.numel() == 1 else rows
        expect("row scales", scales, (size,), like=residual, dtype=torch.float32)
        expect("weight scales", parts.weight_scales, (hidden,), like=residual, dtype=torch.float32)
    else:
        expect("parts", parts, (None, rows, hidden), like=residual, dtype=torch.float32)
    if bias is not None:
        wanted = torch.float32 if bias.dtype == torch.float32 else residual.dtype
        expect("bias", bias, (hidden,), like=residual, dtype=wanted)
