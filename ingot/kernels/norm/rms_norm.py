"""RMSNorm of a hidden state, with the residual sum folded in.

Owns the formula s = x + residual; y = cast(s / sqrt(mean(s^2) + eps)) * weight. The sum is rounded to the
dtype, normalised in fp32, cast to the dtype, then multiplied by the weight: Hugging Face's order. A weight
in fp32 beside 16-bit rows is multiplied before the one cast, as in Gemma. y ends in any form of rows
(rows/endings.py) within the same kernel. Knows no model.

    y, residual = rms_norm(x, weight, 1e-6, residual)
    x8, residual = rms_norm(x, weight, 1e-6, residual, ending=InInt8())
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ingot.kernels.kernel_checks import merge_tiles, next_power_of_two, runs_on_gpu
from ingot.kernels.launch_overlap import overlaps
from ingot.kernels.norm.norm_kernel import expect_ending, expect_norm, launch_norm
from ingot.kernels.rows.row_endings import AS_THEY_ARE, Ending


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
    ending: Ending = AS_THEY_ARE,
) -> tuple[Any, torch.Tensor]:
    """Launch the kernel; arguments as in :func:`rms_norm`, unchecked."""
    choice = merge_tiles(default_tiles(x.shape[1], x.device), tiles)
    return launch_norm(x, weight, eps, residual, None, ending, choice)


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    ending: Ending = AS_THEY_ARE,
) -> tuple[Any, torch.Tensor]:
    """The PyTorch reference; arguments as in :func:`rms_norm`."""
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
        tiles: ``num_warps``, ``OVERLAP`` (as in launch_overlap.py).
        ending: what becomes of y: the same numbers as ``ending.of(y)``.

    Returns:
        y [T, H] as its ending makes it, and s [T, H]: the next layer's residual (x itself, not a copy,
        without ``residual``).

    Raises:
        KernelArgumentError: a shape, dtype, device or stride that the kernel cannot take.
    """
    expect_norm(x, weight, residual)
    expect_ending(ending, x.shape[1], x)
    if runs_on_gpu(x):
        return rms_norm_triton(x, weight, eps, residual, tiles, ending)
    return rms_norm_reference(x, weight, eps, residual, ending)
