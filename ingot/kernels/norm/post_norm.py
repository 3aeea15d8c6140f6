"""A branch's norm before it joins the hidden states, and the norm after them (Gemma-2), in one kernel.

y, hidden = post_norm(branch, hidden, post, weight, 1e-6)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ingot.kernels.kernel_checks import merge_tiles, runs_on_gpu
from ingot.kernels.norm.norm_kernel import expect_ending, expect_norm, expect_norm_weight, launch_norm
from ingot.kernels.norm.rms_norm import default_tiles, rms_norm_reference
from ingot.kernels.rows.row_endings import AS_THEY_ARE, Ending


def post_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    post: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    tiles: Mapping[str, int] | None = None,
    ending: Ending = AS_THEY_ARE,
) -> tuple[Any, torch.Tensor]:
    """s = residual + rms_norm(x, post); y = rms_norm(s, weight).

    Args:
        x: [T, H] fp16, bf16 or fp32.
        residual: [T, H], dtype of x.
        post, weight: [H], dtype of x or fp32.
        eps: added to both mean squares.
        tiles, ending: as of :func:`rms_norm`.

    Returns:
        y [T, H] in the form of its ending, and s [T, H].
    """
    expect_norm(x, weight, residual)
    expect_norm_weight("post", post, x)
    expect_ending(ending, x.shape[1], x)
    if runs_on_gpu(x):
        choice = merge_tiles(default_tiles(x.shape[1], x.device), tiles)
        return launch_norm(x, weight, eps, residual, None, ending, choice, post=post)
    return rms_norm_reference(rms_norm_reference(x, post, eps)[0], weight, eps, residual, ending)
