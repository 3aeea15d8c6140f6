"""LayerNorm of hidden states, with the residual sum folded in.

s = x + residual; y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias, in fp32, rounded once. In the same
kernel y may end in any form of rows (row_endings.py).

    y, residual = layer_norm(x, weight, bias, 1e-5, residual)
    y, x = layer_norm_behind(x, weight, bias, 1e-5, (first, second))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ingot.kernels.kernel_checks import expect, merge_tiles, runs_on_gpu
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


def layer_norm_behind(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    lacking: Sequence[torch.Tensor],
    *,
    keeps: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``layer_norm`` of s = x + biases that products before it did not add, rounded once.

    Args:
        x, weight, bias, eps: as of ``layer_norm``.
        lacking: none, one or two biases [H], dtype of x.
        keeps: whether s is written; otherwise it is only normalised.

    Returns:
        y [T, H], and s [T, H]: x itself, if nothing is lacking or s is not kept.
    """
    expect_norm(x, weight, None, bias)
    for one in lacking:
        expect("lacking", one, (x.shape[1],), like=x)
    if not lacking:
        return layer_norm(x, weight, bias, eps)
    first, *others = lacking
    second = others[0] if others else None
    if runs_on_gpu(x):
        row, choice = first.expand(len(x), -1), default_tiles(x.shape[1])
        return launch_norm(x, weight, eps, row, second, AS_THEY_ARE, choice, shift=bias, keeps=keeps)
    s = sum((one.float() for one in lacking), x.float()).to(x.dtype)
    return layer_norm_reference(s, weight, bias, eps)[0], s if keeps else x
