"""The matrix product of a decode step: a few rows against a whole weight, read once at the speed of memory.

Owns the tile of x · Wᵀ that the ``small_*`` kernels share: how the weight is streamed, how RMSNorm folds into
the rows, what is fetched while the kernel before still runs, and the default tiles. Knows no epilogue.

    acc = small_product(x_ptr, ..., rows, ...)  # [BLOCK_N, BLOCK_T] fp32
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ingot.kernels.checks import next_power_of_two
from ingot.kernels.overlap import overlaps, start_next, wait_for_previous

MAX_ROWS = 16
LINE_BYTES = tl.constexpr(128)


@triton.jit
def _prefetch(base: tl.tensor, K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr) -> None:
    """Ask for the first WIDTH elements of each row to come into L2; nobody waits for them."""
    step: tl.constexpr = LINE_BYTES * 8 // base.dtype.element_ty.primitive_bitwidth
    lines: tl.constexpr = WIDTH // step if step < WIDTH else 1
    cols = tl.minimum(tl.arange(0, lines) * step, K - 1)
    places = (base[:, None] + cols[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _normed(x: tl.tensor, rstd: tl.tensor, weight: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """``cast(cast(x * rstd) * weight)``, as in rms_norm.py."""
    y = (x.to(tl.float32) * rstd).to(DTYPE).to(tl.float32)
    return (y * weight.to(tl.float32)).to(DTYPE)


@triton.jit
def _reciprocal_rms(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    tokens: tl.tensor,
    eps: tl.tensor,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_X: tl.constexpr,
) -> tl.tensor:
    """1 / sqrt(mean(x^2) + eps) of each row, [BLOCK_T]."""
    token = tl.arange(0, BLOCK_T)
    squares = tl.zeros([BLOCK_T], dtype=tl.float32)
    for start in tl.static_range(0, K, BLOCK_X):
        cols = start + tl.arange(0, BLOCK_X)
        inside = (token < tokens)[:, None] & (cols < K)[None, :]
        x = tl.load(x_ptr + token[:, None] * x_stride + cols[None, :], mask=inside, other=0.0)
        x = x.to(tl.float32)
        squares += tl.sum(x * x, axis=1)
    return tl.rsqrt(squares / K + eps)


@triton.jit
def small_product(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    tokens: tl.tensor,
    weight_ptr: tl.tensor,
    weight_stride: tl.tensor,
    rows: tl.tensor,
    norm_ptr: tl.tensor,
    norm_eps: tl.tensor,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_X: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """Rows ``rows`` [BLOCK_N] of the weight times each row of norm(x): [BLOCK_N, BLOCK_T] fp32.

    BLOCK_T = 1: one row of x, fp32 vector sums, one tile of weights ahead in registers. BLOCK_T >= 8: matrix
    products with the weight as the left operand, so that a row's bits do not depend on the other rows.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    base = weight_ptr + rows.to(tl.int64) * weight_stride
    cols = tl.arange(0, BLOCK_K)
    start_next(OVERLAP)
    if OVERLAP > 1:
        _prefetch(base, K, PREFETCH * BLOCK_K, BLOCK_N)
    if BLOCK_T == 1:
        w = tl.load(base[:, None] + cols[None, :], mask=(cols < K)[None, :], other=0.0,
                    eviction_policy="evict_first")  # fmt: skip
        wait_for_previous(OVERLAP)
        if norm_ptr is not None:
            rstd = tl.sum(_reciprocal_rms(x_ptr, x_stride, tokens, norm_eps, K, 1, BLOCK_X), axis=0)
        sums = tl.zeros([BLOCK_N, BLOCK_K // 8], dtype=tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=1):
            ahead = start + BLOCK_K + cols
            w_ahead = tl.load(base[:, None] + ahead[None, :], mask=(ahead < K)[None, :], other=0.0,
                              eviction_policy="evict_first")  # fmt: skip
            here = start + cols
            x = tl.load(x_ptr + here, mask=here < K, other=0.0)
            if norm_ptr is not None:
                x = _normed(x, rstd, tl.load(norm_ptr + here, mask=here < K, other=0.0), dtype)
            products = w.to(tl.float32) * x.to(tl.float32)[None, :]
            sums += tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_K // 8, 8]), axis=2)
            w = w_ahead
        return tl.sum(sums, axis=1)[:, None]
    wait_for_previous(OVERLAP)
    token = tl.arange(0, BLOCK_T)
    real = token < tokens
    if norm_ptr is not None:
        rstd_rows = _reciprocal_rms(x_ptr, x_stride, tokens, norm_eps, K, BLOCK_T, BLOCK_X)
    acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        here = start + cols
        if K % BLOCK_K == 0:
            w = tl.load(base[:, None] + here[None, :], eviction_policy="evict_first")
            x_mask = real[None, :]
        else:
            w = tl.load(base[:, None] + here[None, :], mask=(here < K)[None, :], other=0.0,
                        eviction_policy="evict_first")  # fmt: skip
            x_mask = real[None, :] & (here < K)[:, None]
        x = tl.load(x_ptr + token[None, :] * x_stride + here[:, None], mask=x_mask, other=0.0)
        if norm_ptr is not None:
            g = tl.load(norm_ptr + here, mask=here < K, other=0.0)
            x = _normed(x, rstd_rows[None, :], g[:, None], dtype)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    return acc


@triton.jit
def split_pairs(acc: tl.tensor, PAIRS: tl.constexpr, BLOCK_T: tl.constexpr) -> tl.tensor:
    """The first and the second PAIRS rows of [2 PAIRS, BLOCK_T]."""
    return tl.split(tl.permute(tl.reshape(acc, [2, PAIRS, BLOCK_T]), [1, 2, 0]))


def small_tiles(
    num_tokens: int, out_features: int, in_features: int, itemsize: int, device: torch.device
) -> dict[str, int]:
    """Tile choices of a small product, measured on an H200 for the shapes of 7B models in 16 bits."""
    tiles = {"BLOCK_N": 16, "BLOCK_K": 1024, "BLOCK_T": 1, "PREFETCH": 2, "num_warps": 4, "num_stages": 1}
    if num_tokens > 1:
        tiles = {"BLOCK_N": 32, "BLOCK_K": 256, "BLOCK_T": 8, "PREFETCH": 4, "num_warps": 2, "num_stages": 4}
    if itemsize == 4:
        tiles |= {"BLOCK_K": 64, "BLOCK_N": 16}
    tiles["OVERLAP"] = 2 if overlaps(device) else 1
    return fitted(tiles, num_tokens, in_features)


def fitted(tiles: dict[str, int], num_tokens: int, in_features: int) -> dict[str, int]:
    """``tiles`` made to hold the rows, and no wider than the weight."""
    block_t = tiles["BLOCK_T"]
    if block_t < num_tokens:
        block_t = max(next_power_of_two(num_tokens), 8)
    block_k = min(tiles["BLOCK_K"], max(next_power_of_two(in_features), 16))
    return {**tiles, "BLOCK_T": block_t, "BLOCK_K": block_k}


def product_shape(choice: dict[str, int], in_features: int) -> dict[str, int]:
    """The constants of :func:`small_product` for an op's tiles."""
    names = ("BLOCK_T", "BLOCK_N", "BLOCK_K", "PREFETCH", "OVERLAP")
    block_x = min(next_power_of_two(in_features), max(4096 // choice["BLOCK_T"], 16))
    return {
        "K": in_features,
        "BLOCK_X": max(block_x, next_power_of_two(in_features) // 16),
        "STAGES": choice["num_stages"],
        **{name: choice[name] for name in names},
    }
