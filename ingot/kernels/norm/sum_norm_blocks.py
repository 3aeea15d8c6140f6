"""The end of a product split along its columns, the RMSNorm after it, and whole numbers by blocks of columns.

Owns the op: s as of sum_norm.py, to the bit, then what norm_blocks.py makes of it, by that file's kernel.
Knows no model.

    x8, hidden = sum_norm_in_blocks(parts, hidden, weight, 1e-6, steps, bias)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ingot.kernels.checks import KernelArgumentError, expect_range, merge_tiles, runs_on_gpu
from ingot.kernels.norm.norm_blocks import launch_norm_in_blocks
from ingot.kernels.norm.rms_norm import MAX_HIDDEN
from ingot.kernels.norm.sum_norm import Parts, default_tiles, expect_sum_norm, sum_norm_reference
from ingot.kernels.rows.block_rows import BlockSteps, expect_steps, quantize_in_blocks
from ingot.kernels.rows.int8_rows import Int8Rows


def sum_norm_in_blocks_triton(
    parts: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    steps: BlockSteps,
    bias: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> tuple[Int8Rows, torch.Tensor]:
    """Launch the kernel; arguments as in :func:`sum_norm_in_blocks`, unchecked."""
    s = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    choice = merge_tiles(default_tiles(residual.shape[1], residual.device), tiles)
    return launch_norm_in_blocks(parts.contiguous(), residual, bias, weight, eps, steps, s, choice), s


def sum_norm_in_blocks_reference(
    parts: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    steps: BlockSteps,
    bias: torch.Tensor | None = None,
) -> tuple[Int8Rows, torch.Tensor]:
    """The PyTorch twin; arguments as in :func:`sum_norm_in_blocks`."""
    y, s = sum_norm_reference(parts, residual, weight, eps, bias)
    return quantize_in_blocks(y, steps), s


def sum_norm_in_blocks(
    parts: Parts,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    steps: BlockSteps,
    bias: torch.Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> tuple[Int8Rows, torch.Tensor]:
    """``sum_norm`` whose y is quantized by ``quantize_in_blocks(y, steps)``, in one kernel.

    Args:
        parts: [S, M, H] fp32, contiguous: those that :func:`int8_linear_parts` gives of rows with groups.
        residual, weight, eps, bias, tiles: as of :func:`sum_norm`.
        steps: of rows [H]; whole blocks of it are 16384 columns at most.

    Returns:
        y int8 [M, whole blocks], columns by ``steps.order``, and s [M, H], dtype of residual, in the
        stream's order.

    Raises:
        KernelArgumentError: a shape, dtype, device or stride that the kernel cannot take.
    """
    if not isinstance(parts, torch.Tensor):
        raise KernelArgumentError(
            "sums of rows without groups are not scaled yet", seen=type(parts).__name__, allowed="fp32 parts"
        )
    expect_sum_norm(parts, residual, weight, bias)
    expect_steps(steps, residual.shape[1], residual)
    expect_range("the width in whole blocks", steps.width, 1, MAX_HIDDEN)
    if runs_on_gpu(residual):
        return sum_norm_in_blocks_triton(parts, residual, weight, eps, steps, bias, tiles)
    return sum_norm_in_blocks_reference(parts, residual, weight, eps, steps, bias)
