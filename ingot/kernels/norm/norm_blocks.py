"""RMSNorm whose result is reordered and in whole numbers by blocks of columns: one kernel for R1 of RPTQ.

Owns the kernel: what rms_norm.py computes, rounded to the dtype as there, its channels in another order,
quantized by the rule of block_rows.py. The residual stream keeps its order. The kernel may begin as that of
sum_norm.py, with a product's parts (sum_norm_blocks.py). Knows no model.

    x8, residual = rms_norm_in_blocks(x, weight, 1e-6, steps, residual)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ingot.kernels.checks import expect_range, merge_tiles, next_power_of_two, runs_on_gpu
from ingot.kernels.norm.rms_norm import MAX_HIDDEN, default_tiles, expect_norm, rms_norm_reference, weighted
from ingot.kernels.norm.sum_norm import summed_row
from ingot.kernels.overlap import launch_options, start_next, wait_for_previous
from ingot.kernels.rows.block_rows import BlockSteps, expect_steps, quantize_in_blocks
from ingot.kernels.rows.int8_round import steps_at, store_block_numbers
from ingot.kernels.rows.int8_rows import Int8Rows


@triton.jit
def rms_norm_blocks_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    order_ptr: tl.tensor,
    step_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    y_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    rows: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    SPLITS: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One row a program: add, square, normalise, multiply; then columns by ``order_ptr``, in numbers. With
    SPLITS x is a product's parts [SPLITS, rows, HIDDEN], to which bias and residual are added.
    """
    start_next(OVERLAP)
    dtype: tl.constexpr = x_ptr.dtype.element_ty if SPLITS == 0 else residual_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_H)
    inside = cols < HIDDEN
    # Constants: asked for before the wait.
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    step, zero = steps_at(cols, step_ptr, zero_ptr, WIDTH, GROUP)
    if order_ptr is not None:
        order = tl.load(order_ptr + cols, mask=inside, other=0)
    if SPLITS > 0:
        s = summed_row(x_ptr, residual_ptr, bias_ptr, sum_ptr, None, None, row, rows, cols, residual_stride,
                       0, SPLITS, HIDDEN, OVERLAP)  # fmt: skip
    else:
        wait_for_previous(OVERLAP)
        s = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0)
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + row * residual_stride + cols, mask=inside, other=0.0)
            s = (s.to(tl.float32) + residual.to(tl.float32)).to(dtype)
            tl.store(sum_ptr + row * HIDDEN + cols, s, mask=inside)
    s = s.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(s * s, axis=0) / HIDDEN + eps)
    y = weighted(s * rstd, weight, dtype, weight_ptr.dtype.element_ty == tl.float32).to(tl.float32)
    if order_ptr is not None:
        y = tl.gather(y, order, axis=0)
    store_block_numbers(y, y_ptr + row * WIDTH, step, zero, HIDDEN, WIDTH, BITS, dtype)


def launch_norm_in_blocks(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    steps: BlockSteps,
    s: torch.Tensor | None,
    choice: Mapping[str, int],
) -> Int8Rows:
    """Launch the kernel: x [T, H], or a product's parts [S, T, H]; sums go into ``s``."""
    rows, hidden = x.shape[-2:]
    splits = x.shape[0] if x.dim() == 3 else 0
    values = torch.empty((rows, steps.width), dtype=torch.int8, device=x.device)
    if values.numel():
        rms_norm_blocks_kernel[(rows,)](
            x,
            residual,
            bias,
            weight,
            steps.order,
            steps.steps,
            steps.zeros,
            values,
            s,
            rows if splits else 0,
            x.stride(-2),
            0 if residual is None else residual.stride(0),
            eps,
            SPLITS=splits,
            HIDDEN=hidden,
            WIDTH=steps.width,
            BLOCK_H=next_power_of_two(steps.width),
            GROUP=steps.block,
            BITS=steps.bits,
            OVERLAP=choice["OVERLAP"],
            **launch_options(choice, x.device),
        )
    return steps.rows(values)


def rms_norm_in_blocks_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    steps: BlockSteps,
    residual: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> tuple[Int8Rows, torch.Tensor]:
    """Launch the kernel; arguments as in :func:`rms_norm_in_blocks`, unchecked."""
    s = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    choice = merge_tiles(default_tiles(x.shape[1], x.device), tiles)
    numbers = launch_norm_in_blocks(x, residual, None, weight, eps, steps, s, choice)
    return numbers, x if s is None else s


def rms_norm_in_blocks_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    steps: BlockSteps,
    residual: torch.Tensor | None = None,
) -> tuple[Int8Rows, torch.Tensor]:
    """The PyTorch twin; arguments as in :func:`rms_norm_in_blocks`."""
    y, s = rms_norm_reference(x, weight, eps, residual)
    return quantize_in_blocks(y, steps), s


def rms_norm_in_blocks(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    steps: BlockSteps,
    residual: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> tuple[Int8Rows, torch.Tensor]:
    """``quantize_in_blocks(rms_norm(x, weight, eps, residual), steps)``, the same numbers, in one kernel.

    Args:
        x, weight, eps, residual, tiles: as of :func:`rms_norm`; the weight in the stream's order.
        steps: of rows of x's width; whole blocks of it are 16384 columns at most.

    Returns:
        y int8 [T, whole blocks], columns by ``steps.order``, and s [T, H] = x + residual (x itself without
        ``residual``) in the stream's order.

    Raises:
        KernelArgumentError: a shape, dtype, device or stride that the kernel cannot take.
    """
    expect_norm(x, weight, residual)
    expect_steps(steps, x.shape[1], x)
    expect_range("the width in whole blocks", steps.width, 1, MAX_HIDDEN)
    if runs_on_gpu(x):
        return rms_norm_in_blocks_triton(x, weight, eps, steps, residual, tiles)
    return rms_norm_in_blocks_reference(x, weight, eps, steps, residual)
