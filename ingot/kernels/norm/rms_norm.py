"""RMSNorm of a hidden state, with the residual sum folded in.

Owns the formula s = x + residual; y = cast(s / sqrt(mean(s^2) + eps)) * weight. The sum is rounded to the
dtype, normalised in fp32, cast to the dtype, then multiplied by the weight: Hugging Face's order. A weight
in fp32 beside 16-bit rows is multiplied before the one cast, as in Gemma. Knows no model.

    y, residual = rms_norm(x, weight, 1e-6, residual)
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
from ingot.kernels.rows.int8_round import store_int8_row
from ingot.kernels.rows.operand_rows import operand_place

MAX_HIDDEN = 16384  # one pass holds a whole row in registers


@triton.jit
def weighted(normed: tl.tensor, weight: tl.tensor, DTYPE: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """normed · weight, both fp32, in DTYPE; WIDE: rounded once, not also before the product."""
    if WIDE:
        return (normed * weight).to(DTYPE)
    return (normed.to(DTYPE).to(tl.float32) * weight).to(DTYPE)


@triton.jit
def rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
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
    """One row a program: add, square, normalise, multiply; with ``scale_ptr`` y is in 8 bits, with ORDERED
    its columns stand in the operand's order.
    """
    start_next(OVERLAP)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_H)
    inside = cols < HIDDEN
    # The weight does not depend on the reduction: asking for it first hides its latency.
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAP)
    s = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + cols, mask=inside, other=0.0)
        s = (s.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(sum_ptr + row * HIDDEN + cols, s, mask=inside)
    s = s.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(s * s, axis=0) / HIDDEN + eps)
    y = weighted(s * rstd, weight, dtype, weight_ptr.dtype.element_ty == tl.float32)
    if scale_ptr is None:
        tl.store(y_ptr + row * HIDDEN + operand_place(cols, ORDERED), y, mask=inside)
    else:
        store_int8_row(y.to(tl.float32), y_ptr + row * HIDDEN, scale_ptr, row, inside, STATIC, dtype)


def default_tiles(hidden: int, device: torch.device | None = None) -> dict[str, int]:
    """Tile choices for an H200: 8 to 16 elements a thread keep loads 16 bytes wide."""
    block = next_power_of_two(hidden)
    overlap = 2 if device is not None and overlaps(device) else 1
    return {"num_warps": min(max(block // 512, 1), 16), "OVERLAP": overlap}


def candidate_tiles(hidden: int, device: torch.device | None = None) -> list[dict[str, int]]:
    """Tile choices worth measuring, the default first."""
    default = default_tiles(hidden, device)
    warps = (default["num_warps"] // 2, 2 * default["num_warps"])
    changes = [{"num_warps": count} for count in warps if 1 <= count <= 16]
    changes += [{"OVERLAP": 1}] if default["OVERLAP"] > 1 else []
    return [default, *({**default, **change} for change in changes)]


def rms_norm_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; arguments as in :func:`rms_norm`, unchecked."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, launch_rms_norm(x, weight, eps, residual, y, None, False, tiles)


def launch_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    scales: torch.Tensor | None,
    static: bool,
    tiles: Mapping[str, int] | None,
    ordered: bool = False,
) -> torch.Tensor:
    """Launch the kernel into y, int8 where there are ``scales`` (norm_int8.py), or ``ordered``
    (operand_ends.py); returns s.
    """
    rows, hidden = x.shape
    new_residual = x if residual is None else torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    choice = merge_tiles(default_tiles(hidden, x.device), tiles)
    if x.numel():
        rms_norm_kernel[(rows,)](
            x,
            residual,
            weight,
            y,
            None if residual is None else new_residual,
            scales,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            eps,
            HIDDEN=hidden,
            BLOCK_H=next_power_of_two(hidden),
            STATIC=static,
            ORDERED=ordered,
            OVERLAP=choice["OVERLAP"],
            **launch_options(choice, x.device),
        )
    return new_residual


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The PyTorch twin; arguments as in :func:`rms_norm`."""
    s = x if residual is None else x + residual
    wide = s.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype), s


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = x + residual; y = cast(s / sqrt(mean(s^2) + eps)) * weight (Zhang and Sennrich, 2019).

    Args:
        x: [T, H] fp16, bf16 or fp32; any T, H up to 16384.
        weight: [H], dtype of x or fp32.
        eps: added to the mean square.
        residual: [T, H] or None; added to x first.
        tiles: ``num_warps``, ``OVERLAP`` (as in overlap.py).

    Returns:
        y [T, H], and s [T, H]: the next layer's residual (x itself, not a copy, without ``residual``).

    Raises:
        KernelArgumentError: a shape, dtype, device or stride that the kernel cannot take.
    """
    expect_norm(x, weight, residual)
    if runs_on_gpu(x):
        return rms_norm_triton(x, weight, eps, residual, tiles)
    return rms_norm_reference(x, weight, eps, residual)


def expect_norm(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> None:
    """Raise unless the kernel can take these."""
    expect_float("x", x)
    expect("x", x, (None, None), like=x)
    expect_range("the hidden size", x.shape[1], 1, MAX_HIDDEN)
    expect_norm_weight("weight", weight, x)
    if residual is not None:
        expect("residual", residual, tuple(x.shape), like=x)


def expect_norm_weight(name: str, weight: torch.Tensor, x: torch.Tensor) -> None:
    """Raise unless a weight is that of a norm over rows x [T, H]."""
    wide = weight.dtype == torch.float32
    expect(name, weight, (x.shape[1],), like=x, dtype=torch.float32 if wide else None)
