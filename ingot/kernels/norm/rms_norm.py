"""RMSNorm of hidden states, with the residual sum folded in.

s = x + residual; y = cast(s / sqrt(mean(s^2) + eps)) * weight. The sum is rounded to the dtype, normalised in
fp32, cast to the dtype, then multiplied by the weight: Hugging Face's order. A weight in fp32 beside 16-bit
rows is multiplied before the one cast, as in Gemma. y may end in any form of rows (row_endings.py).

    y, residual = rms_norm(x, weight, 1e-6, residual)
    x8, residual = rms_norm(x, weight, 1e-6, residual, ending=InInt8())
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ingot.kernels.kernel_checks import merge_tiles, runs_on_gpu
from ingot.kernels.launch_overlap import overlaps
from ingot.kernels.norm.norm_kernel import (
    expect_ending,
    expect_norm,
    launch_norm,
    norm_candidates,
    norm_warps,
)
from ingot.kernels.rows.row_endings import AS_THEY_ARE, Ending


def default_tiles(hidden: int, device: torch.device | None = None) -> dict[str, int]:
    """Tile choices for an H200."""
    return {"num_warps": norm_warps(hidden), "OVERLAP": 2 if device is not None and overlaps(device) else 1}


def candidate_tiles(hidden: int, device: torch.device | None = None) -> list[dict[str, int]]:
    """Tile choices worth measuring, the default first."""
    default = default_tiles(hidden, device)
    return norm_candidates(default, [{"OVERLAP": 1}] if default["OVERLAP"] > 1 else [])


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    ending: Ending = AS_THEY_ARE,
) -> tuple[Any, torch.Tensor]:
    """The PyTorch reference of :func:`rms_norm`."""
    s = x if residual is None else x + residual
    wide = s.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return ending.of((normed.to(weight.dtype) * weight).to(x.dtype)), s


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
    ending: Ending = AS_THEY_ARE,
) -> tuple[Any, torch.Tensor]:
    """s = x + residual; y = cast(s / sqrt(mean(s^2) + eps)) * weight (Zhang and Sennrich, 2019).

    Args:
        x: [T, H] fp16, bf16 or fp32; any T, H up to 16384.
        weight: [H], dtype of x or fp32.
        eps: added to the mean square.
        residual: [T, H] or None; added to x first.
        tiles: ``num_warps``, ``OVERLAP`` (launch_overlap.py).
        ending: the form of y, equal to ``ending.of(y)``.

    Returns:
        y [T, H] in that form, and s [T, H]: the next residual (x itself, if there is no ``residual``).
    """
    expect_norm(x, weight, residual)
    expect_ending(ending, x.shape[1], x)
    if runs_on_gpu(x):
        choice = merge_tiles(default_tiles(x.shape[1], x.device), tiles)
        return launch_norm(x, weight, eps, residual, None, ending, choice)
    return rms_norm_reference(x, weight, eps, residual, ending)
