"""A branch that is normed before it joins the hidden states, and the norm after them (Gemma-2).

Owns the formula s = residual + norm(x) · post; y = norm(s) · weight, each norm rounded as in rms_norm.py, and
its ends: y in the dtype, in the operand's order, in 8 bits as in norm_int8.py, or left out. Knows no model.

    y, hidden = post_norm(branch, hidden, post, weight, 1e-6)
    x8, hidden = post_norm_int8(branch, hidden, post, weight, 1e-6)
    hidden = added_post_norm(branch, hidden, post, 1e-6)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ingot.kernels.checks import expect_static, merge_tiles, next_power_of_two, runs_on_gpu
from ingot.kernels.norm.operand_ends import expect_spans
from ingot.kernels.norm.rms_norm import (
    default_tiles,
    expect_norm,
    expect_norm_weight,
    rms_norm_reference,
    weighted,
)
from ingot.kernels.overlap import launch_options, start_next, wait_for_previous
from ingot.kernels.rows.int8_round import row_scales, store_int8_row
from ingot.kernels.rows.int8_rows import Int8Rows, quantize_rows
from ingot.kernels.rows.operand_rows import OperandRows, operand_place, operand_rows


@triton.jit
def post_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    post_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STATIC: tl.constexpr,
    ORDERED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One row a program; without ``weight_ptr`` there is no y. With ``scale_ptr`` y is in 8 bits, with
    ORDERED its columns stand in the operand's order.
    """
    start_next(OVERLAP)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    WIDE: tl.constexpr = post_ptr.dtype.element_ty == tl.float32
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_H)
    inside = cols < HIDDEN
    # Constants: asked for before the wait.
    post = tl.load(post_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAP)
    x = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * residual_stride + cols, mask=inside, other=0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps)
    s = (weighted(x * rstd, post, dtype, WIDE).to(tl.float32) + residual.to(tl.float32)).to(dtype)
    tl.store(sum_ptr + row * HIDDEN + cols, s, mask=inside)
    if weight_ptr is not None:
        s = s.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(s * s, axis=0) / HIDDEN + eps)
        y = weighted(s * rstd, weight, dtype, WIDE)
        if scale_ptr is None:
            tl.store(y_ptr + row * HIDDEN + operand_place(cols, ORDERED), y, mask=inside)
        else:
            store_int8_row(y.to(tl.float32), y_ptr + row * HIDDEN, scale_ptr, row, inside, STATIC, dtype)


def launch_post_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    post: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    y: torch.Tensor | None,
    scales: torch.Tensor | None = None,
    *,
    static: bool = False,
    ordered: bool = False,
    tiles: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """Launch the kernel into y, int8 where there are ``scales``, or ``ordered``; returns s."""
    rows, hidden = x.shape
    s = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    choice = merge_tiles(default_tiles(hidden, x.device), tiles)
    if x.numel():
        post_norm_kernel[(rows,)](
            x,
            residual,
            post,
            weight,
            y,
            s,
            scales,
            x.stride(0),
            residual.stride(0),
            eps,
            HIDDEN=hidden,
            BLOCK_H=next_power_of_two(hidden),
            STATIC=static,
            ORDERED=ordered,
            OVERLAP=choice["OVERLAP"],
            **launch_options(choice, x.device),
        )
    return s


def post_norm_triton(
    x: torch.Tensor,
    residual: torch.Tensor,
    post: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    tiles: Mapping[str, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; arguments as in :func:`post_norm`, unchecked."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, launch_post_norm(x, residual, post, weight, eps, y, tiles=tiles)


def post_norm_operand_triton(
    x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[OperandRows, torch.Tensor]:
    """Launch the kernel; arguments as in :func:`post_norm_operand`, unchecked."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return OperandRows(y), launch_post_norm(x, residual, post, weight, eps, y, ordered=True)


def post_norm_int8_triton(
    x: torch.Tensor,
    residual: torch.Tensor,
    post: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    static: torch.Tensor | None = None,
) -> tuple[Int8Rows, torch.Tensor]:
    """Launch the kernel; arguments as in :func:`post_norm_int8`, unchecked."""
    y = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = row_scales(x.shape[0], static, x.device)
    s = launch_post_norm(x, residual, post, weight, eps, y, scales, static=static is not None)
    return Int8Rows(y, scales), s


def added_post_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, eps: float
) -> torch.Tensor:
    """Launch the kernel; arguments as in :func:`added_post_norm`, unchecked."""
    return launch_post_norm(x, residual, post, None, eps, None)


def post_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The PyTorch twin; arguments as in :func:`post_norm`."""
    return rms_norm_reference(rms_norm_reference(x, post, eps)[0], weight, eps, residual)


def post_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    post: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    tiles: Mapping[str, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = residual + rms_norm(x, post); y = rms_norm(s, weight).

    Args:
        x: [T, H] fp16, bf16 or fp32; any T, H up to 16384.
        residual: [T, H], dtype of x.
        post, weight: [H], both of the dtype of x or both fp32.
        eps: added to both mean squares.
        tiles: as of :func:`rms_norm`.

    Returns:
        y and s, both [T, H].

    Raises:
        KernelArgumentError: a shape, dtype, device or stride that the kernel cannot take.
    """
    _expect(x, residual, post, weight)
    if runs_on_gpu(x):
        return post_norm_triton(x, residual, post, weight, eps, tiles)
    return post_norm_reference(x, residual, post, weight, eps)


def post_norm_operand(
    x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[OperandRows, torch.Tensor]:
    """``post_norm`` whose y has its columns in the operand's order; H a multiple of 32."""
    _expect(x, residual, post, weight)
    expect_spans(x.shape[1])
    if runs_on_gpu(x):
        return post_norm_operand_triton(x, residual, post, weight, eps)
    y, s = post_norm_reference(x, residual, post, weight, eps)
    return operand_rows(y), s


def post_norm_int8(
    x: torch.Tensor,
    residual: torch.Tensor,
    post: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    static: torch.Tensor | None = None,
) -> tuple[Int8Rows, torch.Tensor]:
    """``post_norm`` whose y is quantized in the same kernel, by rows or by the ``static`` scale, fp32 [1]."""
    _expect(x, residual, post, weight)
    expect_static(static, x)
    if runs_on_gpu(x):
        return post_norm_int8_triton(x, residual, post, weight, eps, static)
    y, s = post_norm_reference(x, residual, post, weight, eps)
    return quantize_rows(y, static=static), s


def added_post_norm(x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, eps: float) -> torch.Tensor:
    """s of ``post_norm`` alone."""
    _expect(x, residual, post, post)
    if runs_on_gpu(x):
        return added_post_norm_triton(x, residual, post, eps)
    return residual + rms_norm_reference(x, post, eps)[0]


def _expect(x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, weight: torch.Tensor) -> None:
    expect_norm(x, weight, residual)
    expect_norm_weight("post", post, x)
