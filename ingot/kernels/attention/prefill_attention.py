"""Causal attention of any mix of new tokens over the paged KV cache: prefill, chunks on cached keys, decode.

o = softmax(scale q K^T + mask) V, tile by tile with an online softmax. Key tiles start at multiples of the
tile size however a prompt is cut into chunks.

    out = prefill_attention(q, cache, Sequences(block_tables, seq_lens, 4096, query_start, 512), scoring)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ingot.kernels.attention.attention_arguments import (
    PLAIN_OUTPUT,
    AttentionOutput,
    Scoring,
    Sequences,
    TileList,
    expect_arrivals,
    expect_attention,
    expect_queries,
)
from ingot.kernels.attention.hopper_attention import hopper_attention, serves
from ingot.kernels.attention.int8_heads import end_constants, end_pointers, expect_out, store_heads
from ingot.kernels.attention.prefill_parts import meet_parts, part_bounds
from ingot.kernels.attention.prefill_reference import prefill_attention_reference
from ingot.kernels.attention.score_exponents import LEAST_SCORE, score_factors, softcapped
from ingot.kernels.cache.cache_tile import tile_place
from ingot.kernels.cache.int8_cache_values import LEAST_SCALE, knows_asm, tile_scales, widened
from ingot.kernels.cache.paged_cache import PagedCache
from ingot.kernels.kernel_checks import (
    KernelArgumentError,
    expect,
    expect_range,
    merge_tiles,
    next_power_of_two,
    runs_on_gpu,
)
from ingot.kernels.launch_overlap import launch_options, start_next, wait_for_previous
from ingot.kernels.tiles.prefill_tiles import default_tiles, is_hopper_tile


@triton.jit
def _attend(
    acc: tl.tensor,
    total: tl.tensor,
    top: tl.tensor,
    unit: tl.tensor,
    q: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    key_scale_ptr: tl.tensor,
    value_scale_ptr: tl.tensor,
    table_ptr: tl.tensor,
    lower: tl.tensor,
    upper: tl.tensor,
    positions: tl.tensor,
    seq_len: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    scale_log2: tl.tensor,
    window: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    ASM: tl.constexpr,
) -> tl.tensor:
    """Take the key tiles from ``lower`` to ``upper`` into the running softmax.

    With scales keys and values are in 8 bits; ``acc`` is in units of ``unit``, the largest scale of values so
    far, so that weights times scales stay below 1 and fit 16 bits.
    """
    NARROW: tl.constexpr = key_scale_ptr is not None
    cols = tl.arange(0, BLOCK_D)
    for tile in range(lower, upper, BLOCK_N):
        tokens = tile + tl.arange(0, BLOCK_N)
        start, offsets = tile_place(
            table_ptr, tile, seq_len, block_stride, token_stride, BLOCK_SIZE, BLOCK_N, BLOCK_D
        )
        mask = (tokens < seq_len)[:, None] & (cols < HEAD_DIM)[None, :]
        if MASKED or HEAD_DIM < BLOCK_D:
            k = tl.load(key_ptr + start + offsets, mask=mask, other=0.0)
        else:
            k = tl.load(key_ptr + start + offsets)
        if NARROW:
            k = widened(k, q.dtype, ASM)
            k_scale = tile_scales(key_scale_ptr, start, table_ptr, tile, seq_len, block_stride, token_stride,
                                  HEAD_DIM, BLOCK_SIZE, BLOCK_N)  # fmt: skip
            v_scale = tile_scales(value_scale_ptr, start, table_ptr, tile, seq_len, block_stride,
                                  token_stride, HEAD_DIM, BLOCK_SIZE, BLOCK_N)  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if NARROW:
            scores *= k_scale[None, :]
        if CAP > 0.0:
            scores = softcapped(scores * scale_log2, CAP)
        if MASKED:
            seen = tokens[None, :] <= positions[:, None]
            if HAS_WINDOW:
                seen = seen & (tokens[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        if CAP > 0.0:
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            p = tl.exp2(scores - new_top[:, None])
        else:  # the positive scale joins the subtraction in one fused operation per score
            new_top = tl.maximum(top, tl.max(scores, axis=1) * scale_log2)
            p = tl.exp2(scores * scale_log2 - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(p, axis=1)
        if MASKED or HEAD_DIM < BLOCK_D:
            v = tl.load(value_ptr + start + offsets, mask=mask, other=0.0)
        else:
            v = tl.load(value_ptr + start + offsets)
        if NARROW:
            v = widened(v, q.dtype, ASM)
            new_unit = tl.maximum(unit, tl.max(v_scale, axis=0))
            p = p * (v_scale / new_unit)[None, :]
            fade = fade * (unit / new_unit)
            unit = new_unit
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = new_top
    return acc, total, top, unit


@triton.jit
def prefill_attention_kernel(
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    key_scale_ptr: tl.tensor,
    value_scale_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    list_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_scale_ptr: tl.tensor,
    out_zero_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    scale_log2: tl.tensor,
    window: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAP: tl.constexpr,
    STATIC: tl.constexpr,
    BITS: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One program per BLOCK_M queries of one head of one request.

    The last queries of every head, with most keys, go first, so that the last programs are short. With a list
    of (request, tile, part, parts) its order decides; with ``partial_ptr`` a tile's keys may be in parts.
    """
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    tile_m = tl.num_programs(1) - 1 - tl.program_id(1)
    head, request = tl.program_id(0), tl.program_id(2).to(tl.int64)
    entry = tl.program_id(1)
    if list_ptr is not None:
        request = tl.load(list_ptr + 4 * entry).to(tl.int64)
        tile_m = tl.load(list_ptr + 4 * entry + 1)
    query_start = tl.load(query_start_ptr + request)
    num_queries = tl.load(query_start_ptr + request + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + request)
    if tile_m * BLOCK_M >= num_queries:
        return
    queries = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    q_mask = (queries < num_queries)[:, None] & (cols < HEAD_DIM)[None, :]
    token = (query_start + queries).to(tl.int64)
    head_cols = (head * HEAD_DIM + cols)[None, :]
    q = tl.load(q_ptr + (token * q_stride)[:, None] + head_cols, mask=q_mask, other=0.0)

    # Keys before ``full`` are seen by every query of the tile, keys from ``upper`` on by none. A padding row
    # has seq_len 0: its positions are negative, both loops are empty and zeros are stored.
    first_position = seq_len - num_queries + tile_m * BLOCK_M
    positions = first_position + tl.arange(0, BLOCK_M)
    upper = tl.minimum(first_position + BLOCK_M, seq_len)
    lower = first_position * 0
    full = tl.maximum(first_position + 1, 0) // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        lower = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
        full = lower
    if partial_ptr is not None:
        part, parts = tl.load(list_ptr + 4 * entry + 2), tl.load(list_ptr + 4 * entry + 3)
        lower, full, upper = part_bounds(lower, full, upper, part, parts, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    top = tl.full([BLOCK_M], LEAST_SCORE, dtype=tl.float32)
    key_ptr += head // GROUP * head_stride
    value_ptr += head // GROUP * head_stride
    if key_scale_ptr is not None:
        key_scale_ptr += head // GROUP * (head_stride // HEAD_DIM)
        value_scale_ptr += head // GROUP * (head_stride // HEAD_DIM)
    unit = LEAST_SCALE + 0.0 * scale_log2
    table_ptr = tables_ptr + request * table_stride
    if not HAS_WINDOW:
        acc, total, top, unit = _attend(
            acc, total, top, unit, q, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, table_ptr, lower,
            full, positions, seq_len, block_stride, token_stride, scale_log2, window, HEAD_DIM, BLOCK_D,
            BLOCK_SIZE, BLOCK_N, False, False, CAP, ASM,
        )  # fmt: skip
    acc, total, top, unit = _attend(
        acc, total, top, unit, q, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, table_ptr, full, upper,
        positions, seq_len, block_stride, token_stride, scale_log2, window, HEAD_DIM, BLOCK_D, BLOCK_SIZE,
        BLOCK_N, True, HAS_WINDOW, CAP, ASM,
    )  # fmt: skip
    if key_scale_ptr is not None:
        acc = acc * unit
    divisor = tl.where(total == 0.0, 1.0, total)
    out = acc / divisor[:, None]
    if partial_ptr is not None:  # noqa: SIM102 - one condition is known when compiling, the other is not
        if parts > 1:
            lse = top + tl.log2(divisor)
            out, last = meet_parts(out, lse, partial_ptr, lse_ptr, arrivals_ptr, entry, part, parts,
                                   queries < num_queries, HEAD_DIM, BLOCK_M, BLOCK_D)  # fmt: skip
            if not last:
                return
    store_heads(out, out_ptr, out_scale_ptr, out_zero_ptr, q_ptr, token * tl.num_programs(0) + head,
                head + tl.arange(0, 1), queries < num_queries, HEAD_DIM, 1, STATIC, BITS)  # fmt: skip


def _options(choice: Mapping[str, int], device: torch.device) -> dict[str, int]:
    """Triton's launch options; 256 REGISTERS is no limit."""
    limits = {"maxnreg": choice["REGISTERS"]} if choice["REGISTERS"] < 256 else {}
    return {**launch_options(choice, device), "num_stages": choice["num_stages"], **limits}


def prefill_attention_triton(
    q: torch.Tensor,
    cache: PagedCache,
    sequences: Sequences,
    scoring: Scoring,
    tiles: Mapping[str, int] | None = None,
    output: AttentionOutput = PLAIN_OUTPUT,
    listed: TileList | None = None,
    arrivals: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the kernel; arguments as in :func:`prefill_attention`, unchecked."""
    num_tokens, num_heads, head_dim = q.shape
    block_tables, seq_lens, _, query_start, max_query_len = sequences
    scale, window, softcap = scoring
    out, out_scales, _ = output
    tile_list, parts = (None, 0) if listed is None else listed
    kind = (q.element_size(), cache.scales is not None, parts)
    hopper = is_hopper_tile(tiles or {}) and serves(q, cache, len(seq_lens))
    choice = merge_tiles(default_tiles(max_query_len, head_dim, *kind, hopper=hopper), tiles)
    if hopper and not parts and is_hopper_tile(choice):
        return hopper_attention(q, cache, sequences, scoring, output, listed, arrivals)
    if out is None:
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    grid = (num_heads, triton.cdiv(max_query_len, choice["BLOCK_M"]), seq_lens.shape[0])
    if tile_list is not None:
        grid = (num_heads, len(tile_list), 1)
    partial = lse = None
    if parts:
        shape = (parts, num_heads, choice["BLOCK_M"])
        partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
        if arrivals is None:
            arrivals = torch.zeros(parts * num_heads, dtype=torch.int32, device=q.device)
    factor, cap = score_factors(scale, softcap)
    if num_tokens and min(grid):
        prefill_attention_kernel[grid](
            *(q, *cache.pointers, block_tables, query_start, seq_lens),
            *(tile_list, out, *end_pointers(out_scales), partial, lse, arrivals if parts else None),
            *(q.stride(0), block_tables.stride(0)),
            *cache.keys.stride()[:3],
            factor,
            window,
            GROUP=num_heads // cache.num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_D=max(next_power_of_two(head_dim), 16),
            BLOCK_SIZE=cache.block_size,
            HAS_WINDOW=window > 0,
            BLOCK_M=choice["BLOCK_M"],
            BLOCK_N=choice["BLOCK_N"],
            CAP=cap,
            ASM=knows_asm(q),
            OVERLAP=choice["OVERLAP"],
            **end_constants(out_scales, num_heads * head_dim),
            **_options(choice, q.device),
        )
    return out


def prefill_attention(
    q: torch.Tensor,
    cache: PagedCache,
    sequences: Sequences,
    scoring: Scoring,
    tiles: Mapping[str, int] | None = None,
    output: AttentionOutput = PLAIN_OUTPUT,
    listed: TileList | None = None,
    arrivals: torch.Tensor | None = None,
) -> torch.Tensor:
    """o = softmax(scale q K^T + causal mask) V over the cached keys (tiled as in FlashAttention-2, 2023).

    Query j of a request with n new tokens is at position ``seq_len - n + j``; it sees the keys at positions
    up to its own, and with a window only the last ``window`` of them.

    Args:
        q: [T, num_heads, head_dim] fp16, bf16 or fp32, requests end to end; head_dim 8 to 256.
        cache: in the dtype of q, or in 8 bits; already holds the new tokens.
        sequences: with ``query_start``. Rows of q outside are left as they are.
        scoring: with a positive scale.
        tiles: ``BLOCK_M``, ``BLOCK_N``, ``REGISTERS`` (limit per thread; 256: none), ``OVERLAP``
            (launch_overlap.py), ``num_warps``, ``num_stages``.
        listed: what the programs compute; None: all requests.
        arrivals: at least parts * num_heads int32 zeros, as of :func:`paged_attention`.

    Returns:
        [T, num_heads, head_dim], dtype of q: the output's ``out``, or a new tensor.
    """
    expect_attention(q, cache, sequences, scoring)
    expect_queries(q, sequences)
    if not scoring.scale > 0:
        raise KernelArgumentError("scale is not positive", seen=scoring.scale)
    expect_out(output.out, output.scales, q)
    if listed is not None:
        expect("tile_list", listed.tiles, (None, 4), like=q, dtype=torch.int32)
        expect_range("parts", listed.parts, 0, len(listed.tiles))
    expect_arrivals(arrivals, q, 0 if listed is None else listed.parts * q.shape[1])
    if runs_on_gpu(q):
        return prefill_attention_triton(q, cache, sequences, scoring, tiles, output, listed, arrivals)
    return prefill_attention_reference(q, cache, sequences, scoring, output, listed)
