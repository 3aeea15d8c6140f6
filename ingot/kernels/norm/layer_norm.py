"""LayerNorm of hidden states, with the residual sum folded in.

s = x + residual; y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias, in fp32, rounded once. In the same
kernel y may end in any form of rows (row_endings.py).

    y, residual = layer_norm(x, weight, bias, 1e-5, residual)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ingot.kernels.kernel_checks import merge_tiles, runs_on_gpu
from ingot.kernels.launch_overlap import other_overlap
from ingot.kernels.norm.norm_kernel import (
    expect_ending,
    expect_norm,
    launch_norm,
    norm_candidates,
    norm_warps,
)
from ingot.kernels.rows.row_endings import AS_THEY_ARE, Ending


def default_tiles(hidden: int) -> dict[str, int]:
    """Tile choices for an H200."""
    return {"num_warps": norm_warps(hidden), "OVERLAP": 1}


def candidate_tiles(hidden: int, device: torch.device | None = None) -> list[dict[str, int]]:
    """Tile choices worth measuring, the default first."""
    return norm_candidates(default_tiles(hidden), other_overlap(device))


def layer_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    ending: Ending = AS_THEY_ARE,
) -> tuple[Any, torch.Tensor]:
    """The PyTorch reference of :func:`layer_norm`."""
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
        tiles: ``num_warps``, ``OVERLAP`` (launch_overlap.py).
        ending: the form of y, equal to ``ending.of(y)``.

    Returns:
        y [T, H] in that form, and s [T, H]: the next residual (x itself, if there is no ``residual``).
    """
    expect_norm(x, weight, residual, bias)
    expect_ending(ending, x.shape[1], x)
    if runs_on_gpu(x):
        choice = merge_tiles(default_tiles(x.shape[1]), tiles)
        return launch_norm(x, weight, eps, residual, None, ending, choice, shift=bias)
    return layer_norm_reference(x, weight, bias, eps, residual, ending)
