"""The end of a product split along its columns, and the RMSNorm after it: partial sums, bias, residual, norm.

Owns the formula s = cast(sum of parts + bias + residual); y = cast(s / sqrt(mean(s^2) + eps)) * weight,
rounded as in rms_norm.py. The parts are summed in their order, so that a row's bits never change; exact sums
of 8-bit numbers are scaled here, once. y may end in 8 bits, as in norm_int8.py. Knows no model.

    y, hidden = sum_norm(parts, hidden, weight, 1e-6)
    x8, hidden = sum_norm_int8(parts, hidden, weight, 1e-6)
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
    expect_static,
    merge_tiles,
    next_power_of_two,
    runs_on_gpu,
)
from ingot.kernels.norm.rms_norm import MAX_HIDDEN, expect_norm_weight, rms_norm_reference, weighted
from ingot.kernels.overlap import launch_options, overlaps, start_next, wait_for_previous
from ingot.kernels.rows.int8_round import row_scales, store_int8_row
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Sums, quantize_rows
from ingot.kernels.rows.operand_rows import operand_place

Parts = torch.Tensor | Int8Sums


@triton.jit
def summed_row(
    parts_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    row_scale_ptr: tl.tensor,
    weight_scale_ptr: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    residual_stride: tl.tensor,
    row_scale_stride: tl.tensor,
    SPLITS: tl.constexpr,
    HIDDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> tl.tensor:
    """s of columns ``cols``, rounded to the dtype of ``sum_ptr`` and stored there; zeros from HIDDEN on.

    Waits for the previous kernel, after it has asked for constants. Parts are int32 where there are
    ``row_scale_ptr`` and ``weight_scale_ptr``.
    """
    inside = cols < HIDDEN
    total = tl.zeros(cols.shape, dtype=tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if row_scale_ptr is not None:
        weight_scales = tl.load(weight_scale_ptr + cols, mask=inside, other=0.0)
    wait_for_previous(OVERLAP)
    residual = tl.load(residual_ptr + row * residual_stride + cols, mask=inside, other=0.0)
    products = tl.zeros(cols.shape, dtype=parts_ptr.dtype.element_ty)
    for split in tl.static_range(SPLITS):
        products += tl.load(parts_ptr + (split * rows + row) * HIDDEN + cols, mask=inside, other=0)
    if row_scale_ptr is not None:
        products = products.to(tl.float32) * tl.load(row_scale_ptr + row * row_scale_stride) * weight_scales
    s = (products + (total + residual.to(tl.float32))).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * HIDDEN + cols, s, mask=inside)
    return s


@triton.jit
def sum_norm_kernel(
    parts_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    row_scale_ptr: tl.tensor,
    weight_scale_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    rows: tl.tensor,
    residual_stride: tl.tensor,
    row_scale_stride: tl.tensor,
    eps: tl.tensor,
    SPLITS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STATIC: tl.constexpr,
    ORDERED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One row a program; parts are int32 where there are ``row_scale_ptr`` and ``weight_scale_ptr``, y is
    int8 with ``scale_ptr``, and with ORDERED its columns stand in the operand's order.
    """
    start_next(OVERLAP)
    dtype: tl.constexpr = sum_ptr.dtype.element_ty
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_H)
    inside = cols < HIDDEN
    # A constant: asked for before the wait.
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    s = summed_row(parts_ptr, residual_ptr, bias_ptr, sum_ptr, row_scale_ptr, weight_scale_ptr, row, rows,
                   cols, residual_stride, row_scale_stride, SPLITS, HIDDEN, OVERLAP)  # fmt: skip
    s = s.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(s * s, axis=0) / HIDDEN + eps)
    y = weighted(s * rstd, weight, dtype, weight_ptr.dtype.element_ty == tl.float32)
    if scale_ptr is None:
        tl.store(y_ptr + row * HIDDEN + operand_place(cols, ORDERED), y, mask=inside)
    else:
        store_int8_row(y.to(tl.float32), y_ptr + row * HIDDEN, scale_ptr, row, inside, STATIC, dtype)


def default_tiles(hidden: int, device: torch.device) -> dict[str, int]:
    """Tile choices for an H200: 4 elements a thread."""
    warps = min(max(next_power_of_two(hidden) // 128, 1), 32)
    return {"num_warps": warps, "OVERLAP": 2 if overlaps(device) else 1}


def launch_sum_norm(
    parts: Parts,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    scales: torch.Tensor | None,
    static: bool,
    tiles: Mapping[str, int] | None,
    ordered: bool = False,
) -> torch.Tensor:
    """Launch the kernel into y, int8 where there are ``scales``, or ``ordered`` (operand_ends.py); returns
    s.
    """
    sums = parts.parts if isinstance(parts, Int8Sums) else parts
    splits, rows, hidden = sums.shape
    row, column = (parts.row_scales, parts.weight_scales) if isinstance(parts, Int8Sums) else (None, None)
    total = torch.empty((rows, hidden), dtype=residual.dtype, device=residual.device)
    choice = merge_tiles(default_tiles(hidden, residual.device), tiles)
    if y.numel():
        sum_norm_kernel[(rows,)](
            sums.contiguous(),
            residual,
            bias,
            weight,
            y,
            total,
            row,
            column,
            scales,
            rows,
            residual.stride(0),
            0 if row is None or row.numel() == 1 else row.stride(0),
            eps,
            SPLITS=splits,
            HIDDEN=hidden,
            BLOCK_H=next_power_of_two(hidden),
            STATIC=static,
            ORDERED=ordered,
            OVERLAP=choice["OVERLAP"],
            **launch_options(choice, residual.device),
        )
    return total


def sum_norm_triton(
    parts: Parts,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; arguments as in :func:`sum_norm`, unchecked."""
    y = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    return y, launch_sum_norm(parts, residual, weight, eps, bias, y, None, False, tiles)


def sum_norm_int8_triton(
    parts: Parts,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    static: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> tuple[Int8Rows, torch.Tensor]:
    """Launch the kernel; arguments as in :func:`sum_norm_int8`, unchecked."""
    y = torch.empty(residual.shape, dtype=torch.int8, device=residual.device)
    scales = row_scales(residual.shape[0], static, residual.device)
    s = launch_sum_norm(parts, residual, weight, eps, bias, y, scales, static is not None, tiles)
    return Int8Rows(y, scales), s


def sum_norm_reference(
    parts: Parts,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The PyTorch twin; arguments as in :func:`sum_norm`."""
    products = parts.product() if isinstance(parts, Int8Sums) else parts.sum(dim=0)
    total = products + residual.float()
    if bias is not None:
        total = total + bias.float()
    y, _ = rms_norm_reference(total.to(residual.dtype), weight, eps)
    return y, total.to(residual.dtype)


def sum_norm(
    parts: Parts,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = cast(sum of parts + bias + residual); y = cast(s / sqrt(mean(s^2) + eps)) * weight.

    Args:
        parts: [S, M, H] fp32, contiguous: the partial products of :func:`small_linear_parts`; or those of
            :func:`int8_linear_parts`.
        residual: [M, H] fp16, bf16 or fp32; H up to 16384.
        weight: [H], dtype of residual or fp32.
        eps: added to the mean square.
        bias: [H] or None, dtype of residual or fp32.
        tiles: ``num_warps``, ``OVERLAP`` (as in overlap.py).

    Returns:
        y [M, H] and s [M, H], dtype of residual.

    Raises:
        KernelArgumentError: a shape, dtype, device or stride that the kernel cannot take.
    """
    expect_sum_norm(parts, residual, weight, bias)
    if runs_on_gpu(residual):
        return sum_norm_triton(parts, residual, weight, eps, bias, tiles)
    return sum_norm_reference(parts, residual, weight, eps, bias)


def sum_norm_int8(
    parts: Parts,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    static: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> tuple[Int8Rows, torch.Tensor]:
    """``sum_norm`` whose y is quantized in the same kernel, by rows or by the ``static`` scale, fp32 [1]."""
    expect_sum_norm(parts, residual, weight, bias)
    expect_static(static, residual)
    if runs_on_gpu(residual):
        return sum_norm_int8_triton(parts, residual, weight, eps, bias, static, tiles)
    y, s = sum_norm_reference(parts, residual, weight, eps, bias)
    return quantize_rows(y, static=static), s


def expect_sum_norm(
    parts: Parts, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Raise unless the kernel can take these."""
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
    expect_norm_weight("weight", weight, residual)
    if bias is not None:
        wanted = torch.float32 if bias.dtype == torch.float32 else residual.dtype
        expect("bias", bias, (hidden,), like=residual, dtype=wanted)
