"""The kernel of every norm: of x and a residual, or of a product's parts, ending in any form of rows.

rms_norm.py, layer_norm.py, post_norm.py and sum_norm.py launch it and say what it computes; row_endings.py
has the endings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ingot.kernels.kernel_checks import expect, expect_range, expect_rows, next_power_of_two
from ingot.kernels.launch_overlap import launch_options, start_next, wait_for_previous
from ingot.kernels.rows.block_rows import BlockSteps
from ingot.kernels.rows.int8_round import steps_at
from ingot.kernels.rows.int8_rows import Int8Sums
from ingot.kernels.rows.row_endings import Ending, store_row

MAX_HIDDEN = 16384  # a program holds a whole row in registers
Parts = torch.Tensor | Int8Sums


@triton.jit
def _summed_row(
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

    Loads constants, then waits for the previous kernel. With scales the parts are int32.
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
def _weighted(normed: tl.tensor, weight: tl.tensor, DTYPE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """normed · weight, both fp32, in DTYPE; WIDE: rounded after the product alone."""
    if WIDE:
        return (normed * weight).to(DTYPE)
    return (normed.to(DTYPE).to(tl.float32) * weight).to(DTYPE)


@triton.jit
def norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    post_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    row_scale_ptr: tl.tensor,
    weight_scale_ptr: tl.tensor,
    y_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    order_ptr: tl.tensor,
    step_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    rows: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    row_scale_stride: tl.tensor,
    eps: tl.tensor,
    SPLITS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    STATIC: tl.constexpr,
    ORDERED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One program per row: add, square, normalise, multiply, end (``store_row``).

    With SPLITS x is a product's parts [SPLITS, rows, HIDDEN], to which bias and residual are added. Else the
    bias is added with the residual; the sum is stored only where ``sum_ptr`` is given. With ``shift_ptr`` it
    is a LayerNorm: the variance is about the mean, in a second pass over registers. With ``post_ptr`` x has
    an RMSNorm before the residual is added.
    """
    start_next(OVERLAP)
    dtype: tl.constexpr = x_ptr.dtype.element_ty if SPLITS == 0 else sum_ptr.dtype.element_ty
    WIDE: tl.constexpr = weight_ptr.dtype.element_ty == tl.float32
    row = tl.program_id(0)
    if SPLITS == 0 or BITS > 0:
        row = row.to(tl.int64)
    cols = tl.arange(0, BLOCK_H)
    inside = cols < HIDDEN
    # Loading constants before the wait hides their latency.
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if shift_ptr is not None:
        shift = tl.load(shift_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if SPLITS == 0 and bias_ptr is not None:
        bias = tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if post_ptr is not None:
        post = tl.load(post_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    order, step, zero = None, None, None
    if BITS > 0:
        step, zero = steps_at(cols, step_ptr, zero_ptr, WIDTH, GROUP)
    if order_ptr is not None:
        order = tl.load(order_ptr + cols, mask=inside, other=0)
    if SPLITS > 0:
        s = _summed_row(x_ptr, residual_ptr, bias_ptr, sum_ptr, row_scale_ptr, weight_scale_ptr, row, rows,
                        cols, residual_stride, row_scale_stride, SPLITS, HIDDEN, OVERLAP)  # fmt: skip
    else:
        wait_for_previous(OVERLAP)
        s = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0)
        if post_ptr is not None:
            x = s.to(tl.float32)
            rstd = tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps)
            s = _weighted(x * rstd, post, dtype, post_ptr.dtype.element_ty == tl.float32)
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + row * residual_stride + cols, mask=inside, other=0.0)
            total = s.to(tl.float32) + residual.to(tl.float32)
            if bias_ptr is not None:
                total += bias
            s = total.to(dtype)
            if sum_ptr is not None:
                tl.store(sum_ptr + row * HIDDEN + cols, s, mask=inside)
    s = s.to(tl.float32)
    if shift_ptr is not None:
        s = tl.where(inside, s - tl.sum(s, axis=0) / HIDDEN, 0.0)
    rstd = tl.rsqrt(tl.sum(s * s, axis=0) / HIDDEN + eps)
    if shift_ptr is not None:
        y = (s * rstd * weight + shift).to(dtype)
    else:
        y = _weighted(s * rstd, weight, dtype, WIDE)
    store_row(y, y_ptr, scale_ptr, order, step, zero, row, HIDDEN, WIDTH, BITS, STATIC, ORDERED, GROUP)


def launch_norm(
    x: Parts,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    ending: Ending,
    choice: Mapping[str, int],
    shift: torch.Tensor | None = None,
    post: torch.Tensor | None = None,
    keeps: bool = True,
) -> tuple[Any, torch.Tensor]:
    """(y in its form, s) of x [T, H], or of a product's parts [S, T, H] with a residual.

    ``bias`` is added to the parts, or with the residual; ``shift`` is a LayerNorm's bias; ``post`` weighs a
    norm of x itself. Unless it ``keeps`` the sum, x comes in its place.
    """
    source = x.parts if isinstance(x, Int8Sums) else x
    (num_rows, hidden), splits = source.shape[-2:], source.shape[0] if source.dim() == 3 else 0
    like = source if residual is None else residual
    y, own = ending.launched(num_rows, hidden, like)
    s = source
    keeps = keeps and residual is not None
    if keeps:
        s = torch.empty((num_rows, hidden), dtype=like.dtype, device=like.device)
    scales = (x.row_scales, x.weight_scales) if isinstance(x, Int8Sums) else (None, None)
    if own["y_ptr"].numel():
        norm_kernel[(num_rows,)](
            source.contiguous() if splits else source,
            residual,
            bias,
            post,
            weight,
            shift,
            s if keeps else None,
            *scales,
            rows=num_rows if splits else None,
            x_stride=None if splits else source.stride(0),
            residual_stride=None if residual is None else residual.stride(0),
            row_scale_stride=None if scales[0] is None else scales[0].stride(0) * (scales[0].numel() > 1),
            eps=eps,
            SPLITS=splits,
            HIDDEN=hidden,
            BLOCK_H=next_power_of_two(own["WIDTH"]),
            OVERLAP=choice["OVERLAP"],
            **own,
            **launch_options(choice, like.device),
        )
    return y, s


def norm_warps(hidden: int) -> int:
    """Warps on an H200: 8 to 16 elements per thread keep loads 16 bytes wide."""
    return min(max(next_power_of_two(hidden) // 512, 1), 16)


def norm_candidates(default: dict[str, int], others: Sequence[dict[str, int]]) -> list[dict[str, int]]:
    """The default first, then half and twice its warps, then ``others``."""
    warps = (default["num_warps"] // 2, 2 * default["num_warps"])
    changes = [{"num_warps": count} for count in warps if 1 <= count <= 16]
    return [default, *({**default, **change} for change in [*changes, *others])]


def expect_ending(ending: Ending, hidden: int, like: torch.Tensor) -> None:
    """Raise unless a program can hold a row [hidden] and its ending."""
    ending.expect(hidden, like)
    if isinstance(ending, BlockSteps):
        expect_range("the width in whole blocks", ending.width, 1, MAX_HIDDEN)


def expect_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, shift: torch.Tensor | None = None
) -> None:
    """Raise unless the kernel can take these; ``shift`` is a LayerNorm's bias."""
    expect_rows("x", x)
    expect_range("the hidden size", x.shape[1], 1, MAX_HIDDEN)
    expect_norm_weight("weight", weight, x, shift)
    if residual is not None:
        expect("residual", residual, tuple(x.shape), like=x)


def expect_norm_weight(
    name: str, weight: torch.Tensor, x: torch.Tensor, shift: torch.Tensor | None = None
) -> None:
    """Raise unless a norm of x [T, H] can have this weight: in its dtype or, without a shift, in fp32."""
    wide = weight.dtype == torch.float32 and shift is None
    expect(name, weight, (x.shape[1],), like=x, dtype=torch.float32 if wide else None)
    if shift is not None:
        expect("bias", shift, (x.shape[1],), like=x)
