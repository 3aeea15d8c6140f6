"""Decode attention: one query a request over the paged KV cache, the keys split among programs.

Owns the formula o = softmax(scale q K^T) V over the last ``window`` keys, and how a request's keys are
split. The split of a request follows from its own length and the number of key-value heads, never from the
batch: its result is bitwise the same alone and in any batch. Knows no model and no block manager.

    out = paged_attention(q, keys, values, block_tables, seq_lens, 128**-0.5, max_seq_len=4096)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ingot.kernels.checks import (
    expect,
    expect_cache,
    expect_float,
    expect_group,
    expect_heads,
    expect_range,
    expect_result,
    merge_tiles,
    next_power_of_two,
    runs_on_gpu,
)
from ingot.kernels.overlap import launch_options, overlaps, start_next, wait_for_previous
from ingot.kernels.paged_merge import LEAST_SCORE, paged_attention_merge_kernel
from ingot.kernels.paged_tile import gather_tokens, prefetch_split, split_bounds, tile_rows

TARGET_PROGRAMS = 264  # two a multiprocessor of an H200, reached by a single long request
MOST_SPLITS = 64
TILE_BYTES = 16384  # of keys, and of values; three stages fit the shared memory of sm_80 to sm_90
LOG2_E = math.log2(math.e)


@triton.jit
def paged_attention_grouped_kernel(
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    scale_log2: tl.tensor,
    window: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One split of one key-value head: the queries that share it are the rows of two matrix products."""
    start_next(OVERLAP)
    if OVERLAP < 4:
        wait_for_previous(OVERLAP)
    split, kv_head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_splits, num_heads = tl.num_programs(0), tl.num_programs(1) * GROUP
    seq_len = tl.load(seq_lens_ptr + request)
    first, base, length = split_bounds(seq_len, window, MAX_SPLITS, MIN_TOKENS, BLOCK_N, HAS_WINDOW)
    start = base + split * length
    end = tl.minimum(start + length, seq_len)
    if OVERLAP >= 4:
        prefetch_split(key_ptr + kv_head * head_stride, value_ptr + kv_head * head_stride,
                       tables_ptr + request * table_stride, start, end, block_stride, token_stride,
                       HEAD_DIM, BLOCK_SIZE, BLOCK_N)  # fmt: skip
        wait_for_previous(OVERLAP)
    if (start >= end) & (num_splits > 1):
        return
    group = tl.arange(0, BLOCK_G)
    cols = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + group
    q_mask = (group < GROUP)[:, None] & (cols < HEAD_DIM)[None, :]
    q = tl.load(
        q_ptr + request * q_stride + (heads * HEAD_DIM)[:, None] + cols[None, :], mask=q_mask, other=0.0
    )
    top = tl.full([BLOCK_G], LEAST_SCORE, dtype=tl.float32)
    total = tl.zeros([BLOCK_G], dtype=tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
    key_ptr += kv_head * head_stride
    value_ptr += kv_head * head_stride
    for tile in range(start, end, BLOCK_N):
        tokens = tile + tl.arange(0, BLOCK_N)
        rows = tile_rows(
            tables_ptr + request * table_stride, tile, end, block_stride, token_stride, BLOCK_SIZE, BLOCK_N
        )
        mask = (tokens < end)[:, None]
        if HEAD_DIM < BLOCK_D:
            mask = mask & (cols < HEAD_DIM)[None, :]
        k = tl.load(key_ptr + rows[:, None] + cols[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        seen = tokens < end
        if HAS_WINDOW:
            seen = seen & (tokens >= first)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        p = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(p, axis=1)
        v = tl.load(value_ptr + rows[:, None] + cols[None, :], mask=mask, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = new_top
    divisor = tl.where(total == 0.0, 1.0, total)
    place = (request * num_heads + heads) * num_splits + split
    out = (acc / divisor[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (place * HEAD_DIM)[:, None] + cols[None, :], out, mask=q_mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + place, top + tl.log2(divisor), mask=group < GROUP)


@triton.jit
def paged_attention_single_kernel(
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    scale_log2: tl.tensor,
    window: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One split of one head with a query of its own, in fp32 vector sums.

    Each of the BLOCK_N rows of a tile runs its own online softmax; they meet once, after the loop, so that no
    warp waits for another while it streams keys and values.
    """
    start_next(OVERLAP)
    if OVERLAP < 4:
        wait_for_previous(OVERLAP)
    split, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_splits, num_heads = tl.num_programs(0), tl.num_programs(1)
    seq_len = tl.load(seq_lens_ptr + request)
    first, base, length = split_bounds(seq_len, window, MAX_SPLITS, MIN_TOKENS, BLOCK_N, HAS_WINDOW)
    start = base + split * length
    end = tl.minimum(start + length, seq_len)
    if OVERLAP >= 4:
        prefetch_split(key_ptr + head * head_stride, value_ptr + head * head_stride,
                       tables_ptr + request * table_stride, start, end, block_stride, token_stride,
                       HEAD_DIM, BLOCK_SIZE, BLOCK_N)  # fmt: skip
        wait_for_previous(OVERLAP)
    if (start >= end) & (num_splits > 1):
        return
    cols = tl.arange(0, BLOCK_D)
    in_head = cols < HEAD_DIM
    q = tl.load(q_ptr + request * q_stride + head * HEAD_DIM + cols, mask=in_head, other=0.0).to(tl.float32)
    q = q * scale_log2
    top = tl.full([BLOCK_N], LEAST_SCORE, dtype=tl.float32)
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    acc = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    key_ptr += head * head_stride
    value_ptr += head * head_stride
    for tile in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        tokens = tile + tl.arange(0, BLOCK_N)
        rows = tile_rows(
            tables_ptr + request * table_stride, tile, end, block_stride, token_stride, BLOCK_SIZE, BLOCK_N
        )
        mask = (tokens < end)[:, None]
        if HEAD_DIM < BLOCK_D:
            mask = mask & in_head[None, :]
        k = tl.load(key_ptr + rows[:, None] + cols[None, :], mask=mask, other=0.0)
        v = tl.load(value_ptr + rows[:, None] + cols[None, :], mask=mask, other=0.0)
        scores = tl.sum(q[None, :] * k.to(tl.float32), axis=1)
        scores = tl.where((tokens < end) & (tokens >= first), scores, float("-inf"))
        new_top = tl.maximum(top, scores)
        p = tl.exp2(scores - new_top)
        fade = tl.exp2(top - new_top)
        total = total * fade + p
        acc = acc * fade[:, None] + p[:, None] * v.to(tl.float32)
        top = new_top
    highest = tl.max(top, axis=0)
    weights = tl.exp2(top - highest)
    total_all = tl.sum(total * weights, axis=0)
    divisor = tl.where(total_all == 0.0, 1.0, total_all)
    out = tl.sum(acc * weights[:, None], axis=0) / divisor
    place = (request * num_heads + head) * num_splits + split
    tl.store(out_ptr + place * HEAD_DIM + cols, out.to(out_ptr.dtype.element_ty), mask=in_head)
    if lse_ptr is not None:
        tl.store(lse_ptr + place, highest + tl.log2(divisor))


def default_tiles(
    num_kv_heads: int, group: int, head_dim: int, itemsize: int, device: torch.device
) -> dict[str, int]:
    """Tile choices for an H200: 16 KiB tiles of keys, a quarter of that where sums need the registers."""
    row_bytes = next_power_of_two(max(head_dim, 16)) * itemsize
    block = max(min(TILE_BYTES // row_bytes, 64), 16)
    splits = max(min(TARGET_PROGRAMS // num_kv_heads, MOST_SPLITS), 1)
    tiles = {"BLOCK_N": block, "MAX_SPLITS": splits, "MIN_SPLIT": 128, "num_warps": 4, "num_stages": 3}
    if group == 1:
        tiles |= {"BLOCK_N": max(block // 4, 16), "MIN_SPLIT": 64, "num_warps": 2}
    return {**tiles, "OVERLAP": 2 if overlaps(device) else 1}


def candidate_tiles(
    num_kv_heads: int, group: int, head_dim: int, itemsize: int, device: torch.device
) -> list[dict[str, int]]:
    """What tuning tries: the default first."""
    default = default_tiles(num_kv_heads, group, head_dim, itemsize, device)
    changes = (
        {"MIN_SPLIT": 2 * default["MIN_SPLIT"]},
        {"num_warps": 2 * default["num_warps"]},
        {"num_stages": 2},
    )
    return [default, *({**default, **change} for change in changes)]


def paged_attention_triton(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_seq_len: int,
    window: int = 0,
    tiles: Mapping[str, int] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the kernels; arguments as in :func:`paged_attention`, unchecked."""
    batch, num_heads, head_dim = q.shape
    num_kv_heads = key_cache.shape[1]
    group = num_heads // num_kv_heads
    defaults = default_tiles(num_kv_heads, group, head_dim, q.element_size(), q.device)
    choice = merge_tiles(defaults, tiles)
    out = torch.empty((batch, num_heads, head_dim), dtype=q.dtype, device=q.device) if out is None else out
    if batch == 0:
        return out
    max_splits, launch = choice["MAX_SPLITS"], launch_options(choice, q.device)
    launch["num_stages"] = choice["num_stages"]
    min_tokens = max(choice["MIN_SPLIT"], choice["BLOCK_N"])
    visible = min(max_seq_len, window + choice["BLOCK_N"]) if window else max_seq_len
    num_splits = max(min(max_splits, triton.cdiv(visible, min_tokens)), 1)
    shared = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(next_power_of_two(head_dim), 16),
        "MAX_SPLITS": max_splits,
        "MIN_TOKENS": min_tokens,
        "HAS_WINDOW": window > 0,
        "BLOCK_N": choice["BLOCK_N"],
        "OVERLAP": choice["OVERLAP"],
    }
    partial, lse = out, None
    if num_splits > 1:
        shape = (batch, num_heads, num_splits)
        partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    arguments = (
        q,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        partial,
        lse,
        q.stride(0),
        block_tables.stride(0),
    )
    numbers = (*key_cache.stride()[:3], scale * LOG2_E, window)
    grid = (num_splits, num_kv_heads, batch)
    block_size = key_cache.shape[2]
    if group == 1:
        single = {"BLOCK_SIZE": block_size, "STAGES": choice["num_stages"]}
        paged_attention_single_kernel[grid](*arguments, *numbers, **single, **shared, **launch)
    else:
        paged_attention_grouped_kernel[grid](
            *arguments,
            *numbers,
            GROUP=group,
            BLOCK_G=max(next_power_of_two(group), 16),
            BLOCK_SIZE=block_size,
            **shared,
            **launch,
        )
    if lse is not None:
        paged_attention_merge_kernel[(num_heads, batch)](
            partial,
            lse,
            seq_lens,
            out,
            window,
            num_splits,
            BLOCK_S=next_power_of_two(max_splits),  # not num_splits: the order of the sum must not change
            **shared,
            **launch_options({**choice, "num_warps": 4}, q.device),
        )
    return out


def paged_attention_reference(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_seq_len: int,
    window: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The PyTorch twin; arguments as in :func:`paged_attention`. Each request sees exactly its own keys."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out.zero_()
    num_kv_heads = key_cache.shape[1]
    for row, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        start = max(length - window, 0) if window else 0
        keys = gather_tokens(key_cache, block_tables[row], start, length)[None]
        values = gather_tokens(value_cache, block_tables[row], start, length)[None]
        grouped = q[row].unflatten(0, (num_kv_heads, -1))[None]  # [1, num_kv_heads, group, head_dim]
        attended = torch.nn.functional.scaled_dot_product_attention(grouped, keys, values, scale=scale)
        out[row] = attended.flatten(0, 2)
    return out


def paged_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_seq_len: int,
    window: int = 0,
    tiles: Mapping[str, int] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """o = softmax(scale q K^T) V over the cached keys of each request (split as in Flash-Decoding, 2023).

    Args:
        q: [B, num_heads, head_dim] fp16, bf16 or fp32; head_dim 8 to 256.
        key_cache: [num_blocks, num_kv_heads, block_size, head_dim], dtype of q.
        value_cache: as key_cache, and with the same strides.
        block_tables: [B, max_blocks] int32; entries past a request's length are not read.
        seq_lens: [B] int32, keys of each request; 0 is a padding row: its output is zeros.
        scale: multiplies the scores, usually head_dim ** -0.5.
        max_seq_len: an upper bound on seq_lens; sizes the launch, does not change the result.
        window: see only the last ``window`` keys; 0: all.
        tiles: ``BLOCK_N``, ``MAX_SPLITS``, ``MIN_SPLIT`` (tokens a split holds at least), ``OVERLAP`` (as in
            overlap.py; 4: besides, read seq_lens and block_tables and fetch keys before the wait, allowed if
            they were not written by the kernel launched just before), ``num_warps``, ``num_stages``.
        out: [B, num_heads, head_dim] contiguous, or None: receives the result.

    Returns:
        [B, num_heads, head_dim], dtype of q: ``out``, or a new tensor.

    Raises:
        KernelArgumentError: a shape, dtype, device or stride that the kernel cannot take.
    """
    expect_float("q", q)
    expect_heads("q", q, like=q)
    batch, num_heads, head_dim = q.shape
    expect_cache(key_cache, value_cache, None, head_dim, like=q)
    expect_group(num_heads, key_cache.shape[1])
    expect("block_tables", block_tables, (batch, None), like=q, dtype=torch.int32)
    expect("seq_lens", seq_lens, (batch,), like=q, dtype=torch.int32)
    expect_range("window", window, 0)
    expect_range("max_seq_len", max_seq_len, 0)
    if out is not None:
        expect_result("out", out, like=q)
    arguments = (q, key_cache, value_cache, block_tables, seq_lens, scale, max_seq_len, window)
    if runs_on_gpu(q):
        return paged_attention_triton(*arguments, tiles, out)
    return paged_attention_reference(*arguments, out)
