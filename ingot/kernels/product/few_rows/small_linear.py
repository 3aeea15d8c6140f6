"""A linear layer on a few rows, with the norm before it and the residual sum after it folded in.

y = norm(x) W^T + bias + residual, where norm is RMSNorm or nothing: normalised rows are rounded to the dtype
as in rms_norm.py, product and sums are fp32, y is rounded once.

    hidden = small_linear(attended, o_weight, residual=hidden)
    logits = small_linear(hidden, head, norm_weight=norm, norm_eps=1e-6)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ingot.kernels.activation.plain_activation import Plain, plain_activation
from ingot.kernels.kernel_checks import expect, expect_range, expect_rows, runs_on_gpu
from ingot.kernels.norm.norm_kernel import launch_norm
from ingot.kernels.norm.rms_norm import default_tiles, rms_norm_reference
from ingot.kernels.product.few_rows.few_rows_kernels import few_linear_kernel
from ingot.kernels.product.few_rows.resolved_launch import LINEAR, PARTS, ResolvedLaunch, float_launch
from ingot.kernels.product.product_arguments import stored_argument, sums_argument
from ingot.kernels.rows.row_endings import AS_THEY_ARE
from ingot.kernels.tiles.product_tiles import MAX_ROWS
from ingot.kernels.weight.stored_weight import AnyWeight, StoredWeight, dequantized, expect_weight, stored


def rows_argument(
    x: torch.Tensor, norm_weight: torch.Tensor | None, norm_eps: float, launch: ResolvedLaunch
) -> tuple[Any, ...]:
    """The fields of ``InputRows``; a norm that the loop does not apply is another kernel, launched here."""
    if launch.loop.KIND == "vectors":
        norm = () if norm_weight is None else (None, None, norm_weight, norm_eps)
        return x, None, x.shape[0], *norm
    if norm_weight is not None:
        choice = default_tiles(x.shape[1]) | {"OVERLAP": min(launch.loop.OVERLAP, 2)}
        x, _ = launch_norm(x, norm_weight, norm_eps, None, None, AS_THEY_ARE, choice)
    return x, x.stride(0), x.shape[0]


def _launch(
    x: tuple[Any, ...],
    weight: StoredWeight,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    launch: ResolvedLaunch,
    activation: Plain | None = None,
) -> None:
    few_linear_kernel[launch.grid](
        x,
        stored_argument(weight),
        sums_argument(y, bias, residual),
        N=weight.out_features,
        SHARE=launch.share,
        SPLITS=launch.splits,
        LOOP=launch.loop,
        ACTIVATION=activation,
        **launch.options,
    )


def small_linear_reference(
    x: torch.Tensor,
    weight: AnyWeight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    activation: Plain | None = None,
) -> torch.Tensor:
    """The PyTorch reference of :func:`small_linear`."""
    if norm_weight is not None:
        x, _ = rms_norm_reference(x, norm_weight, norm_eps)
    wide = dequantized(stored(weight), torch.float32)
    y = torch.nn.functional.linear(x.float(), wide, None if bias is None else bias.float())
    y = (y if residual is None else y + residual).to(x.dtype)
    return y if activation is None else plain_activation(y, activation)


def small_linear(
    x: torch.Tensor,
    weight: AnyWeight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    tiles: Mapping[str, int] | None = None,
    activation: Plain | None = None,
) -> torch.Tensor:
    """y = norm(x) W^T + bias + residual or its activation, for the few rows of a decode step.

    A row's result does not depend on the other rows. Alone (BLOCK_T = 1) it is summed in another order, so it
    agrees to rounding; among 2 to 8, 9 to 16, 17 to 32 and 33 to 64 rows it is the same to the bit.

    Args:
        x: [M, K] fp16, bf16 or fp32, M up to 64.
        weight: [N, K], dtype of x, or stored in fewer bits; like norm_weight a constant: with ``OVERLAP`` not
            written since the last launch without.
        bias: [N] or None.
        residual: [M, N] or None; added after the bias.
        norm_weight: [K] or None; with it norm is RMSNorm, rounded as in :func:`rms_norm`.
        norm_eps: added to the mean square.
        tiles: ``BLOCK_N``, ``BLOCK_K``, ``BLOCK_T`` (1: vector sums, one row only; 8 to 64: matrix products,
            after a kernel for the norm), ``PROGRAMS`` (per multiprocessor; of vector sums at most so many
            walk the tiles, of matrix products so many share the outputs evenly, 0: whole tiles), ``OVERLAP``
            (1:
                off; 2: start while the previous kernel runs, and let the next one start at once; 4: let the
                next one start with the last tile; sm_90 and later), ``PREFETCH`` (of a matrix product; 0:
                weights and x are pipelined; 1: the weights alone, from before the wait on; 2: and x one step
                ahead in registers;
            64 and more: as 0, with so many columns prefetched into L2 before the wait; of weights of few bits
            all but 1 are as 0), ``FRAGMENTS`` (of weights of few bits and up to 16 rows, straight into
            registers; 1: a warp loads a chunk at its step, of 4 bits as 2; 2: one ahead, 3: two;
            0: through shared memory), ``num_warps``, ``num_stages``.
        activation: of a plain MLP, in fp32 of the rounded y; None: y itself.

    Returns:
        [M, N], dtype of x.
    """
    expect_few(x)
    weight = stored(weight)
    expect_weight(weight, x)
    if bias is not None:
        expect("bias", bias, (weight.out_features,), like=x)
    if residual is not None:
        expect("residual", residual, (x.shape[0], weight.out_features), like=x)
    if norm_weight is not None:
        expect("norm_weight", norm_weight, (x.shape[1],), like=x)
    if not runs_on_gpu(x):
        return small_linear_reference(x, weight, bias, residual, norm_weight, norm_eps, activation)
    launch = float_launch(LINEAR, x, weight, tiles)
    y = torch.empty((x.shape[0], weight.out_features), dtype=x.dtype, device=x.device)
    if y.numel():
        rows = rows_argument(x, norm_weight, norm_eps, launch)
        _launch(rows, weight, bias, residual, y, launch, activation)
    return y


def small_linear_parts(
    x: torch.Tensor, weight: AnyWeight, tiles: Mapping[str, int] | None = None
) -> torch.Tensor:
    """x W^T as partial sums over the columns, which :func:`sum_norm` adds up.

    Args:
        x, weight: as of :func:`small_linear`.
        tiles: as of :func:`small_linear`, with BLOCK_T of 8 and more, and ``SPLITS``.

    Returns:
        [SPLITS, M, N] fp32; on the CPU one part.
    """
    expect_few(x)
    weight = stored(weight)
    expect_weight(weight, x)
    if not runs_on_gpu(x):
        return torch.nn.functional.linear(x.float(), dequantized(weight, torch.float32))[None]
    launch = float_launch(PARTS, x, weight, tiles)
    y = torch.empty((launch.splits, x.shape[0], weight.out_features), dtype=torch.float32, device=x.device)
    if y.numel():
        _launch((x, x.stride(0), x.shape[0]), weight, None, None, y, launch)
    return y


def expect_few(x: torch.Tensor) -> None:
    """Raise unless x is float rows [M, K], few enough for these kernels."""
    expect_rows("x", x)
    expect_range("the number of rows", x.shape[0], 0, MAX_ROWS)
