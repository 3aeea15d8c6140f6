"""The end of a product split along its columns, and the norm after it: partial sums, bias, residual, norm.

s = cast(sum of parts + bias + residual); y = norm(s), an RMSNorm or, with a shift, a LayerNorm. Parts are
summed in their order, so a row's bits never change; exact int32 sums are scaled here, once. In the same
kernel y may end in any form of rows (row_endings.py).

    y, hidden = sum_norm(parts, hidden, weight, 1e-6)
    x8, hidden = sum_norm(parts, hidden, weight, 1e-6, ending=InInt8())
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ingot.kernels.kernel_checks import (
    expect,
    expect_range,
    expect_rows,
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
    """Tile choices for an H200: 4 elements per thread."""
    warps = min(max(next_power_of_two(hidden) // 128, 1), 32)
    return {"num_warps": warps, "OVERLAP": 2 if overlaps(device) else 1}


def sum_norm_reference(
    parts: Parts,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    ending: Ending = AS_THEY_ARE,
    shift: torch.Tensor | None = None,
) -> tuple[Any, torch.Tensor]:
    """The PyTorch reference of :func:`sum_norm`."""
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
        parts: of :func:`small_linear_parts` ([S, M, H] fp32, contiguous) or :func:`int8_linear_parts`.
        residual: [M, H] fp16, bf16 or fp32; H up to 16384.
        weight: [H], dtype of residual or fp32.
        eps: added to the mean square.
        bias: [H] or None, dtype of residual or fp32.
        tiles: ``num_warps``, ``OVERLAP`` (launch_overlap.py).
        ending: the form of y, equal to ``ending.of(y)``.
        shift: [H], dtype of residual: the bias of a LayerNorm; None: the norm is an RMSNorm.

    Returns:
        y [M, H] in that form, and s [M, H], dtype of residual.
    """
    _expect(parts, residual, bias)
    expect_norm_weight("weight", weight, residual, shift)
    expect_ending(ending, residual.shape[1], residual)
    if runs_on_gpu(residual):
        choice = merge_tiles(default_tiles(residual.shape[1], residual.device), tiles)
        return launch_norm(parts, weight, eps, residual, bias, ending, choice, shift)
    return sum_norm_reference(parts, residual, weight, eps, bias, ending, shift)


def _expect(parts: Parts, residual: torch.Tensor, bias: torch.Tensor | None) -> None:
    expect_rows("residual", residual)
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
