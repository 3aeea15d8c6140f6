"""Log-probabilities of chosen tokens and of each row's likeliest, on the GPU.

Four launches: every tile's best token; the K-th of these; the sum of the row's weights, integers as in the
runtime's ``log_normaliser``, beside a list of what is not less likely than that; the K likeliest of the list.
If the list does not hold them (thousands of tokens that are as likely as the best), the row itself is
searched: the same tokens, in milliseconds. The launches depend on batch and vocabulary alone,
so a CUDA graph can hold them. The runtime has the reference.

    logprobs(logits, token_ids, out)
    token_ids, values = greedy_logprobs(logits, out)
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
from ingot.kernels.launch_overlap import launch_options, overlaps, start_next, wait_for_previous
from ingot.kernels.sampling.score_rows import (
    INT32_MAX,
    LEAST,
    WEIGHT_ONE,
    key_of,
    of_tiles,
    tile_tops_kernel,
    value_of,
)
from ingot.kernels.sampling.token_draw import MAX_VOCAB

INTEGERS = tl.constexpr(2.0**52)  # a float64 from 0 to 2**51 plus this is an integer: rounded to even
INT64_MAX = tl.constexpr(2**63 - 1)
COMPARED_ONCE = tl.constexpr(16)  # tiles that are compared with all others at a time


def logprob_tiles(vocab: int, device: torch.device) -> dict[str, int]:
    """Tile choices, measured on an H200: of TILE logits the best is found, about 160 tiles per row at most,
    so that few tokens are not below the K-th of them; SUM_TILE logits are summed at once by SUM_PROGRAMS over
    all rows. LIST tokens may be listed, SHORT in most rows.
    """
    tile = min(max(next_power_of_two(triton.cdiv(vocab, 160)), 256), 8192)
    return {
        "TILE": tile, "SUM_TILE": max(tile, 2048), "PROGRAMS": 16384, "SUM_PROGRAMS": 8192, "LIST": 4096,
        "SHORT": 128, "num_warps": 4, "TOPS_WARPS": 2, "BOUND_WARPS": 4, "MERGE_WARPS": 1,
        "OVERLAP": 2 if overlaps(device) else 1,
    }  # fmt: skip


@triton.jit
def _found_of(values: tl.tensor, ids: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Key and id in one int64: the lowest id is the largest among equals."""
    found = (key_of(values).to(tl.int64) << 32) | (ids ^ INT32_MAX).to(tl.int64)
    return tl.where(inside, found, LEAST)


@triton.jit
def likeliest_bound_kernel(
    best_ptr: tl.tensor,
    bound_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    TOP: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One program per row: the best token, and the TOP-th of the tiles' best, LEAST if there are fewer: the
    TOP likeliest are not below it. Clears the list's counter.
    """
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    bests = of_tiles(best_ptr, row, LEAST, TILES, BLOCK_TILES)
    bound = tl.full([], LEAST, dtype=tl.int64)
    if (TOP > 1) & (TOP <= TILES):
        above = tl.zeros([BLOCK_TILES, COMPARED_ONCE], dtype=tl.int32)
        for start in range(0, TILES, COMPARED_ONCE):
            some = start + tl.arange(0, COMPARED_ONCE)
            other = tl.load(best_ptr + row * TILES + some, mask=some < TILES, other=LEAST)
            above += (other[None, :] > bests[:, None]).to(tl.int32)
        bound = tl.min(tl.where(tl.sum(above, axis=1) < TOP, bests, INT64_MAX), axis=0)
    tl.store(bound_ptr + 2 * row, tl.max(bests, axis=0))
    tl.store(bound_ptr + 2 * row + 1, bound)
    tl.store(listed_ptr + row, 0)


@triton.jit
def list_likeliest_kernel(
    logits_ptr: tl.tensor,
    best_ptr: tl.tensor,
    bound_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    list_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    row_stride: tl.tensor,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    SUMS: tl.constexpr,
    SUM_TILE: tl.constexpr,
    TOP: tl.constexpr,
    LIST: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Sums of SUM_TILE weights, in 2**-40 of the weight of the row's likeliest token; if more than one is
    wanted, a list of the tokens that may be among the TOP likeliest.
    """
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    highest = value_of((tl.load(bound_ptr + 2 * row) >> 32).to(tl.int32)).to(tl.float64)
    bound = tl.load(bound_ptr + 2 * row + 1)
    for tile in range(tl.program_id(0), SUMS, tl.num_programs(0)):
        ids = tile * SUM_TILE + tl.arange(0, SUM_TILE)
        inside = ids < VOCAB
        values = tl.load(logits_ptr + row * row_stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
        weights = tl.exp(values.to(tl.float64) - highest) * WEIGHT_ONE
        weights = tl.where(weights >= 0, (weights + INTEGERS) - INTEGERS, 0.0)  # NaN: the sum is not used
        tl.store(sum_ptr + row * SUMS + tile, tl.sum(weights.to(tl.int64), axis=0))
        if TOP > 1:
            parts = tile * (SUM_TILE // TILE) + tl.arange(0, SUM_TILE // TILE)
            bests = tl.load(best_ptr + row * TILES + parts, mask=parts < TILES, other=LEAST)
            if tl.max(bests, axis=0) >= bound:
                found = _found_of(values, ids, inside)
                wanted = inside & (found >= bound)
                listed = wanted.to(tl.int32)
                place = tl.atomic_add(listed_ptr + row, tl.sum(listed, axis=0), sem="relaxed")
                place += tl.cumsum(listed, axis=0) - 1
                tl.store(list_ptr + row * LIST + place, found, mask=wanted & (place < LIST))


@triton.jit
def _leave(
    out_ptr: tl.tensor, place: tl.tensor, best: tl.tensor, normaliser: tl.tensor, TOP: tl.constexpr
) -> None:
    """The log-probability of one of the likeliest, and its id."""
    value = value_of((best >> 32).to(tl.int32)).to(tl.float64)
    token = tl.where(best == LEAST, -1, (best & INT32_MAX) ^ INT32_MAX)
    tl.store(out_ptr + 1 + place, (value - normaliser).to(tl.float32).to(tl.float64))
    tl.store(out_ptr + 1 + TOP + place, token.to(tl.float64))


@triton.jit
def _leave_short(
    list_ptr: tl.tensor,
    listed: tl.tensor,
    out_ptr: tl.tensor,
    normaliser: tl.tensor,
    SHORT: tl.constexpr,
    TOP: tl.constexpr,
) -> None:
    """The TOP likeliest of at most SHORT listed tokens."""
    places = tl.arange(0, SHORT)
    found = tl.load(list_ptr + places, mask=places < listed, other=LEAST)
    for place in range(TOP):
        best = tl.max(found, axis=0)
        _leave(out_ptr, place, best, normaliser, TOP)
        found = tl.where(found == best, LEAST, found)


@triton.jit
def _leave_long(
    list_ptr: tl.tensor,
    listed: tl.tensor,
    row_ptr: tl.tensor,
    out_ptr: tl.tensor,
    normaliser: tl.tensor,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    TOP: tl.constexpr,
    LIST: tl.constexpr,
) -> None:
    """The TOP likeliest of the listed tokens, or of the row itself if the list does not hold them."""
    last = tl.full([], INT64_MAX, dtype=tl.int64)
    whole = listed > LIST
    for place in range(TOP):
        best = tl.full([], LEAST, dtype=tl.int64)
        for start in range(0, tl.where(whole, VOCAB, listed), TILE):
            ids = start + tl.arange(0, TILE)
            if whole:
                inside = ids < VOCAB
                values = tl.load(row_ptr + ids, mask=inside, other=float("-inf")).to(tl.float32)
                found = _found_of(values, ids, inside)
            else:
                found = tl.load(list_ptr + ids, mask=ids < listed, other=LEAST)
            best = tl.maximum(best, tl.max(tl.where(found < last, found, LEAST), axis=0))
        _leave(out_ptr, place, best, normaliser, TOP)
        last = best


@triton.jit
def merge_likeliest_kernel(
    logits_ptr: tl.tensor,
    token_ptr: tl.tensor,
    bound_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    list_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    best_token_ptr: tl.tensor,
    best_value_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: tl.tensor,
    out_stride: tl.tensor,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_SUMS: tl.constexpr,
    TOP: tl.constexpr,
    LIST: tl.constexpr,
    SHORT: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One program per row: the log-probability of the given token, or of the best, which it leaves, too; the
    TOP largest ones; and their tokens.
    """
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    best = tl.load(bound_ptr + 2 * row)
    likeliest = value_of((best >> 32).to(tl.int32))
    highest = likeliest.to(tl.float64)
    total = tl.sum(of_tiles(sum_ptr, row, 0, SUMS, BLOCK_SUMS), axis=0).to(tl.float64)
    normaliser = highest
    if tl.abs(highest) < float("inf"):
        normaliser = highest + tl.log(total / WEIGHT_ONE)
    row_ptr, own_ptr = logits_ptr + row * row_stride, out_ptr + row * out_stride
    if token_ptr is None:
        tl.store(best_token_ptr + row, (best & INT32_MAX) ^ INT32_MAX)
        tl.store(best_value_ptr + row, likeliest)
        chosen = likeliest
    else:
        chosen = tl.load(row_ptr + tl.load(token_ptr + row)).to(tl.float32)
    tl.store(own_ptr, (chosen.to(tl.float64) - normaliser).to(tl.float32).to(tl.float64))
    if TOP == 1:
        _leave(own_ptr, 0, best, normaliser, TOP)
    else:
        listed = tl.load(listed_ptr + row)
        list_ptr += row * LIST
        if listed <= SHORT:
            _leave_short(list_ptr, listed, own_ptr, normaliser, SHORT, TOP)
        else:
            _leave_long(list_ptr, listed, row_ptr, own_ptr, normaliser, VOCAB, TILE, TOP, LIST)


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
    expect("token_ids", token_ids, (logits.shape[0],), like=logits, dtype=torch.int64)
    _launch(logits, token_ids, out, tiles)


def greedy_logprobs(
    logits: torch.Tensor, out: torch.Tensor, tiles: Mapping[str, int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``greedy`` and the ``logprobs`` of its tokens, in as many launches as the latter's.

    Returns:
        token_ids [B] int64, the best of each row, the lowest id among equals; values [B] float32, their
        logits: NaN if the row holds one.

    Raises:
        DeviceError: not on a GPU.
    """
    expect_rows("logits", logits)
    return _launch(logits, None, out, tiles)


def _launch(
    logits: torch.Tensor, token_ids: torch.Tensor | None, out: torch.Tensor, tiles: Mapping[str, int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The launches of both; returns the best tokens and their logits, filled if no tokens are given."""
    expect_range("the vocabulary size", logits.shape[1], 1, MAX_VOCAB)
    expect("out", out, (None, None), like=logits, dtype=torch.float64)
    expect_range("out's rows", out.shape[0], logits.shape[0])
    if out.shape[1] < 3 or out.shape[1] % 2 == 0:
        raise KernelArgumentError("out has the wrong width", seen=out.shape[1], allowed="1 + 2 K, K >= 1")
    if not runs_on_gpu(logits):
        what = "this kernel runs on a GPU only; elsewhere the runtime's reference does"
        raise DeviceError(what, seen=logits.device, allowed="cuda")
    (rows, vocab), device = logits.shape, logits.device
    best_ids = torch.empty(rows, dtype=torch.int64, device=device)
    best_values = torch.empty(rows, dtype=torch.float32, device=device)
    if not rows:
        return best_ids, best_values
    choice, top = merge_tiles(logprob_tiles(vocab, device), tiles), out.shape[1] // 2
    count, sum_tile = triton.cdiv(vocab, choice["TILE"]), max(choice["SUM_TILE"], choice["TILE"])
    num_sums = triton.cdiv(vocab, sum_tile)
    bests = torch.empty((rows, count), dtype=torch.int64, device=device)
    bounds = torch.empty((rows, 2), dtype=torch.int64, device=device)
    sums = torch.empty((rows, num_sums), dtype=torch.int64, device=device)
    found = torch.empty((rows, choice["LIST"] if top > 1 else 1), dtype=torch.int64, device=device)
    listed = torch.empty(rows, dtype=torch.int32, device=device)
    stride, options = logits.stride(0), launch_options(choice, device)
    row = {"VOCAB": vocab, "TILE": choice["TILE"], "OVERLAP": choice["OVERLAP"]}
    tiles_of = {"TILES": count, "OVERLAP": choice["OVERLAP"]}
    wanted = {"SUMS": num_sums, "TOP": top, "LIST": choice["LIST"]}

    def warps(name: str) -> dict[str, int]:
        return {**options, "num_warps": choice[name]}

    tile_tops_kernel[(min(count, max(choice["PROGRAMS"] // rows, 1)), rows)](
        logits, bests, None, None, None, None, None, stride, TILES=count, BINS=1, **row, **warps("TOPS_WARPS")
    )
    likeliest_bound_kernel[(rows,)](
        bests, bounds, listed, BLOCK_TILES=next_power_of_two(count), TOP=top, **tiles_of,
        **warps("BOUND_WARPS"),
    )  # fmt: skip
    list_likeliest_kernel[(min(num_sums, max(choice["SUM_PROGRAMS"] // rows, 1)), rows)](
        logits, bests, bounds, sums, found, listed, stride, TILES=count, SUM_TILE=sum_tile, **row, **wanted,
        **options,
    )  # fmt: skip
    merge_likeliest_kernel[(rows,)](
        logits, token_ids, bounds, sums, found, listed, best_ids, best_values, out, stride, out.stride(0),
        BLOCK_SUMS=next_power_of_two(num_sums), SHORT=choice["SHORT"], **row, **wanted,
        **warps("MERGE_WARPS"),
    )  # fmt: skip
    return best_ids, best_values
