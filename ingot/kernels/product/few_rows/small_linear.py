"""A linear layer on a few rows, with the norm before it and the residual sum after it folded in.

Owns the formula y = norm(x) W^T + bias + residual, where norm is RMSNorm or nothing: the normalised rows are
rounded to the dtype as in rms_norm.py, the product and the sums are fp32, y is rounded once. Knows no model.

    hidden = small_linear(attended, o_weight, residual=hidden)
    logits = small_linear(hidden, head, norm_weight=norm, norm_eps=1e-6)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ingot.kernels.activation.plain_activation import Plain, plain_activation
from ingot.kernels.kernel_checks import expect, expect_float, expect_range, runs_on_gpu
from ingot.kernels.norm.rms_norm import rms_norm_reference, rms_norm_triton
from ingot.kernels.product.few_rows.few_rows_kernels import few_linear_kernel
from ingot.kernels.product.few_rows.resolved_launch import LINEAR, PARTS, ResolvedLaunch, float_launch
from ingot.kernels.product.product_arguments import stored_argument, sums_argument
from ingot.kernels.tiles.product_tiles import MAX_ROWS
from ingot.kernels.weight.stored_weight import AnyWeight, StoredWeight, dequantized, expect_weight, stored


def rows_argument(
    x: torch.Tensor, norm_weight: torch.Tensor | None, norm_eps: float, launch: ResolvedLaunch
) -> tuple[Any, ...]:
    """The fields of ``Rows``; where the loop applies no norm, another kernel has, before."""
    if launch.loop.KIND == "vectors":
        norm = () if norm_weight is None else (None, None, norm_weight, norm_eps)
        return x, None, x.shape[0], *norm
    if norm_weight is not None:
        x, _ = rms_norm_triton(x, norm_weight, norm_eps, tiles={"OVERLAP": min(launch.loop.OVERLAP, 2)})
    return x, x.stride(0), x.shape[0]


def small_linear_parts_triton(
    x: torch.Tensor, weight: AnyWeight, tiles: Mapping[str, int] | None = None
) -> torch.Tensor:
    """Launch the kernel; arguments as in :func:`small_linear_parts`, unchecked."""
    weight = stored(weight)
    launch = float_launch(PARTS, x, weight, tiles)
    y = torch.empty((launch.splits, x.shape[0], weight.out_features), dtype=torch.float32, device=x.device)
    if y.numel():
        _launch((x, x.stride(0), x.shape[0]), weight, None, None, y, launch)
    return y


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


def small_linear_triton(
    x: torch.Tensor,
    weight: AnyWeight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    tiles: Mapping[str, int] | None = None,
    activation: Plain | None = None,
) -> torch.Tensor:
    """Launch the kernel; arguments as in :func:`small_linear`, unchecked."""
    weight = stored(weight)
    launch = float_launch(LINEAR, x, weight, tiles)
    y = torch.empty((x.shape[0], weight.out_features), dtype=x.dtype, device=x.device)
    if y.numel():
        _launch(
            rows_argument(x, norm_weight, norm_eps, launch), weight, bias, residual, y, launch, activation
        )
    return y


def small_linear_reference(
    x: torch.Tensor,
    weight: AnyWeight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    activation: Plain | None = None,
) -> torch.Tensor:
    """The PyTorch reference; arguments as in :func:`small_linear`."""
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

    A row's result does not depend on the other rows. Alone (BLOCK_T = 1) it is summed in another order than
    in company, so that the two agree to rounding; among 2 to 8, 9 to 16, 17 to 32 and 33 to 64 rows it is the
    same to the bit.

    Args:
        x: [M, K] fp16, bf16 or fp32, M up to 64.
        weight: [N, K], dtype of x, or stored in fewer bits; as norm_weight a constant: with ``OVERLAP`` not
            written since the last launch without.
        bias: [N] or None.
        residual: [M, N] or None; added after the bias.
        norm_weight: [K] or None; with it norm is RMSNorm, rounded as in :func:`rms_norm`.
        norm_eps: added to the mean square.
        tiles: ``BLOCK_N``, ``BLOCK_K``, ``BLOCK_T`` (1: vector sums, one row only; 8 to 64: matrix products,
            after a kernel for the norm if there is one), ``PROGRAMS`` (a multiprocessor; of vector sums at
            most so many walk the tiles, of matrix products so many share the outputs evenly, 0: whole tiles),
            ``OVERLAP`` (1: off; 2: start while the kernel before still runs, and let the next one start at
            once; 4: let the next one start with the last tile; sm_90 and later), ``PREFETCH`` (of a matrix
            product; 0: weights and x are pipelined; 1: the weights alone, from before the wait on; 2: and x
            a step ahead in registers; 64 and more: as 0, and so many columns are asked into L2 before the
            wait; of weights of few bits all but 1 are as 0), ``FRAGMENTS`` (of weights of few bits and up to
            16 rows: straight into registers, of 4 bits so many chunks a warp ahead; 0: through shared
            memory), ``num_warps``, ``num_stages``.
        activation: of a plain MLP, of y rounded, in fp32; None: y itself.

    Returns:
        [M, N], dtype of x.

    Raises:
        KernelArgumentError: a shape, dtype, device or stride that the kernel cannot take.
    """
    expect_float("x", x)
    expect("x", x, (None, None), like=x)
    expect_range("the number of rows", x.shape[0], 0, MAX_ROWS)
    weight = stored(weight)
    expect_weight(weight, x)
    if bias is not None:
        expect("bias", bias, (weight.out_features,), like=x)
    if residual is not None:
        expect("residual", residual, (x.shape[0], weight.out_features), like=x)
    if norm_weight is not None:
        expect("norm_weight", norm_weight, (x.shape[1],), like=x)
    if runs_on_gpu(x):
        return small_linear_triton(x, weight, bias, residual, norm_weight, norm_eps, tiles, activation)
    return small_linear_reference(x, weight, bias, residual, norm_weight, norm_eps, activation)


def small_linear_parts_reference(x: torch.Tensor, weight: AnyWeight, splits: int = 1) -> torch.Tensor:
    """The PyTorch reference; arguments as in :func:`small_linear_parts`, the whole sum as the only part."""
    return torch.nn.functional.linear(x.float(), dequantized(stored(weight), torch.float32))[None]


def small_linear_parts(
    x: torch.Tensor, weight: AnyWeight, tiles: Mapping[str, int] | None = None
) -> torch.Tensor:
    """x W^T as parts of its sums over the columns, which :func:`sum_norm` adds up.

    Args:
        x: [M, K] fp16, bf16 or fp32, M up to 64.
        weight: [N, K], a constant, as in :func:`small_linear`.
        tiles: as of :func:`small_linear`, with BLOCK_T of 8 and more, and ``SPLITS``.

    Returns:
        [SPLITS, M, N] fp32; on the CPU one part.

    Raises:
        KernelArgumentError: a shape, dtype, device or stride that the kernel cannot take.
    """
    expect_float("x", x)
    expect("x", x, (None, None), like=x)
    expect_range("the number of rows", x.shape[0], 0, MAX_ROWS)
    expect_weight(stored(weight), x)
    if runs_on_gpu(x):
        return small_linear_parts_triton(x, weight, tiles)
    return small_linear_parts_reference(x, weight)
