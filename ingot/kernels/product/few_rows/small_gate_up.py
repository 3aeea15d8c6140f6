"""The first half of a gated MLP on a few rows: norm, gate and up products, silu(gate) * up, in one kernel.

Owns the formula y = cast(silu(g)) * u with g, u = norm(x) Wg^T, norm(x) Wu^T, each rounded to the dtype, as
in gated_mlp.py. Knows no model.

    inner = small_gate_up(hidden, gate_up_weight, norm_weight, 1e-6)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ingot.kernels.activation.gated_mlp import silu_mul_reference
from ingot.kernels.kernel_checks import KernelArgumentError, expect, expect_float, expect_range, runs_on_gpu
from ingot.kernels.product.few_rows.few_rows_kernels import few_gate_up_kernel
from ingot.kernels.product.few_rows.resolved_launch import GATE_UP, float_launch
from ingot.kernels.product.few_rows.small_linear import rows_argument, small_linear_reference
from ingot.kernels.product.product_arguments import stored_argument
from ingot.kernels.tiles.product_tiles import MAX_ROWS
from ingot.kernels.weight.stored_weight import AnyWeight, expect_weight, stored


def small_gate_up_triton(
    x: torch.Tensor,
    weight: AnyWeight,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    tiles: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """Launch the kernel; arguments as in :func:`small_gate_up`, unchecked."""
    weight = stored(weight)
    launch = float_launch(GATE_UP, x, weight, tiles)
    y = torch.empty((x.shape[0], weight.out_features // 2), dtype=x.dtype, device=x.device)
    if y.numel():
        few_gate_up_kernel[launch.grid](
            rows_argument(x, norm_weight, norm_eps, launch),
            stored_argument(weight),
            y,
            INNER=y.shape[1],
            SHARE=launch.share,
            LOOP=launch.loop,
            **launch.options,
        )
    return y


def small_gate_up_reference(
    x: torch.Tensor, weight: AnyWeight, norm_weight: torch.Tensor | None = None, norm_eps: float = 0.0
) -> torch.Tensor:
    """The PyTorch reference; arguments as in :func:`small_gate_up`."""
    return silu_mul_reference(small_linear_reference(x, weight, norm_weight=norm_weight, norm_eps=norm_eps))


def small_gate_up(
    x: torch.Tensor,
    weight: AnyWeight,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    tiles: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """y = cast(silu(norm(x) Wg^T)) * (norm(x) Wu^T), for the few rows of a decode step (SwiGLU; Shazeer,
    2020).

    Args:
        x: [M, K] fp16, bf16 or fp32, M up to 64.
        weight: [2 I, K], dtype of x or stored in fewer bits: the gate's rows, then the up projection's.
        norm_weight: [K] or None; with it norm is RMSNorm, rounded as in :func:`rms_norm`.
        norm_eps: added to the mean square.
        tiles: as of :func:`small_linear`; ``BLOCK_N`` counts gate and up rows, at least 2.

    Returns:
        [M, I], dtype of x. How a row's bits depend on M: see :func:`small_linear`.

    Raises:
        KernelArgumentError: a shape, dtype, device or stride that the kernel cannot take.
    """
    expect_float("x", x)
    expect("x", x, (None, None), like=x)
    expect_range("the number of rows", x.shape[0], 0, MAX_ROWS)
    weight = stored(weight)
    expect_weight(weight, x)
    if weight.out_features % 2:
        raise KernelArgumentError(
            "weight must hold two halves", seen=weight.out_features, allowed="an even height"
        )
    if norm_weight is not None:
        expect("norm_weight", norm_weight, (x.shape[1],), like=x)
    if runs_on_gpu(x):
        return small_gate_up_triton(x, weight, norm_weight, norm_eps, tiles)
    return small_gate_up_reference(x, weight, norm_weight, norm_eps)
