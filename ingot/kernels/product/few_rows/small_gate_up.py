"""The first half of a gated MLP on a few rows: norm, gate and up products, silu(gate) * up, in one kernel.

inner = small_gate_up(hidden, gate_up_weight, norm_weight, 1e-6)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ingot.kernels.activation.gated_mlp import silu_mul_reference
from ingot.kernels.kernel_checks import KernelArgumentError, expect, runs_on_gpu
from ingot.kernels.product.few_rows.few_rows_kernels import few_gate_up_kernel
from ingot.kernels.product.few_rows.resolved_launch import GATE_UP, float_launch
from ingot.kernels.product.few_rows.small_linear import expect_few, rows_argument, small_linear_reference
from ingot.kernels.product.product_arguments import stored_argument
from ingot.kernels.weight.stored_weight import AnyWeight, expect_weight, stored


def small_gate_up(
    x: torch.Tensor,
    weight: AnyWeight,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    tiles: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """y = cast(silu(g)) * u with g, u = norm(x) Wg^T, norm(x) Wu^T, each rounded to the dtype, for the few
    rows of a decode step (SwiGLU; Shazeer, 2020).

    Args:
        x: [M, K] fp16, bf16 or fp32, M up to 64.
        weight: [2 I, K], dtype of x or stored in fewer bits: the gate's rows, then the up projection's.
        norm_weight, norm_eps: as of :func:`small_linear`.
        tiles: as of :func:`small_linear`; ``BLOCK_N`` counts gate and up rows, at least 2.

    Returns:
        [M, I], dtype of x. How a row's bits depend on M: see :func:`small_linear`.
    """
    expect_few(x)
    weight = stored(weight)
    expect_weight(weight, x)
    if weight.out_features % 2:
        raise KernelArgumentError(
            "weight must hold two halves", seen=weight.out_features, allowed="an even height"
        )
    if norm_weight is not None:
        expect("norm_weight", norm_weight, (x.shape[1],), like=x)
    if not runs_on_gpu(x):
        return silu_mul_reference(small_linear_reference(x, weight, None, None, norm_weight, norm_eps))
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
