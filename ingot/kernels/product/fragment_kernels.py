"""The small products of up to 16 rows whose weights of 8 or 4 bits go straight into registers.

Owns three kernels, one an end of product_ends.py, and their launches. Knows no check and no choice of tiles:
small_linear.py, small_gate_up.py and small_qkv.py launch them and say what they compute.

    fragment_linear(x, weight, bias, residual, y, choice)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from ingot.kernels.overlap import launch_options, start_next
from ingot.kernels.product.fragment_product import (
    fragment_tile,
    row_order,
)
from ingot.kernels.product.matrix_product import number_format, weight_pointers
from ingot.kernels.product.product_ends import channels, store_activated, store_heads, store_sums
from ingot.kernels.weight.stored_weight import StoredWeight


@triton.jit
def fragment_linear_kernel(
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
    N: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ASM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Tiles of BLOCK_N outputs of every row, or with SPLITS parts of their sums."""
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    BLOCKS: tl.constexpr = BLOCK_N // 16
    LAST: tl.constexpr = N // 16 - 1
    start_next(OVERLAP)
    tile, split = tl.program_id(0), tl.program_id(1)
    acc = fragment_tile(
        x_ptr, x_stride, tokens, weight_ptr, weight_stride, scale_ptr, scale_stride, zero_ptr, tile * BLOCKS,
        split * STEPS // SPLITS, (split + 1) * STEPS // SPLITS, K, BITS, GROUP, BLOCK_T, BLOCK_N, BLOCK_K,
        BLOCKS, 0, LAST, WARPS, FRAGMENTS, OVERLAP, ASM,
    )  # fmt: skip
    store_sums(acc, tile * BLOCK_N + row_order(BLOCK_N), N, split, bias_ptr, residual_ptr,
               residual_stride, y_ptr, tokens, N, BLOCK_T)  # fmt: skip


@triton.jit
def fragment_gate_up_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    weight_stride: tl.tensor,
    scale_ptr: tl.tensor,
    scale_stride: tl.tensor,
    zero_ptr: tl.tensor,
    y_ptr: tl.tensor,
    tokens: tl.tensor,
    x_stride: tl.tensor,
    INNER: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Tiles of BLOCK_N / 2 outputs of every row."""
    PAIRS: tl.constexpr = BLOCK_N // 2
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    RUN: tl.constexpr = PAIRS // 16
    GAP: tl.constexpr = INNER // 16
    LAST: tl.constexpr = INNER // 8 - 1
    start_next(OVERLAP)
    tile = tl.program_id(0)
    acc = fragment_tile(
        x_ptr, x_stride, tokens, weight_ptr, weight_stride, scale_ptr, scale_stride, zero_ptr, tile * RUN,
        0, STEPS, K, BITS, GROUP, BLOCK_T, BLOCK_N, BLOCK_K, RUN, GAP, LAST, WARPS, FRAGMENTS, OVERLAP, ASM,
    )  # fmt: skip
    store_activated(acc, tile * PAIRS + row_order(PAIRS), INNER, y_ptr, tokens, INNER, PAIRS, BLOCK_T)


@triton.jit
def fragment_qkv_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    weight_stride: tl.tensor,
    scale_ptr: tl.tensor,
    scale_stride: tl.tensor,
    zero_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    table_ptr: tl.tensor,
    table_rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    tokens: tl.tensor,
    x_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    inverse_log: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LOGN: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Tiles of BLOCK_N / 2 channel pairs of one head, of every row."""
    PAIRS: tl.constexpr = BLOCK_N // 2
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    IN_HEAD: tl.constexpr = (HEAD_DIM // 2 + PAIRS - 1) // PAIRS
    RUN: tl.constexpr = PAIRS // 16
    GAP: tl.constexpr = HEAD_DIM // 32
    LAST: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM // 16 - 1
    start_next(OVERLAP)
    tile = tl.program_id(0)
    head, start = tile // IN_HEAD, tile % IN_HEAD * PAIRS
    acc = fragment_tile(
        x_ptr, x_stride, tokens, weight_ptr, weight_stride, scale_ptr, scale_stride, zero_ptr,
        (head * HEAD_DIM + start) // 16, 0, STEPS, K, BITS, GROUP, BLOCK_T, BLOCK_N, BLOCK_K, RUN, GAP, LAST,
        WARPS, FRAGMENTS, OVERLAP, ASM,
    )  # fmt: skip
    if bias_ptr is not None:
        lane = row_order(BLOCK_N)
        own = tl.minimum(start + lane % PAIRS, HEAD_DIM // 2 - 1)
        firsts, seconds = channels(own, HEAD_DIM, HALF)
        outputs = head * HEAD_DIM + tl.where(lane < PAIRS, firsts, seconds)
        acc += tl.load(bias_ptr + outputs).to(tl.float32)[:, None]
    store_heads(acc, head, start + row_order(PAIRS), HEAD_DIM // 2, table_ptr, table_rows_ptr, positions_ptr,
                slots_ptr, q_ptr, key_ptr, value_ptr, tokens, table_stride, block_stride, head_stride,
                token_stride, inverse_log, HEADS, KV_HEADS, HEAD_DIM, HALF, BLOCK_SIZE, LOGN, PAIRS,
                BLOCK_T)  # fmt: skip


def _options(choice: Mapping[str, int], weight: StoredWeight, device: torch.device) -> dict[str, int]:
    names = ("BLOCK_T", "BLOCK_N", "BLOCK_K", "FRAGMENTS", "OVERLAP")
    shape = {**number_format(weight), **{name: choice[name] for name in names}}
    return {**shape, "WARPS": choice["num_warps"], "num_stages": 1, **launch_options(choice, device)}


def fragment_linear(
    x: torch.Tensor,
    weight: StoredWeight,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    choice: Mapping[str, int],
) -> None:
    """Launch for y [M, N], or for parts [SPLITS, M, N] of the sums."""
    grid = (triton.cdiv(weight.out_features, choice["BLOCK_N"]), choice["SPLITS"])
    fragment_linear_kernel[grid](
        x,
        *weight_pointers(weight),
        bias,
        residual,
        y,
        x.shape[0],
        x.stride(0),
        0 if residual is None else residual.stride(0),
        N=weight.out_features,
        SPLITS=choice["SPLITS"],
        **_options(choice, weight, x.device),
    )


def fragment_gate_up(
    x: torch.Tensor, weight: StoredWeight, y: torch.Tensor, choice: Mapping[str, int]
) -> None:
    """Launch for y [M, I]."""
    fragment_gate_up_kernel[(triton.cdiv(y.shape[1], choice["BLOCK_N"] // 2),)](
        x,
        *weight_pointers(weight),
        y,
        x.shape[0],
        x.stride(0),
        INNER=y.shape[1],
        **_options(choice, weight, x.device),
    )


def fragment_qkv(
    x: torch.Tensor,
    weight: StoredWeight,
    bias: torch.Tensor | None,
    places: tuple[Any, ...],
    strides: tuple[Any, ...],
    shape: Mapping[str, int],
    choice: Mapping[str, int],
) -> None:
    """Launch; ``places``, ``strides`` and ``shape`` are the kernel's, from the table to value_ptr and the
    number of tokens, from the table's stride to inverse_log, from HEADS to LOGN.
    """
    heads = shape["HEADS"] + 2 * shape["KV_HEADS"]
    tiles = heads * triton.cdiv(shape["HEAD_DIM"] // 2, choice["BLOCK_N"] // 2)
    fragment_qkv_kernel[(tiles,)](
        x,
        *weight_pointers(weight),
        bias,
        *places,
        x.stride(0),
        *strides,
        **shape,
        **_options(choice, weight, x.device),
    )
