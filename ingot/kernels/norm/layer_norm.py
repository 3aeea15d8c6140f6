"""LayerNorm of a hidden state, with the residual sum folded in.

Owns the formula s = x + residual; y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias, in fp32, rounded
once. Knows no model.

    y, residual = layer_norm(x, weight, bias, 1e-5, residual)
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
from ingot.kernels.norm.kernel import MAX_HIDDEN
from ingot.kernels.overlap import launch_options, other_overlap, start_next, wait_for_previous


@triton.jit
def layer_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One row a program; the variance is taken about the mean, in a second pass over registers."""
    start_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_H)
    inside = cols < HIDDEN
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAP)
    s = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + cols, mask=inside, other=0.0)
        s = (s.to(tl.float32) + residual.to(tl.float32)).to(y_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * HIDDEN + cols, s, mask=inside)
    s = s.to(tl.float32)
    centred = tl.where(inside, s - tl.sum(s, axis=0) / HIDDEN, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=0) / HIDDEN + eps)
    y = centred * rstd * weight + bias
    tl.store(y_ptr + row * HIDDEN + cols, y.to(y_ptr.dtype.element_ty), mask=inside)


def default_tiles(hidden: int) -> dict[str, int]:
    """Tile choices for an H200: 8 to 16 elements a thread keep loads 16 bytes wide."""
    block = next_power_of_two(hidden)
    return {"num_warps": min(max(block // 512, 1), 16), "OVERLAP": 1}


def candidate_tiles(hidden: int, device: torch.device | None = None) -> list[dict[str, int]]:
    """Tile choices worth measuring, the default first."""
    default = default_tiles(hidden)
    warps = (default["num_warps"] // 2, 2 * default["num_warps"])
    changes = [{"num_warps": count} for count in warps if 1 <= count <= 16]
    return [default, *({**default, **change} for change in [*changes, *other_overlap(device)])]


def layer_norm_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; arguments as in :func:`layer_norm`, unchecked."""
    rows, hidden = x.shape
    y = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    new_residual = x if residual is None else torch.empty_like(y)
    choice = merge_tiles(default_tiles(hidden), tiles)
    if x.numel():
        layer_norm_kernel[(rows,)](
            x,
            residual,
            weight,
            bias,
            y,
            None if residual is None else new_residual,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            eps,
            HIDDEN=hidden,
            BLOCK_H=next_power_of_two(hidden),
            OVERLAP=choice["OVERLAP"],
            **launch_options(choice, x.device),
        )
    return y, new_residual


def layer_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The PyTorch twin; arguments as in :func:`layer_norm`."""
    s = x if residual is None else x + residual
    return torch.nn.functional.layer_norm(s, (s.shape[-1],), weight, bias, eps), s


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = x + residual; y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias (Ba et al., 2016).

    Args:
        x: [T, H] fp16, bf16 or fp32; any T, H up to 16384.
        weight: [H], dtype of x.
        bias: [H], dtype of x.
        eps: added to the variance.
        residual: [T, H] or None; added to x first, the sum rounded to the dtype.
        tiles: ``num_warps``, ``OVERLAP`` (as in overlap.py).

    Returns:
        y [T, H], and s [T, H]: the next layer's residual (x itself, not a copy, without ``residual``).

    Raises:
        KernelArgumentError: a shape, dtype, device or stride that the kernel cannot take.
    """
    expect_float("x", x)
    expect("x", x, (None, None), like=x)
    expect_range("the hidden size", x.shape[1], 1, MAX_HIDDEN)
    expect("weight", weight, (x.shape[1],), like=x)
    expect("bias", bias, (x.shape[1],), like=x)
    if residual is not None:
        expect("residual", residual, tuple(x.shape), like=x)
    if runs_on_gpu(x):
        return layer_norm_triton(x, weight, bias, eps, residual, tiles)
    return layer_norm_reference(x, weight, bias, eps, residual)
