"""The end of a product split along its columns, and the RMSNorm after it: partial sums, bias, residual, norm.

Owns the formula s = cast(sum of parts + bias + residual); y = cast(s / sqrt(mean(s^2) + eps)) * weight,
rounded as in rms_norm.py. The parts are summed in their order, so that a row's bits never change. Knows no
model.

    y, hidden = sum_norm(parts, hidden, weight, 1e-6)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ingot.kernels.checks import (
    expect,
    expect_float,
    expect_range,
    merge_tiles,
    next_power_of_two,
    runs_on_gpu,
)
from ingot.kernels.overlap import launch_options, overlaps, start_next, wait_for_previous
from ingot.kernels.rms_norm import MAX_HIDDEN, rms_norm_reference


@triton.jit
def sum_norm_kernel(
    parts_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    rows: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    SPLITS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One row a program."""
    start_next(OVERLAP)
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_H)
    inside = cols < HIDDEN
    # Constants: asked for before the wait.
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAP)
    residual = tl.load(residual_ptr + row * residual_stride + cols, mask=inside, other=0.0)
    products = tl.zeros([BLOCK_H], dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        products += tl.load(parts_ptr + (split * rows + row) * HIDDEN + cols, mask=inside, other=0.0)
    s = (products + (total + residual.to(tl.float32))).to(y_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * HIDDEN + cols, s, mask=inside)
    s = s.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(s * s, axis=0) / HIDDEN + eps)
    normed = (s * rstd).to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row * HIDDEN + cols, (normed * weight).to(y_ptr.dtype.element_ty), mask=inside)


def default_tiles(hidden: int, device: torch.device) -> dict[str, int]:
    """Tile choices for an H200: 4 elements a thread."""
    warps = min(max(next_power_of_two(hidden) // 128, 1), 32)
    return {"num_warps": warps, "OVERLAP": 2 if overlaps(device) else 1}


def sum_norm_triton(
    parts: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; arguments as in :func:`sum_norm`, unchecked."""
    splits, rows, hidden = parts.shape
    y = torch.empty((rows, hidden), dtype=residual.dtype, device=parts.device)
    total = torch.empty_like(y)
    choice = merge_tiles(default_tiles(hidden, parts.device), tiles)
    if y.numel():
        sum_norm_kernel[(rows,)](
            parts,
            residual,
            bias,
            weight,
            y,
            total,
            rows,
            residual.stride(0),
            eps,
            SPLITS=splits,
            HIDDEN=hidden,
            BLOCK_H=next_power_of_two(hidden),
            OVERLAP=choice["OVERLAP"],
            **launch_options(choice, parts.device),
        )
    return y, total


def sum_norm_reference(
    parts: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The PyTorch twin; arguments as in :func:`sum_norm`."""
    total = parts.sum(dim=0) + residual.float()
    if bias is not None:
        total = total + bias.float()
    y, _ = rms_norm_reference(total.to(residual.dtype), weight, eps)
    return y, total.to(residual.dtype)


def sum_norm(
    parts: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = cast(sum of parts + bias + residual); y = cast(s / sqrt(mean(s^2) + eps)) * weight.

    Args:
        parts: [S, M, H] fp32, contiguous: the partial products of :func:`small_linear_parts`.
        residual: [M, H] fp16, bf16 or fp32; H up to 16384.
        weight: [H], dtype of residual.
        eps: added to the mean square.
        bias: [H] or None, dtype of residual.
        tiles: ``num_warps``, ``OVERLAP`` (as in overlap.py).

    Returns:
        y [M, H] and s [M, H], dtype of residual.

    Raises:
        KernelArgumentError: a shape, dtype, device or stride that the kernel cannot take.
    """
    expect_float("residual", residual)
    expect("residual", residual, (None, None), like=residual)
    expect_range("the hidden size", residual.shape[1], 1, MAX_HIDDEN)
    expect("parts", parts, (None, *residual.shape), like=residual, dtype=torch.float32)
    expect("weight", weight, (residual.shape[1],), like=residual)
    if bias is not None:
        expect("bias", bias, (residual.shape[1],), like=residual)
    if runs_on_gpu(parts):
        return sum_norm_triton(parts.contiguous(), residual, weight, eps, bias, tiles)
    return sum_norm_reference(parts, residual, weight, eps, bias)
