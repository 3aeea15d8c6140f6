"""LayerNorm of a hidden state, with the residual sum folded in.

Owns the formula s = x + residual; y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias, in fp32, rounded
once; y ends in any form of rows (rows/endings.py) within the same kernel. Knows no model.

    y, residual = layer_norm(x, weight, bias, 1e-5, residual)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ingot.kernels.kernel_checks import merge_tiles, next_power_of_two, runs_on_gpu
from ingot.kernels.launch_overlap import other_overlap
from ingot.kernels.norm.norm_kernel import expect_ending, expect_norm, launch_norm
from ingot.kernels.rows.row_endings import AS_THEY_ARE, Ending


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
    ending: Ending = AS_THEY_ARE,
) -> tuple[Any, torch.Tensor]:
    """Launch the kernel; arguments as in :func:`layer_norm`, unchecked."""
    choice = merge_tiles(default_tiles(x.shape[1]), tiles)
    return launch_norm(x, weight, eps, residual, None, ending, choice, shift=bias)


def layer_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    ending: Ending = AS_THEY_ARE,
) -> tuple[Any, torch.Tensor]:
    """The PyTorch reference; arguments as in :func:`layer_norm`."""
    s = x if residual is None else x + residual
    return ending.of(torch.layer_norm(s, (s.shape[-1],), weight, bias, eps)), s


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
    ending: Ending = AS_THEY_ARE,
) -> tuple[Any, torch.Tensor]:
    """s = x + residual; y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias (Ba et al., 2016).

    Args:
        x: [T, H] fp16, bf16 or fp32; any T, H up to 16384.
        weight: [H], dtype of x.
        bias: [H], dtype of x.
        eps: added to the variance.
        residual: [T, H] or None; added to x first, the sum rounded to the dtype.
        tiles: ``num_warps``, ``OVERLAP`` (as in launch_overlap.py).
        ending: what becomes of y: the same numbers as ``ending.of(y)``.

    Returns:
        y [T, H] as its ending makes it, and s [T, H]: the next layer's residual (x itself, not a copy,
        without ``residual``).

    Raises:
        KernelArgumentError: a shape, dtype, device or stride that the kernel cannot take.
    """
    expect_norm(x, weight, residual, bias)
    expect_ending(ending, x.shape[1], x)
    if runs_on_gpu(x):
        return layer_norm_triton(x, weight, bias, eps, residual, tiles, ending)
    return layer_norm_reference(x, weight, bias, eps, residual, ending)
