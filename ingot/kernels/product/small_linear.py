"""A linear layer on a few rows, with the norm before it and the residual sum after it folded in.

Owns the formula y = norm(x) W^T + bias + residual, where norm is RMSNorm or nothing: the normalised rows are
rounded to the dtype as in rms_norm.py, the product and the sums are fp32, y is rounded once. Knows no model.

    hidden = small_linear(attended, o_weight, residual=hidden)
    logits = small_linear(hidden, head, norm_weight=norm, norm_eps=1e-6)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ingot.kernels.checks import expect, expect_float, expect_range, merge_tiles, runs_on_gpu
from ingot.kernels.norm.rms_norm import rms_norm_reference, rms_norm_triton
from ingot.kernels.overlap import launch_options, start_next
from ingot.kernels.product.fragment_kernels import fragment_linear
from ingot.kernels.product.matrix_product import even_share, matrix_shape, weight_pointers, weight_tile
from ingot.kernels.product.product_ends import store_sums
from ingot.kernels.product.small_product import (
    MAX_ROWS,
    expect_rows,
    num_programs,
    prepare_rows,
    product_shape,
    product_tile,
    small_tiles,
)
from ingot.kernels.tiles.product_tiles import settled, split_tiles, whole_chunks
from ingot.kernels.weight.stored_weight import AnyWeight, StoredWeight, dequantized, expect_weight, stored


@triton.jit
def _rows(tile: tl.tensor, N: tl.constexpr, BLOCK_N: tl.constexpr) -> tl.tensor:
    """The weight rows of a tile; the last row again where there are no more."""
    return tl.minimum(tile * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)


@triton.jit
def small_linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    y_ptr: tl.tensor,
    tokens: tl.tensor,
    weight_stride: tl.tensor,
    residual_stride: tl.tensor,
    norm_eps: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_X: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Tiles of BLOCK_N outputs of every row, a whole stride of programs apart."""
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    token = tl.arange(0, 1)
    if OVERLAP == 2:
        start_next(OVERLAP)
    first, programs = tl.program_id(0), tl.num_programs(0)
    w, x, rstd = prepare_rows(x_ptr, weight_ptr, weight_stride,
                              _rows(first, N, BLOCK_N), norm_ptr, norm_eps,
                              K, BLOCK_K, BLOCK_X, OVERLAP)  # fmt: skip
    for tile in tl.range(first, TILES, programs, num_stages=1):
        rows = _rows(tile, N, BLOCK_N)
        next_rows = _rows(tile + programs, N, BLOCK_N)
        outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (outputs < N)[:, None] & (token < tokens)[None, :]
        # Asked for before the product, so that nothing waits for them after it.
        addend = tl.zeros([BLOCK_N, 1], dtype=tl.float32)
        if bias_ptr is not None:
            addend += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
        if residual_ptr is not None:
            places = token[None, :] * residual_stride + outputs[:, None]
            addend += tl.load(residual_ptr + places, mask=inside, other=0.0).to(tl.float32)
        has_next = tile + programs < TILES
        if OVERLAP == 4:  # noqa: SIM102 - one condition is known when compiling, the other is not
            if tile + programs >= TILES:
                start_next(OVERLAP)
        acc, w = product_tile(w, x, rstd, x_ptr, weight_ptr, weight_stride, rows, next_rows,
                              has_next, norm_ptr, K, BLOCK_N, BLOCK_K)  # fmt: skip
        y = (acc + addend).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + token[None, :].to(tl.int64) * N + outputs[:, None], y, mask=inside)


@triton.jit
def small_linear_matrix_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    weight_stride: tl.tensor,
    scale_ptr: tl.tensor,
    scale_stride: tl.tensor,
    zero_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    y_ptr: tl.tensor,
    tokens: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    x_scale_ptr: tl.tensor,
    x_scale_stride: tl.tensor,
    N: tl.constexpr,
    SHARE: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ASM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """SHARE outputs of every row, at most BLOCK_N, or with SPLITS a part of their sums.

    x and weight in 8 bits (int8_linear.py) have fp32 scales; without ``x_scale_ptr`` y is their int32 sums.
    """
    if OVERLAP == 2:
        start_next(OVERLAP)
    start, split = tl.program_id(0) * SHARE, tl.program_id(1)
    INT8: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    STEPS: tl.constexpr = K // GROUP if INT8 and GROUP > 0 else (K + BLOCK_K - 1) // BLOCK_K
    lane = tl.arange(0, BLOCK_N)
    rows = tl.minimum(start + lane, N - 1)
    live = None if SHARE == BLOCK_N else lane < SHARE
    first = split * STEPS // SPLITS
    acc = weight_tile(x_ptr, x_stride, x_scale_ptr, x_scale_stride, tokens, weight_ptr, weight_stride,
                      scale_ptr, scale_stride, zero_ptr, rows, live, first,
                      (split + 1) * STEPS // SPLITS - first, K, BITS, GROUP, BLOCK_T, BLOCK_N, BLOCK_K,
                      PREFETCH, OVERLAP, ASM)  # fmt: skip
    if OVERLAP == 4:
        start_next(OVERLAP)
    store_sums(acc, start + lane, tl.minimum(start + SHARE, N), split, bias_ptr, residual_ptr,
               residual_stride, y_ptr, tokens, N, BLOCK_T)  # fmt: skip


def _matrix(
    x: torch.Tensor,
    weight: StoredWeight,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    choice: Mapping[str, int],
) -> None:
    if choice["FRAGMENTS"]:
        fragment_linear(x, weight, bias, residual, y, choice)
        return
    outputs = weight.out_features
    share = even_share(outputs, choice["BLOCK_N"], choice, x.device)
    small_linear_matrix_kernel[(triton.cdiv(outputs, share), choice["SPLITS"])](
        x,
        *weight_pointers(weight),
        bias,
        residual,
        y,
        x.shape[0],
        x.stride(0),
        0 if residual is None else residual.stride(0),
        None,
        0,
        N=outputs,
        SHARE=share,
        SPLITS=choice["SPLITS"],
        **matrix_shape(choice, weight),
        **launch_options(choice, x.device),
    )


def small_linear_parts_triton(
    x: torch.Tensor, weight: AnyWeight, tiles: Mapping[str, int] | None = None
) -> torch.Tensor:
    """Launch the kernel; arguments as in :func:`small_linear_parts`, unchecked."""
    weight = stored(weight)
    (num_tokens, width), outputs = x.shape, weight.out_features
    defaults = split_tiles(num_tokens, weight, x.element_size(), x.device)
    choice = settled(whole_chunks(merge_tiles(defaults, tiles), weight))
    expect_rows(choice, num_tokens)
    # A part without columns would have nothing to wait for.
    choice["SPLITS"] = min(choice["SPLITS"], triton.cdiv(width, choice["BLOCK_K"]))
    y = torch.empty((choice["SPLITS"], num_tokens, outputs), dtype=torch.float32, device=x.device)
    if y.numel():
        _matrix(x, weight, None, None, y, choice)
    return y


def small_linear_triton(
    x: torch.Tensor,
    weight: AnyWeight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    tiles: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """Launch the kernel; arguments as in :func:`small_linear`, unchecked."""
    weight = stored(weight)
    num_tokens, outputs = x.shape[0], weight.out_features
    defaults = small_tiles(num_tokens, weight, x.element_size(), x.device)
    choice = settled(whole_chunks(merge_tiles(defaults, tiles), weight))
    expect_rows(choice, num_tokens)
    y = torch.empty((num_tokens, outputs), dtype=x.dtype, device=x.device)
    if choice["BLOCK_T"] > 1 and y.numel():
        if norm_weight is not None:
            x, _ = rms_norm_triton(x, norm_weight, norm_eps, tiles={"OVERLAP": min(choice["OVERLAP"], 2)})
        _matrix(x, weight, bias, residual, y, choice | {"SPLITS": 1})
    elif y.numel():
        tiles_to_do = triton.cdiv(outputs, choice["BLOCK_N"])
        small_linear_kernel[(num_programs(choice, tiles_to_do, x.device),)](
            x,
            weight.values,
            bias,
            residual,
            norm_weight,
            y,
            num_tokens,
            weight.values.stride(0),
            0 if residual is None else residual.stride(0),
            norm_eps,
            N=outputs,
            **product_shape(choice, weight),
            **launch_options(choice, x.device),
        )
    return y


def small_linear_reference(
    x: torch.Tensor,
    weight: AnyWeight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
) -> torch.Tensor:
    """The PyTorch twin; arguments as in :func:`small_linear`."""
    if norm_weight is not None:
        x, _ = rms_norm_reference(x, norm_weight, norm_eps)
    wide = dequantized(stored(weight), torch.float32)
    y = torch.nn.functional.linear(x.float(), wide, None if bias is None else bias.float())
    return (y if residual is None else y + residual).to(x.dtype)


def small_linear(
    x: torch.Tensor,
    weight: AnyWeight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    tiles: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """y = norm(x) W^T + bias + residual, for the few rows of a decode step.

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
        return small_linear_triton(x, weight, bias, residual, norm_weight, norm_eps, tiles)
    return small_linear_reference(x, weight, bias, residual, norm_weight, norm_eps)


def small_linear_parts_reference(x: torch.Tensor, weight: AnyWeight, splits: int = 1) -> torch.Tensor:
    """The PyTorch twin; arguments as in :func:`small_linear_parts`, the whole sum as the only part."""
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
