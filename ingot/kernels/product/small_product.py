"""The product of one row with a whole weight, read once at the speed of memory, and the tiles of all small
products.

Owns the tile of x · Wᵀ that the ``small_*`` kernels share for one row: how the weight is streamed, how
RMSNorm folds into the row, what is fetched while the kernel before still runs; and the default tiles of one
row and of more (``matrix_product.py``). Knows no epilogue.

    w, x, rstd = prepare_rows(x_ptr, ...)
    for tile in range(...):
        acc, w = product_tile(w, ...)  # [BLOCK_N, 1] fp32
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ingot.kernels.checks import KernelArgumentError, multiprocessors, next_power_of_two
from ingot.kernels.overlap import overlaps, wait_for_previous
from ingot.kernels.tiles.product_tiles import matrix_candidates, matrix_tiles
from ingot.kernels.weight.stored_weight import StoredWeight

MAX_ROWS = 64


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
    weight_ptr: tl.tensor,
    weight_stride: tl.tensor,
    rows: tl.tensor,
    norm_ptr: tl.tensor,
    norm_eps: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_X: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> tl.tensor:
    """What a program holds from tile to tile: (first weights, x, 1 / rms); waits for the previous kernel.

    The first step of weights ``rows`` is on its way before the wait. A row that fits BLOCK_K stays in
    registers, normalised. What a variant does not hold is an empty scalar.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    cols = tl.arange(0, BLOCK_K)
    x = 0.0
    rstd = 0.0
    w = _weights(weight_ptr, weight_stride, rows, cols, K, K % BLOCK_K != 0)
    if K <= BLOCK_K and norm_ptr is not None:
        g = tl.load(norm_ptr + cols, mask=cols < K, other=0.0)
    wait_for_previous(OVERLAP)
    if K <= BLOCK_K:
        x = tl.load(x_ptr + cols, mask=cols < K, other=0.0)
        if norm_ptr is not None:
            wide = x.to(tl.float32)
            x = _normed(x, tl.rsqrt(tl.sum(wide * wide, axis=0) / K + norm_eps), g, dtype)
        x = x.to(tl.float32)
    elif norm_ptr is not None:
        squares = tl.zeros([BLOCK_X], dtype=tl.float32)
        for start in tl.static_range(0, K, BLOCK_X):
            piece = start + tl.arange(0, BLOCK_X)
            part = tl.load(x_ptr + piece, mask=piece < K, other=0.0).to(tl.float32)
            squares += part * part
        rstd = tl.rsqrt(tl.sum(squares, axis=0) / K + norm_eps)
    return w, x, rstd


@triton.jit
def product_tile(
    w: tl.tensor,
    x: tl.tensor,
    rstd: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    weight_stride: tl.tensor,
    rows: tl.tensor,
    next_rows: tl.tensor,
    has_next: tl.tensor,
    norm_ptr: tl.tensor,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Rows ``rows`` of the weight times norm(x), [BLOCK_N, 1] fp32; and the next tile's w.

    Vector sums in fp32, one step of weights ahead in registers.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    masked: tl.constexpr = K % BLOCK_K != 0
    cols = tl.arange(0, BLOCK_K)
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
    return tl.sum(sums, axis=1)[:, None], w


def small_tiles(
    num_tokens: int, weight: StoredWeight, itemsize: int, device: torch.device, blocks: bool = True
) -> dict[str, int]:
    """Tile choices of a small product, measured on an H200 for the shapes of a 7B model; ``itemsize``: bytes
    of an activation, ``blocks``: whether the op takes its rows in blocks of 16.
    """
    if num_tokens > 1 or weight.bits < 16:
        return matrix_tiles(num_tokens, weight, itemsize, device, blocks)
    out_features, whole = weight.out_features, max(next_power_of_two(weight.in_features), 16)
    tiles = {
        "BLOCK_T": 1,
        "FRAGMENTS": 0,
        "PREFETCH": 1,
        "OVERLAP": 2 if overlaps(device) else 1,
        "num_stages": 1,
    }
    if whole > 4096:
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
    """Programs of one row's vector sums: at most PROGRAMS a multiprocessor, which walk the tiles."""
    return min(num_tiles, multiprocessors(device) * choice["PROGRAMS"])


def product_shape(choice: Mapping[str, int], weight: StoredWeight) -> dict[str, int]:
    """The constants of a one-row product's kernel for an op's tiles."""
    whole = next_power_of_two(weight.in_features)
    block_x = max(min(whole, 4096), whole // 16)
    return {"K": weight.in_features, "BLOCK_X": block_x} | {
        n: choice[n] for n in ("BLOCK_N", "BLOCK_K", "OVERLAP")
    }


def candidate_tiles(
    num_rows: int, weight: StoredWeight, itemsize: int, device: torch.device
) -> list[dict[str, int]]:
    """What tuning of ``small_linear``, ``small_gate_up`` and ``small_qkv`` tries: the default first."""
    default = small_tiles(num_rows, weight, itemsize, device)
    if default["BLOCK_T"] > 1:
        return matrix_candidates(default)
    changes = [{"PROGRAMS": 2 * default["PROGRAMS"]}, {"num_warps": 4 if default["num_warps"] == 8 else 8}]
    changes.append({"BLOCK_N": 2 * default["BLOCK_N"]})
    if overlaps(device):
        changes.append({"OVERLAP": 4})
    return [default, *(default | change for change in changes)]
