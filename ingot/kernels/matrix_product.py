"""The matrix product of a decode step for 2 to 64 rows: x · Wᵀ with the weight as the left operand.

Owns the loop that streams a tile of the weight through shared memory, several steps ahead and already while
the kernel before still runs, and the default tiles. Knows no norm and no epilogue: the rows come normalised.

    acc = matrix_tile(x_ptr, ...)  # [BLOCK_N, BLOCK_T] fp32
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl

from ingot.kernels.checks import next_power_of_two
from ingot.kernels.overlap import LINE_BYTES, overlaps, prefetch_lines, wait_for_previous


@triton.jit
def _weights(
    places: tl.tensor, columns: tl.tensor, live: tl.tensor, K: tl.constexpr, MASKED: tl.constexpr
) -> tl.tensor:
    """A tile of the weight, streamed past the caches; zeros from column K on and in dead rows."""
    if MASKED:
        inside = (columns < K)[None, :]
        if live is not None:
            inside = inside & live[:, None]
        return tl.load(places, mask=inside, other=0.0, eviction_policy="evict_first")
    if live is not None:
        return tl.load(places, mask=live[:, None], other=0.0, eviction_policy="evict_first")
    return tl.load(places, eviction_policy="evict_first")


@triton.jit
def matrix_tile(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    tokens: tl.tensor,
    weight_ptr: tl.tensor,
    weight_stride: tl.tensor,
    rows: tl.tensor,
    live: tl.tensor,
    first: tl.tensor,
    steps: tl.tensor,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> tl.tensor:
    """Rows ``rows`` of the weight times each row of x, over ``steps`` steps of BLOCK_K columns from step
    ``first``: [BLOCK_N, BLOCK_T] fp32. Rows that are not ``live`` (None: all are) are not read.

    With PREFETCH 1 and 2 only the weight's loads are pipelined: the compiler starts them ahead of the loop,
    before the wait for the previous kernel. The rows of x come from L2, with 2 a step ahead in registers.
    With PREFETCH 0 both are pipelined, after the wait; with more than 2 so many columns of the rows are asked
    into L2 before it.
    """
    LINE: tl.constexpr = LINE_BYTES // (x_ptr.dtype.element_ty.primitive_bitwidth // 8)
    MASKED: tl.constexpr = K % BLOCK_K != 0
    token = tl.arange(0, BLOCK_T)
    cols = tl.arange(0, BLOCK_K)
    real = (token < tokens)[:, None]
    columns = x_ptr + token[:, None] * x_stride + cols[None, :]
    places = weight_ptr + (rows.to(tl.int64) * weight_stride)[:, None] + cols[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    x = tl.zeros([BLOCK_T, BLOCK_K], dtype=x_ptr.dtype.element_ty)
    if PREFETCH == 0 or PREFETCH > 2:
        if PREFETCH > 2 and OVERLAP > 1:
            ahead = first * BLOCK_K + tl.arange(0, PREFETCH // LINE) * LINE
            wanted = (ahead < K)[None, :] & (rows >= 0)[:, None]
            if live is not None:
                wanted = wanted & live[:, None]
            prefetch_lines(weight_ptr + (rows.to(tl.int64) * weight_stride)[:, None] + ahead[None, :], wanted)
        wait_for_previous(OVERLAP)
    for step in tl.range(0, steps):
        here = (first + step) * BLOCK_K
        there = here + BLOCK_K
        now, then = real, real & (step + 1 < steps)
        if MASKED:
            now, then = now & (here + cols < K)[None, :], then & (there + cols < K)[None, :]
        w = _weights(places + here, here + cols, live, K, MASKED)
        # Two branches, though they load the same: what a branch loads is not pipelined, and so not asked for
        # before the wait, and it keeps the layout that it is loaded in.
        if PREFETCH == 2:
            if step == 0:
                wait_for_previous(OVERLAP)
                x = tl.load(columns + here, mask=now, other=0.0)
                ahead = tl.load(columns + there, mask=then, other=0.0)
            else:
                x = tl.load(columns + here, mask=now & (step < 0), other=x)  # loads nothing, keeps the layout
                ahead = tl.load(columns + there, mask=then, other=0.0)
            acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
            x = ahead
        elif PREFETCH == 1:
            if step == 0:
                wait_for_previous(OVERLAP)
                x = tl.load(columns + here, mask=now, other=0.0)
            else:
                x = tl.load(columns + here, mask=now, other=0.0)
            acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        else:
            x = tl.load(columns + here, mask=now, other=0.0)
            acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    return acc


def even_share(outputs: int, block: int, choice: Mapping[str, int], device: torch.device) -> int:
    """Outputs of a program, at most ``block``, such that waves of PROGRAMS a multiprocessor share them
    evenly; with PROGRAMS 0 whole blocks.
    """
    if choice["PROGRAMS"] == 0:
        return block
    at_once = max(choice["PROGRAMS"] * multiprocessors(device) // choice.get("SPLITS", 1), 1)
    waves = triton.cdiv(outputs, block * at_once)
    return min(triton.cdiv(outputs, waves * at_once), block)


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 2 under the interpreter."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


# Measured in steps of a 7B model in 16 bits on an H200. By the columns of x's tile: for weights of up to so
# many outputs BLOCK_N, BLOCK_K, warps, stages, PROGRAMS, PREFETCH. Up to 8 rows the launches overlap enough
# that early weights are worth most; from 16 rows on x is worth pipelining, and equal shares.
WIDE = {
    8: [(16383, 32, 256, 2, 4, 0, 1), (65535, 64, 256, 4, 3, 0, 1), (0, 64, 256, 4, 3, 0, 1)],
    16: [(16383, 64, 128, 4, 4, 2, 256), (65535, 64, 128, 4, 3, 3, 128), (0, 128, 128, 4, 3, 2, 0)],
    32: [(16383, 64, 128, 4, 4, 2, 128), (65535, 64, 128, 4, 3, 3, 0), (0, 128, 128, 8, 4, 1, 128)],
    64: [(16383, 128, 64, 8, 5, 1, 0), (65535, 64, 64, 4, 4, 3, 0), (0, 128, 64, 4, 4, 2, 0)],
}
# The same of split sums, by inputs instead of outputs, with SPLITS.
SPLIT = {
    8: [(8192, 64, 256, 4, 3, 0, 1, 4), (0, 128, 128, 4, 3, 0, 2, 8)],
    16: [(8192, 64, 128, 4, 4, 2, 0, 4), (0, 64, 256, 4, 3, 2, 1, 4)],
    32: [(8192, 64, 128, 4, 3, 2, 128, 4), (0, 128, 128, 8, 4, 1, 128, 4)],
    64: [(0, 128, 64, 8, 5, 1, 128, 4)],
}
WHOLE = (0, 16, 64, 2, 3, 0, 1, 1)  # fp32


def matrix_tiles(num_tokens: int, out_features: int, itemsize: int, device: torch.device) -> dict[str, int]:
    """Tile choices of a matrix product."""
    columns = max(next_power_of_two(num_tokens), 8)
    choice = WHOLE[:-1] if itemsize == 4 else _up_to(out_features, WIDE[columns])
    return _tiles(choice, columns, itemsize, device)


def split_tiles(num_tokens: int, in_features: int, itemsize: int, device: torch.device) -> dict[str, int]:
    """Tile choices of a product of partial sums, with ``SPLITS``: a narrow weight has few tiles."""
    columns = max(next_power_of_two(num_tokens), 8)
    choice = WHOLE if itemsize == 4 else _up_to(in_features, SPLIT[columns])
    return _tiles(
        choice, max(columns, 16) if itemsize == 2 and in_features > 8192 else columns, itemsize, device
    )


def _up_to(size: int, choices: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The first choice for so large a size; 0 is for all others."""
    return next(choice for choice in choices if size <= choice[0] or choice[0] == 0)


def _tiles(choice: tuple[int, ...], columns: int, itemsize: int, device: torch.device) -> dict[str, int]:
    names = ("BLOCK_N", "BLOCK_K", "num_warps", "num_stages", "PROGRAMS", "PREFETCH", "SPLITS")
    tiles = {"BLOCK_T": columns, "OVERLAP": 2 if overlaps(device) else 1}
    tiles |= dict(zip(names, choice[1:], strict=False))
    stage = (tiles["BLOCK_N"] + columns) * tiles["BLOCK_K"] * itemsize
    return tiles | {"num_stages": max(min(tiles["num_stages"], shared_bytes(device) // stage), 2)}


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may use; an H200's where there is no GPU."""
    if device.type != "cuda":
        return 227 << 10
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def matrix_candidates(default: Mapping[str, int]) -> list[dict[str, int]]:
    """What tuning tries for a matrix product or its parts: the default first."""
    names = ("BLOCK_N", "BLOCK_K", "num_warps", "num_stages", "PROGRAMS", "PREFETCH")
    if default["BLOCK_T"] <= 8:
        shapes = [(64, 256, 4, 3, 0, 1), (32, 256, 2, 4, 0, 1), (64, 128, 4, 4, 2, 0), (64, 128, 4, 4, 3, 1)]
    elif default["BLOCK_T"] == 16:
        shapes = [(128, 128, 4, 3, 2, 0), (64, 128, 4, 4, 2, 0), (64, 256, 4, 3, 2, 1), (64, 128, 4, 4, 3, 0)]
    else:
        shapes = [(64, 64, 4, 4, 3, 0), (128, 64, 8, 4, 2, 0), (64, 128, 4, 3, 2, 0), (128, 64, 8, 5, 1, 0)]
    found = [dict(default), *({**default, **dict(zip(names, shape, strict=True))} for shape in shapes)]
    return [tiles for place, tiles in enumerate(found) if tiles not in found[:place]]


def matrix_shape(choice: Mapping[str, int], in_features: int) -> dict[str, int]:
    """The constants and the depth of a matrix product's kernel for an op's tiles."""
    names = ("BLOCK_T", "BLOCK_N", "BLOCK_K", "PREFETCH", "OVERLAP", "num_stages")
    return {"K": in_features} | {name: choice[name] for name in names}
