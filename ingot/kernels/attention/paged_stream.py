"""Decode attention where queries share a head of keys (GQA, MQA): they are the rows of a matrix product.

A request's keys form spans, by its own length alone, and a program walks a run of them in one pipelined loop.
Each span has its own softmax, so the run may follow batch and length without changing a bit: few long loops
in a large batch, many short ones in a small one.

    out = paged_stream_triton(q, cache, Sequences(block_tables, seq_lens, 4096), Scoring(128**-0.5))
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ingot.kernels.attention.attention_arguments import PLAIN_OUTPUT, AttentionOutput, Scoring, Sequences
from ingot.kernels.attention.int8_heads import end_constants, end_pointers, store_heads
from ingot.kernels.attention.paged_merge import arrive_last, paged_attention_merge_kernel, rounded_product
from ingot.kernels.attention.score_exponents import LEAST_SCORE, score_factors, softcapped
from ingot.kernels.cache.cache_tile import split_bounds, tile_rows
from ingot.kernels.cache.int8_cache_values import LEAST_SCALE, knows_asm, tile_scales, widened
from ingot.kernels.cache.paged_cache import PagedCache
from ingot.kernels.kernel_checks import KernelArgumentError, merge_tiles, next_power_of_two
from ingot.kernels.launch_overlap import launch_options, start_next, wait_for_previous
from ingot.kernels.tiles.stream_tiles import pair_programs, stream_tiles

# Spans, and keys, of a program, so that a long request in a large batch takes several.
MOST_RUN, MOST_KEYS = tl.constexpr(8), tl.constexpr(4096)
MERGED_AT_ONCE = tl.constexpr(32)  # rows of 128 channels: 64 registers of each of two warps


@triton.jit
def most_run(length: tl.tensor) -> tl.tensor:
    """How many spans of so many keys a program takes at most."""
    spans = (MOST_KEYS + 0 * length) // length
    return tl.minimum(tl.maximum(spans, 1), MOST_RUN)


def most_programs(num_splits: int, keys: int) -> int:
    """Programs that :func:`most_run` asks for at most, by spans and keys of a request: a program that takes
    less than MOST_RUN spans takes more than half of MOST_KEYS.
    """
    return max(triton.cdiv(num_splits, MOST_RUN.value), triton.cdiv(keys, MOST_KEYS.value // 2))


@triton.jit
def _store_span(
    out_ptr: tl.tensor,
    out_scale_ptr: tl.tensor,
    out_zero_ptr: tl.tensor,
    q_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    head_row: tl.tensor,
    span: tl.tensor,
    num_splits: tl.tensor,
    only: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    AXIS: tl.constexpr,
    MERGE: tl.constexpr,
    STATIC: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """A span's output for each query head: the result if it is the ``only`` span, else a part of it."""
    group, cols = tl.arange(0, top.shape[0]), tl.arange(0, acc.shape[AXIS])
    rows, channels = tl.expand_dims(head_row + group, AXIS), tl.expand_dims(cols, 1 - AXIS)
    mask = tl.expand_dims(group < GROUP, AXIS) & (channels < HEAD_DIM)
    divisor = tl.where(total == 0.0, 1.0, total)
    out = acc / tl.expand_dims(divisor, AXIS)
    heads = tl.program_id(0) * GROUP + tl.minimum(group, GROUP - 1)
    if partial_ptr is None:
        store_heads(out, out_ptr, out_scale_ptr, out_zero_ptr, q_ptr, head_row + group, heads, group < GROUP,
                    HEAD_DIM, AXIS, STATIC, BITS)  # fmt: skip
    else:
        place = head_row * num_splits + span
        parts = ((rows - head_row) * num_splits + place) * HEAD_DIM + channels
        if MERGE == 1:
            tl.store(partial_ptr + parts, out, mask=mask)
        else:
            tl.store(partial_ptr + parts, out, mask=mask & (not only))
            store_heads(out, out_ptr, out_scale_ptr, out_zero_ptr, q_ptr, head_row + group, heads,
                        (group < GROUP) & only, HEAD_DIM, AXIS, STATIC, BITS)  # fmt: skip
        tl.store(lse_ptr + place + group * num_splits, top + tl.log2(divisor), mask=group < GROUP)


@triton.jit
def _merge_if_last(
    out_ptr: tl.tensor,
    out_scale_ptr: tl.tensor,
    out_zero_ptr: tl.tensor,
    q_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    count_ptr: tl.tensor,
    head_row: tl.tensor,
    num_splits: tl.tensor,
    live: tl.tensor,
    expected: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STATIC: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """The last of ``expected`` programs (0: nothing to merge) merges the ``live`` spans of its heads, with
    MERGED_AT_ONCE rows of parts in registers at a time.
    """
    heads: tl.constexpr = triton.next_power_of_2(GROUP)
    step: tl.constexpr = max(min(MERGED_AT_ONCE // heads, BLOCK_S), 1)
    group, cols = tl.arange(0, heads), tl.arange(0, BLOCK_D)
    shared = tl.minimum(group, GROUP - 1)
    rows = head_row + shared
    if expected > 0:  # noqa: SIM102  Triton's `and` would count every program
        if arrive_last(count_ptr, expected):
            every = tl.arange(0, BLOCK_S)[None, :]
            lse_places = lse_ptr + (rows * num_splits)[:, None] + every
            every_lse = tl.load(lse_places, mask=every < live, other=float("-inf"), cache_modifier=".cg")
            top = tl.maximum(tl.max(every_lse, axis=1), LEAST_SCORE)
            total = tl.sum(tl.exp2(every_lse - top[:, None]), axis=1)
            acc = tl.zeros([heads, BLOCK_D], dtype=tl.float32)
            for first in tl.range(0, live, step, num_stages=1):
                spans = (first + tl.arange(0, step))[None, :]
                places = (rows * num_splits)[:, None] + spans
                mask = spans < live
                lse = tl.load(lse_ptr + places, mask=mask, other=float("-inf"), cache_modifier=".cg")
                partial = tl.load(
                    partial_ptr + (places * HEAD_DIM)[:, :, None] + cols[None, None, :],
                    mask=mask[:, :, None] & (cols < HEAD_DIM)[None, None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                weights = tl.exp2(lse - top[:, None])[:, :, None]
                acc += tl.sum(rounded_product(partial, weights), axis=1)
            out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            own = tl.program_id(0) * GROUP + shared
            store_heads(out, out_ptr, out_scale_ptr, out_zero_ptr, q_ptr, rows, own, group < GROUP, HEAD_DIM,
                        1, STATIC, BITS)  # fmt: skip


@triton.jit(do_not_specialize=["programs", "num_splits"])
def paged_stream_kernel(
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    key_scale_ptr: tl.tensor,
    value_scale_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
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
    num_splits: tl.tensor,
    programs: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AXIS: tl.constexpr,
    MERGE: tl.constexpr,
    CAP: tl.constexpr,
    STATIC: tl.constexpr,
    BITS: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """A run of spans of one key-value head, grid (num_kv_heads, batch, programs per pair).

    A request's spans are shared by ``programs``, or by more where each would walk more than ``most_run``.

    AXIS 1: queries are the rows of both products; 0: keys, and channels of the output (wgmma needs 64 rows).
    The block of the next tile is looked up one tile early, so that no load waits for another. Programs past a
    request's end come last in the grid and end at once. OVERLAP 4 reads seq_lens and the first table entry
    before the wait, and the first tiles, unless the newest key, which the previous kernel may write, is among
    EARLY of them (0: none is read): allowed if no kernel has written what is read since the last launch
    without overlap.

    With scales keys and values are in 8 bits: scores are multiplied by their key's scale, weights by their
    value's as a share of ``unit``, the largest so far, so that they stay below 1 and fit 16 bits.
    """
    start_next(OVERLAP)
    if OVERLAP < 4:
        wait_for_previous(OVERLAP)
    kv_head, request, program = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + request)
    first, base, length = split_bounds(seq_len, window, MAX_SPLITS, MIN_TOKENS, BLOCK_N, HAS_WINDOW)
    live = tl.maximum(tl.cdiv(seq_len - base, length), 1)
    run = tl.minimum(tl.cdiv(live, programs), most_run(length))
    span = program * run
    start = base + span * length
    if span >= live:  # every program waits: the next kernel relies on that
        if OVERLAP >= 4:
            wait_for_previous(OVERLAP)
        return
    end = tl.minimum(start + run * length, seq_len)
    table_ptr = tables_ptr + request * table_stride
    block = tl.load(table_ptr + start // BLOCK_SIZE, mask=start < end, other=0)
    NARROW: tl.constexpr = key_scale_ptr is not None
    if EARLY > 0:
        if (end == seq_len) & (end - start <= EARLY * BLOCK_N):
            wait_for_previous(OVERLAP)
    elif OVERLAP >= 4:
        wait_for_previous(OVERLAP)
    group, cols, order = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    head_row = (request * tl.num_programs(0) + kv_head) * GROUP
    q_rows = tl.expand_dims((kv_head * GROUP + group) * HEAD_DIM, AXIS)
    q_mask = tl.expand_dims(group < GROUP, AXIS) & tl.expand_dims(cols < HEAD_DIM, 1 - AXIS)
    q_places = q_ptr + request * q_stride + q_rows + tl.expand_dims(cols, 1 - AXIS)
    if EARLY > 0:
        q = tl.zeros(q_places.shape, dtype=q_ptr.dtype.element_ty)
    else:
        q = tl.load(q_places, mask=q_mask, other=0.0)
    top = tl.full([BLOCK_G], LEAST_SCORE, dtype=tl.float32)
    total = tl.zeros([BLOCK_G], dtype=tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D] if AXIS == 1 else [BLOCK_D, BLOCK_G], dtype=tl.float32)
    key_ptr += kv_head * head_stride
    value_ptr += kv_head * head_stride
    if NARROW:
        key_scale_ptr += kv_head * (head_stride // HEAD_DIM)
        value_scale_ptr += kv_head * (head_stride // HEAD_DIM)
    unit = LEAST_SCALE + 0.0 * scale_log2
    offsets = (order * token_stride)[:, None] + cols[None, :]
    stop = start + length
    for tile in range(start, end, BLOCK_N):
        mask = (tile + order < end)[:, None]
        if HEAD_DIM < BLOCK_D:
            mask = mask & (cols < HEAD_DIM)[None, :]
        if BLOCK_SIZE % BLOCK_N == 0:
            place = block.to(tl.int64) * block_stride + (tile % BLOCK_SIZE) * token_stride
            tiles = offsets
            after = tile + BLOCK_N
            block = tl.load(table_ptr + after // BLOCK_SIZE, mask=after < end, other=0)
        else:
            place = 0
            rows = tile_rows(table_ptr, tile, end, block_stride, token_stride, BLOCK_SIZE, BLOCK_N)
            tiles = rows[:, None] + cols[None, :]
        if NARROW:
            numbers = tl.load(key_ptr + place + tiles, mask=mask, other=0.0)
            k = widened(numbers, q_ptr.dtype.element_ty, ASM)
            k_scale = tile_scales(key_scale_ptr, place, table_ptr, tile, end, block_stride, token_stride,
                                  HEAD_DIM, BLOCK_SIZE, BLOCK_N) * scale_log2  # fmt: skip
            v_scale = tile_scales(value_scale_ptr, place, table_ptr, tile, end, block_stride, token_stride,
                                  HEAD_DIM, BLOCK_SIZE, BLOCK_N)  # fmt: skip
        else:
            k = tl.load(key_ptr + place + tiles, mask=mask, other=0.0)
        if EARLY > 0:
            if tile == start:
                wait_for_previous(OVERLAP)
                q = tl.load(q_places, mask=q_mask, other=0.0)
            else:
                q = tl.load(q_places, mask=q_mask & (tile < start), other=q)  # keeps the layout
        seen = tile + order < end
        if HAS_WINDOW:
            seen = seen & (tile + order >= first)
        if AXIS == 1:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        else:
            scores = tl.dot(k, q, input_precision="ieee")
        scores *= tl.expand_dims(k_scale, 1 - AXIS) if NARROW else scale_log2
        if CAP > 0.0:
            scores = softcapped(scores, CAP)
        scores = tl.where(tl.expand_dims(seen, 1 - AXIS), scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=AXIS))
        p = tl.exp2(scores - tl.expand_dims(new_top, AXIS))
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(p, axis=AXIS)
        if NARROW:
            numbers = tl.load(value_ptr + place + tiles, mask=mask, other=0.0)
            v = widened(numbers, q_ptr.dtype.element_ty, ASM)
            new_unit = tl.maximum(unit, tl.max(v_scale, axis=0))
            p = p * tl.expand_dims(v_scale / new_unit, 1 - AXIS)
            fade = fade * (unit / new_unit)
            unit = new_unit
        else:
            v = tl.load(value_ptr + place + tiles, mask=mask, other=0.0)
        faded = acc * tl.expand_dims(fade, AXIS)
        if AXIS == 1:
            acc = tl.dot(p.to(v.dtype), v, faded, input_precision="ieee")
        else:
            acc = tl.dot(tl.trans(v), p.to(v.dtype), faded, input_precision="ieee")
        top = new_top
        if tile + BLOCK_N >= tl.minimum(stop, end):
            if NARROW:
                acc = acc * unit
                unit = LEAST_SCALE + 0.0 * scale_log2
            _store_span(out_ptr, out_scale_ptr, out_zero_ptr, q_ptr, partial_ptr, lse_ptr, head_row, span,
                        num_splits, live == 1, top, total, acc, GROUP, HEAD_DIM, AXIS, MERGE, STATIC,
                        BITS)  # fmt: skip
            span += 1
            stop += length
            top = tl.full([BLOCK_G], LEAST_SCORE, dtype=tl.float32)
            total = tl.zeros([BLOCK_G], dtype=tl.float32)
            acc = tl.zeros([BLOCK_G, BLOCK_D] if AXIS == 1 else [BLOCK_D, BLOCK_G], dtype=tl.float32)
    if seq_len <= base:  # a padding row
        _store_span(out_ptr, out_scale_ptr, out_zero_ptr, q_ptr, partial_ptr, lse_ptr, head_row, 0,
                    num_splits, True, top, total, acc, GROUP, HEAD_DIM, AXIS, MERGE, STATIC,
                    BITS)  # fmt: skip
    if MERGE == 2 and partial_ptr is not None:
        expected = tl.where(live > 1, tl.cdiv(live, run), 0)
        pair = request * tl.num_programs(0) + kv_head
        BLOCK_S: tl.constexpr = triton.next_power_of_2(MAX_SPLITS)
        _merge_if_last(out_ptr, out_scale_ptr, out_zero_ptr, q_ptr, partial_ptr, lse_ptr,
                       arrivals_ptr + pair, head_row, num_splits, live, expected, GROUP, HEAD_DIM, BLOCK_D,
                       BLOCK_S, STATIC, BITS)  # fmt: skip


def paged_stream_triton(
    q: torch.Tensor,
    cache: PagedCache,
    sequences: Sequences,
    scoring: Scoring,
    tiles: Mapping[str, int] | None = None,
    output: AttentionOutput = PLAIN_OUTPUT,
    arrivals: torch.Tensor | None = None,
    programs: int | None = None,
) -> torch.Tensor:
    """Launch the kernel; arguments as in :func:`paged_attention`, unchecked.

    Tiles as of :func:`stream_tiles`: ``AXIS`` 1 (queries are rows) or 2 (keys are); ``MERGE`` 1 (a second
    launch merges the spans) or 2 (the last program does). ``programs`` per pair, by default
    :func:`pair_programs`.
    """
    batch, num_heads, head_dim = q.shape
    num_kv_heads, out, out_scales = cache.num_kv_heads, output.out, output.scales
    block_tables, seq_lens, max_seq_len, *_ = sequences
    scale, window, softcap = scoring
    group = num_heads // num_kv_heads
    pairs = next_power_of_two(batch) * num_kv_heads
    sizes = (cache.keys.element_size(), q.device, q.element_size())
    choice = merge_tiles(stream_tiles(pairs, head_dim, *sizes), tiles)
    for name, allowed in (("AXIS", (1, 2)), ("MERGE", (1, 2)), ("OVERLAP", (1, 2, 4)), ("EARLY", (0, 1))):
        if choice[name] not in allowed:
            raise KernelArgumentError(f"tile {name} is out of range", seen=choice[name], allowed=allowed)
    out = torch.empty((batch, num_heads, head_dim), dtype=q.dtype, device=q.device) if out is None else out
    if batch == 0:
        return out
    min_tokens = max(choice["MIN_SPLIT"], choice["BLOCK_N"])
    visible = min(max_seq_len, window + choice["BLOCK_N"]) if window else max_seq_len
    num_splits = max(min(choice["MAX_SPLITS"], triton.cdiv(visible, min_tokens)), 1)
    programs = pair_programs(pairs, sizes[0]) if programs is None else programs
    early = choice["EARLY"] > 0 and choice["OVERLAP"] == 4 and cache.scales is None
    sharing = min(max(programs, most_programs(num_splits, visible)), num_splits)
    factor, cap = score_factors(scale, softcap)
    shared = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(next_power_of_two(head_dim), 16),
        "MAX_SPLITS": choice["MAX_SPLITS"],
        "MIN_TOKENS": min_tokens,
        "HAS_WINDOW": window > 0,
        "BLOCK_N": choice["BLOCK_N"],
        **end_constants(out_scales, num_heads * head_dim),
    }
    partial = lse = None
    if num_splits > 1:
        shape = (batch, num_heads, num_splits)
        partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
        if arrivals is None and choice["MERGE"] == 2:
            arrivals = torch.zeros(batch * num_kv_heads, dtype=torch.int32, device=q.device)
    paged_stream_kernel[(num_kv_heads, batch, sharing)](
        *(q, *cache.pointers, block_tables, seq_lens, out),
        *(*end_pointers(out_scales), partial, lse),
        arrivals if lse is not None and choice["MERGE"] == 2 else None,
        *(q.stride(0), block_tables.stride(0), *cache.keys.stride()[:3]),
        *(factor, window, num_splits, programs),
        GROUP=group,
        BLOCK_G=max(next_power_of_two(group), 16),
        BLOCK_SIZE=cache.block_size,
        AXIS=1 if choice["AXIS"] == 1 else 0,
        MERGE=choice["MERGE"],
        CAP=cap,
        ASM=knows_asm(q),
        OVERLAP=choice["OVERLAP"],
        EARLY=choice["num_stages"] if early else 0,
        num_stages=choice["num_stages"],
        **shared,
        **launch_options(choice, q.device),
    )
    if lse is not None and choice["MERGE"] == 1:
        then = {**choice, "num_warps": 4, "OVERLAP": min(choice["OVERLAP"], 2)}
        paged_attention_merge_kernel[(num_heads, batch)](
            *(partial, lse, seq_lens, out, *end_pointers(out_scales), q, window, num_splits),
            BLOCK_S=next_power_of_two(choice["MAX_SPLITS"]),
            OVERLAP=then["OVERLAP"],
            **shared,
            **launch_options(then, q.device),
        )
    return out
