"""The matrix product of a decode step: a few rows against a whole weight, read once at the speed of memory.

Owns the tile of x · Wᵀ that the ``small_*`` kernels share: how the weight is streamed, how RMSNorm folds into
the rows, what is fetched while the kernel before still runs, and the default tiles. Knows no epilogue.

    held = prepare_rows(x_ptr, ...)
    for tile in range(...):
        acc, w = product_tile(w, ...)  # [BLOCK_N, BLOCK_T] fp32
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ingot.kernels.checks import KernelArgumentError, next_power_of_two
from ingot.kernels.matrix_product import matrix_tiles
from ingot.kernels.overlap import overlaps, wait_for_previous

MAX_ROWS = 128


@triton.jit
def _normed(x: tl.tensor, rstd: tl.tensor, weight: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """``cast(cast(x * rstd) * weight)``, as in rms_norm.py."""
    y = (x.to(tl.float32) * rstd).to(DTYPE).to(tl.float32)
    return (y * weight.to(tl.float32)).to(DTYPE)


@triton.jit
def _weights(
    weight_ptr: tl.tensor,
    weight_stride: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    width: tl.tensor,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """A tile [rows, cols] of the weight, streamed past the caches; zeros from column ``width`` on."""
    places = weight_ptr + (rows.to(tl.int64) * weight_stride)[:, None] + cols[None, :]
    if MASKED:
        return tl.load(places, mask=(cols < width)[None, :], other=0.0, eviction_policy="evict_first")
    return tl.load(places, eviction_policy="evict_first")


@triton.jit
def prepare_rows(
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
    BLOCK_K: tl.constexpr,
    BLOCK_X: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> tl.tensor:
    """What a program holds from tile to tile: (first weights, x, 1 / rms); waits for the previous kernel.

    With BLOCK_T = 1, and with PREFETCH, the first step of weights ``rows`` is on its way before the wait.
    With BLOCK_T = 1 a row that fits BLOCK_K stays in registers, normalised. What a variant does not hold is
    an empty scalar.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    cols = tl.arange(0, BLOCK_K)
    w = 0.0
    x = 0.0
    rstd = 0.0
    if BLOCK_T == 1 or PREFETCH > 1:
        w = _weights(weight_ptr, weight_stride, rows, cols, K, K % BLOCK_K != 0)
    if BLOCK_T == 1 and K <= BLOCK_K and norm_ptr is not None:
        g = tl.load(norm_ptr + cols, mask=cols < K, other=0.0)
    wait_for_previous(OVERLAP)
    if BLOCK_T == 1 and K <= BLOCK_K:
        x = tl.load(x_ptr + cols, mask=cols < K, other=0.0)
        if norm_ptr is not None:
            wide = x.to(tl.float32)
            x = _normed(x, tl.rsqrt(tl.sum(wide * wide, axis=0) / K + norm_eps), g, dtype)
        x = x.to(tl.float32)
    elif norm_ptr is not None:
        token = tl.arange(0, BLOCK_T)
        squares = tl.zeros([BLOCK_T, BLOCK_X], dtype=tl.float32)
        for start in tl.static_range(0, K, BLOCK_X):
            piece = start + tl.arange(0, BLOCK_X)
            inside = (token < tokens)[:, None] & (piece < K)[None, :]
            part = tl.load(x_ptr + token[:, None] * x_stride + piece[None, :], mask=inside, other=0.0)
            squares += part.to(tl.float32) * part.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(squares, axis=1) / K + norm_eps)  # [BLOCK_T]
        if BLOCK_T == 1:
            rstd = tl.sum(rstd, axis=0)
    return w, x, rstd


@triton.jit
def _columns(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    tokens: tl.tensor,
    rstd: tl.tensor,
    norm_ptr: tl.tensor,
    here: tl.tensor,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Columns ``here`` of norm(x), transposed: [BLOCK_K, BLOCK_T]."""
    token = tl.arange(0, BLOCK_T)
    mask = (token < tokens)[None, :]
    if MASKED:
        mask = mask & (here < K)[:, None]
    x = tl.load(x_ptr + token[None, :] * x_stride + here[:, None], mask=mask, other=0.0)
    if norm_ptr is not None:
        g = tl.load(norm_ptr + here, mask=here < K, other=0.0)
        x = _normed(x, rstd[None, :], g[:, None], x_ptr.dtype.element_ty)
    return x


@triton.jit
def product_tile(
    w: tl.tensor,
    x: tl.tensor,
    rstd: tl.tensor,
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    tokens: tl.tensor,
    weight_ptr: tl.tensor,
    weight_stride: tl.tensor,
    rows: tl.tensor,
    next_rows: tl.tensor,
    has_next: tl.tensor,
    norm_ptr: tl.tensor,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """Rows ``rows`` of the weight times each row of norm(x), [BLOCK_N, BLOCK_T] fp32; and the next tile's w.

    BLOCK_T = 1: one row of x, fp32 vector sums, one step of weights ahead in registers. BLOCK_T >= 8: matrix
    products with the weight as the left operand, so that a row's bits do not depend on the other rows.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    masked: tl.constexpr = K % BLOCK_K != 0
    cols = tl.arange(0, BLOCK_K)
    if BLOCK_T == 1:
        sums = tl.zeros([BLOCK_N, BLOCK_K // 8], dtype=tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            here = start + cols
            if start + BLOCK_K < K:
                ahead = _weights(weight_ptr, weight_stride, rows, here + BLOCK_K, K, masked)
            else:
                ahead = _weights(weight_ptr, weight_stride, next_rows, cols, tl.where(has_next, K, 0), True)
            if K > BLOCK_K:
                x = tl.load(x_ptr + here, mask=here < K, other=0.0)
                if norm_ptr is not None:
                    x = _normed(x, rstd, tl.load(norm_ptr + here, mask=here < K, other=0.0), dtype)
                x = x.to(tl.float32)
            products = tl.reshape(w.to(tl.float32) * x[None, :], [BLOCK_N, BLOCK_K // 8, 8])
            sums += tl.sum(products, axis=2)
            w = ahead
        acc = tl.sum(sums, axis=1)[:, None]
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
        first: tl.constexpr = BLOCK_K if PREFETCH > 1 else 0
        if PREFETCH > 1:  # the program's only tile: w has no next
            columns = _columns(x_ptr, x_stride, tokens, rstd, norm_ptr, cols, K, BLOCK_T, masked)
            acc = tl.dot(w, columns, acc, input_precision="ieee")
        for start in tl.range(first, K, BLOCK_K, num_stages=STAGES):
            here = start + cols
            tile = _weights(weight_ptr, weight_stride, rows, here, K, masked)
            columns = _columns(x_ptr, x_stride, tokens, rstd, norm_ptr, here, K, BLOCK_T, masked)
            acc = tl.dot(tile, columns, acc, input_precision="ieee")
    return acc, w


@triton.jit
def split_pairs(acc: tl.tensor, PAIRS: tl.constexpr, BLOCK_T: tl.constexpr) -> tl.tensor:
    """The first and the second PAIRS rows of [2 PAIRS, BLOCK_T]."""
    return tl.split(tl.permute(tl.reshape(acc, [2, PAIRS, BLOCK_T]), [1, 2, 0]))


def small_tiles(
    num_tokens: int, out_features: int, in_features: int, itemsize: int, device: torch.device
) -> dict[str, int]:
    """Tile choices of a small product, measured on an H200 for the shapes of a 7B model in 16 bits."""
    whole = max(next_power_of_two(in_features), 16)
    tiles = {"BLOCK_T": 1, "PREFETCH": 1, "SPLITS": 1, "ROTATE": 1, "OVERLAP": 2 if overlaps(device) else 1, "num_stages": 1}
    if num_tokens > 1:
        return matrix_tiles(num_tokens, out_features, in_features, itemsize, device)
    elif whole > 4096:
        tiles |= {"BLOCK_N": 8, "BLOCK_K": 2048, "num_warps": 8, "PROGRAMS": 2}
    elif out_features >= 65536:
        tiles |= {"BLOCK_N": 4, "BLOCK_K": whole, "num_warps": 8, "PROGRAMS": 512}
    else:
        rows = min(max(8192 // whole, 2), 16)
        warps = 8 if out_features < 8192 else 4
        tiles |= {"BLOCK_N": rows, "BLOCK_K": whole, "num_warps": warps, "PROGRAMS": 4}
    return {**tiles, "BLOCK_K": min(tiles["BLOCK_K"], whole)}


def expect_rows(choice: Mapping[str, int], num_tokens: int) -> None:
    """Raise unless a tile holds all rows."""
    if choice["BLOCK_T"] < num_tokens:
        raise KernelArgumentError(
            "BLOCK_T is smaller than the number of rows",
            seen=choice["BLOCK_T"],
            allowed=f"{num_tokens} or more",
        )


def num_programs(choice: Mapping[str, int], num_tiles: int, device: torch.device) -> int:
    """Programs to launch: one a tile; of vector sums at most PROGRAMS a multiprocessor, which walk the
    tiles.
    """
    if choice["BLOCK_T"] > 1:
        return num_tiles
    processors = 2
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(num_tiles, processors * choice["PROGRAMS"])


def product_shape(choice: Mapping[str, int], in_features: int) -> dict[str, int]:
    """The constants of a small product's kernel for an op's tiles."""
    names = ("BLOCK_T", "BLOCK_N", "BLOCK_K", "PREFETCH", "OVERLAP")
    whole = next_power_of_two(in_features)
    block_x = max(min(whole, max(4096 // choice["BLOCK_T"], 16)), whole // 16)
    constants = {"K": in_features, "BLOCK_X": block_x, "STAGES": choice["num_stages"]}
    return constants | {name: choice[name] for name in names}
