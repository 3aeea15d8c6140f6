"""Log-probabilities of chosen tokens and of each row's likeliest, on the GPU.

Three launches: every tile's likeliest tokens; the sum of the row's weights, integers as in the runtime's
``log_normaliser``; the merge. Their number and shape depend on batch and vocabulary alone, so a CUDA graph
can hold them. The runtime has the reference.

    logprobs(logits, token_ids, out)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ingot.errors import DeviceError
from ingot.kernels.kernel_checks import (
    KernelArgumentError,
    expect,
    expect_range,
    expect_rows,
    merge_tiles,
    next_power_of_two,
    runs_on_gpu,
)
from ingot.kernels.sampling.score_rows import INT32_MAX, LEAST, WEIGHT_ONE, key_of, of_tiles, value_of
from ingot.kernels.sampling.token_draw import MAX_VOCAB

INTEGERS = tl.constexpr(2.0**52)  # a float64 from 0 to 2**51 plus this is an integer: rounded to even


def logprob_tiles(vocab: int) -> dict[str, int]:
    """Tile choices, not measured: TILE logits per reduction, about 100 tiles per row at most."""
    tile = min(max(next_power_of_two(triton.cdiv(vocab, 96)), 256), 8192)
    return {"TILE": tile, "PROGRAMS": 8192, "num_warps": max(tile // 512, 4)}


@triton.jit
def tile_likeliest_kernel(
    logits_ptr: tl.tensor,
    found_ptr: tl.tensor,
    row_stride: tl.tensor,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    TOP: tl.constexpr,
) -> None:
    """Each tile's TOP likeliest tokens, key and id in one int64: the lowest id first among equals."""
    row = tl.program_id(1).to(tl.int64)
    for tile in range(tl.program_id(0), TILES, tl.num_programs(0)):
        ids = tile * TILE + tl.arange(0, TILE)
        inside = ids < VOCAB
        values = tl.load(logits_ptr + row * row_stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
        found = (key_of(values).to(tl.int64) << 32) | (ids ^ INT32_MAX).to(tl.int64)
        found = tl.where(inside, found, LEAST)
        for place in range(TOP):
            best = tl.max(found, axis=0)
            tl.store(found_ptr + (row * TILES + tile) * TOP + place, best)
            found = tl.where(found == best, LEAST, found)


@triton.jit
def tile_sums_kernel(
    logits_ptr: tl.tensor,
    found_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    row_stride: tl.tensor,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    TILE: tl.constexpr,
    TOP: tl.constexpr,
) -> None:
    """Sum of each tile's weights, in 2**-40 of the weight of the row's likeliest token."""
    row = tl.program_id(1).to(tl.int64)
    tiles = tl.arange(0, BLOCK_TILES)
    firsts = tl.load(found_ptr + (row * TILES + tiles) * TOP, mask=tiles < TILES, other=LEAST)
    highest = value_of((tl.max(firsts, axis=0) >> 32).to(tl.int32)).to(tl.float64)
    for tile in range(tl.program_id(0), TILES, tl.num_programs(0)):
        ids = tile * TILE + tl.arange(0, TILE)
        values = tl.load(logits_ptr + row * row_stride + ids, mask=ids < VOCAB, other=float("-inf"))
        weights = tl.exp(values.to(tl.float32).to(tl.float64) - highest) * WEIGHT_ONE
        weights = tl.where(weights >= 0, (weights + INTEGERS) - INTEGERS, 0.0)  # NaN: the sum is not used
        tl.store(sum_ptr + row * TILES + tile, tl.sum(weights.to(tl.int64), axis=0))


@triton.jit
def merge_likeliest_kernel(
    logits_ptr: tl.tensor,
    token_ptr: tl.tensor,
    found_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: tl.tensor,
    out_stride: tl.tensor,
    TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_FOUND: tl.constexpr,
    TOP: tl.constexpr,
) -> None:
    """One program per row: the chosen token's log-probability, the TOP largest ones, and their tokens."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK_FOUND)
    found = tl.load(found_ptr + row * TILES * TOP + places, mask=places < TILES * TOP, other=LEAST)
    highest = value_of((tl.max(found, axis=0) >> 32).to(tl.int32)).to(tl.float64)
    total = tl.sum(of_tiles(sum_ptr, row, 0, TILES, BLOCK_TILES), axis=0).to(tl.float64)
    normaliser = highest
    if tl.abs(highest) < float("inf"):
        normaliser = highest + tl.log(total / WEIGHT_ONE)
    chosen = tl.load(logits_ptr + row * row_stride + tl.load(token_ptr + row)).to(tl.float32)
    row_ptr = out_ptr + row * out_stride
    tl.store(row_ptr, (chosen.to(tl.float64) - normaliser).to(tl.float32).to(tl.float64))
    for place in range(TOP):
        best = tl.max(found, axis=0)
        value = value_of((best >> 32).to(tl.int32)).to(tl.float64)
        token = tl.where(best == LEAST, -1, (best & INT32_MAX) ^ INT32_MAX)
        tl.store(row_ptr + 1 + place, (value - normaliser).to(tl.float32).to(tl.float64))
        tl.store(row_ptr + 1 + TOP + place, token.to(tl.float64))
        found = tl.where(found == best, LEAST, found)


def logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, out: torch.Tensor, tiles: Mapping[str, int] | None = None
) -> None:
    """Write log-probabilities of B rows to ``out[:B]``: of the chosen token, then the K largest of the row,
    largest first and the lowest id first among equals, then the ids of these.

    A row's results have the same bits in any batch. The reference is ``leave_logprobs_reference``.

    Args:
        logits: [B, V] fp16, bf16 or fp32 on a GPU, V up to 2**22 - 1; rows may lie apart.
        token_ids: [B] int64.
        out: [at least B, 1 + 2 K] float64, K >= 1; log-probabilities are rounded to float32, and if V < K the
            last ids are -1.
        tiles: choices over ``logprob_tiles``.

    Raises:
        DeviceError: not on a GPU.
    """
    expect_rows("logits", logits)
    expect_range("the vocabulary size", logits.shape[1], 1, MAX_VOCAB)
    expect("token_ids", token_ids, (logits.shape[0],), like=logits, dtype=torch.int64)
    expect("out", out, (None, None), like=logits, dtype=torch.float64)
    expect_range("out's rows", out.shape[0], logits.shape[0])
    if out.shape[1] < 3 or out.shape[1] % 2 == 0:
        raise KernelArgumentError("out has the wrong width", seen=out.shape[1], allowed="1 + 2 K, K >= 1")
    if not runs_on_gpu(logits):
        what = "this kernel runs on a GPU only; elsewhere the runtime's reference does"
        raise DeviceError(what, seen=logits.device, allowed="cuda")
    (rows, vocab), device = logits.shape, logits.device
    if not rows:
        return
    choice, top = merge_tiles(logprob_tiles(vocab), tiles), out.shape[1] // 2
    count = triton.cdiv(vocab, choice["TILE"])
    found = torch.empty((rows, count, top), dtype=torch.int64, device=device)
    sums = torch.empty((rows, count), dtype=torch.int64, device=device)
    grid = (min(count, max(choice["PROGRAMS"] // rows, 1)), rows)
    shape = {"TILES": count, "TOP": top, "num_warps": choice["num_warps"]}
    wide = {"VOCAB": vocab, "TILE": choice["TILE"], **shape}
    blocks = {"BLOCK_TILES": next_power_of_two(count)}
    tile_likeliest_kernel[grid](logits, found, logits.stride(0), **wide)
    tile_sums_kernel[grid](logits, found, sums, logits.stride(0), **wide, **blocks)
    merge_likeliest_kernel[(rows,)](
        logits, token_ids, found, sums, out, logits.stride(0), out.stride(0),
        BLOCK_FOUND=next_power_of_two(count * top), **shape, **blocks,
    )  # fmt: skip
