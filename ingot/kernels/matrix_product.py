"""The matrix product of a decode step for 2 to 64 rows: x · Wᵀ with the weight as the left operand.

Owns the loop that streams a tile of the weight through shared memory, several steps ahead and already while
the kernel before still runs, and the default tiles. Knows no norm and no epilogue: the rows come normalised.

    acc = matrix_tile(x_ptr, ...)  # [BLOCK_N, BLOCK_T] fp32
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ingot.kernels.checks import next_power_of_two
from ingot.kernels.overlap import overlaps, wait_for_previous


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
    With PREFETCH 0 both are pipelined, after the wait.
    """
    MASKED: tl.constexpr = K % BLOCK_K != 0
    token = tl.arange(0, BLOCK_T)
    cols = tl.arange(0, BLOCK_K)
    real = (token < tokens)[:, None]
    columns = x_ptr + token[:, None] * x_stride + cols[None, :]
    places = weight_ptr + (rows.to(tl.int64) * weight_stride)[:, None] + cols[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    x = tl.zeros([BLOCK_T, BLOCK_K], dtype=x_ptr.dtype.element_ty)
    if PREFETCH == 0:
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
        if PREFETCH > 1:
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


def matrix_tiles(num_tokens: int, out_features: int, itemsize: int, device: torch.device) -> dict[str, int]:
    """Tile choices of a matrix product, measured on an H200 for the shapes of a 7B model in 16 bits.

    Wide steps read long runs of each weight row: 64 columns a step reach two thirds of the rate of 256.
    """
    columns = max(next_power_of_two(num_tokens), 8)
    if itemsize == 4:
        shape = (16, 64, 2, 3)
    elif columns <= 16:
        shape = (64, 256, 4, 3)
    elif out_features < 16384:
        shape = (64, 128, 4, 4)
    else:
        shape = (128, 128, 8, 3)
    return _tiles(shape, columns, device)


def split_tiles(num_tokens: int, in_features: int, itemsize: int, device: torch.device) -> dict[str, int]:
    """Tile choices of a product of partial sums, with ``SPLITS``: a narrow weight has few tiles."""
    columns = max(next_power_of_two(num_tokens), 8)
    if itemsize == 4:
        return _tiles((16, 64, 2, 3), columns, device) | {"SPLITS": 1}
    if columns > 16:
        return _tiles((128, 128, 8, 3), columns, device) | {"SPLITS": 8}
    if in_features > 8192:
        return _tiles((128, 128, 4, 3), 16, device) | {"SPLITS": 8, "PREFETCH": 2}
    return _tiles((64, 256, 4, 3), columns, device) | {"SPLITS": 4}


def matrix_candidates(default: Mapping[str, int]) -> list[dict[str, int]]:
    """What tuning tries for a matrix product or its parts: the default first."""
    shapes = [(64, 256, 4, 3), (128, 128, 4, 3), (64, 128, 4, 4), (128, 128, 8, 3), (128, 64, 8, 4)]
    names = ("BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
    found = [dict(default), {**default, "PREFETCH": 3 - default["PREFETCH"]}]
    found += [{**default, **dict(zip(names, shape, strict=True))} for shape in shapes]
    return [tiles for place, tiles in enumerate(found) if tiles not in found[:place]]


def _tiles(shape: tuple[int, int, int, int], columns: int, device: torch.device) -> dict[str, int]:
    names = ("BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
    rest = {"BLOCK_T": columns, "PREFETCH": 1, "PROGRAMS": 0, "OVERLAP": 2 if overlaps(device) else 1}
    return dict(zip(names, shape, strict=True)) | rest


def matrix_shape(choice: Mapping[str, int], in_features: int) -> dict[str, int]:
    """The constants and the depth of a matrix product's kernel for an op's tiles."""
    names = ("BLOCK_T", "BLOCK_N", "BLOCK_K", "PREFETCH", "OVERLAP", "num_stages")
    return {"K": in_features} | {name: choice[name] for name in names}
