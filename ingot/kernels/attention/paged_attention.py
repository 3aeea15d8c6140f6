"""Decode attention: one query per request over the paged KV cache, the keys split among programs.

o = softmax(scale q K^T) V over the last ``window`` keys. How a request's keys are split depends on its own
length and the tiles alone: with the same tiles its result has the same bits alone and in any batch. Default
tiles follow the number of requests, rounded up to a power of two, as a captured graph pads it.

    out = paged_attention(q, cache, Sequences(block_tables, seq_lens, 4096), Scoring(128**-0.5))
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch
import triton

from ingot.kernels.attention.attention_arguments import (
    PLAIN_OUTPUT,
    AttentionOutput,
    Scoring,
    Sequences,
    expect_arrivals,
    expect_attention,
)
from ingot.kernels.attention.int8_heads import end_constants, end_pointers, expect_out, put_heads
from ingot.kernels.attention.paged_single import paged_attention_single_kernel
from ingot.kernels.attention.paged_stream import paged_stream_triton
from ingot.kernels.attention.score_exponents import plain_attention, score_factors
from ingot.kernels.cache.int8_cache_values import knows_asm
from ingot.kernels.cache.paged_cache import PagedCache
from ingot.kernels.kernel_checks import merge_tiles, next_power_of_two, runs_on_gpu
from ingot.kernels.launch_overlap import launch_options, overlaps
from ingot.kernels.tiles.single_tiles import single_changes, single_tiles
from ingot.kernels.tiles.stream_tiles import stream_tiles
from ingot.kernels.tiles.tile_tables import each_once

LOAD_BYTES = 16  # per thread and load


def default_tiles(
    num_kv_heads: int, group: int, head_dim: int, itemsize: int, device: torch.device, batch: int = 1
) -> dict[str, int]:
    """Tile choices for an H200 by requests (rounded up to a power of two) times key-value heads."""
    pairs = next_power_of_two(batch) * num_kv_heads
    if group > 1:
        return stream_tiles(pairs, head_dim, itemsize, device)
    return single_tiles(pairs, num_kv_heads, head_dim, itemsize, device)


def candidate_tiles(
    num_kv_heads: int, group: int, head_dim: int, itemsize: int, device: torch.device, batch: int = 1
) -> list[dict[str, int]]:
    """Tiles worth timing, the default first; all but ``OVERLAP`` change the last bits of the result."""
    first = default_tiles(num_kv_heads, group, head_dim, itemsize, device, batch)
    if group > 1:
        half = {"BLOCK_N": max(first["BLOCK_N"] // 2, 16)}
        later = [{"OVERLAP": 2}] if overlaps(device) else []
        changes = [{}, *later, {"AXIS": 1, "MERGE": 2}, {"MIN_SPLIT": 256}, half, {**half, "num_stages": 4}]
    else:
        changes = single_changes(first, head_dim, itemsize, device)
    return each_once([{**first, **change} for change in changes])


def paged_attention_triton(
    q: torch.Tensor,
    cache: PagedCache,
    sequences: Sequences,
    scoring: Scoring,
    tiles: Mapping[str, int] | None = None,
    output: AttentionOutput = PLAIN_OUTPUT,
    arrivals: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the kernel; arguments as in :func:`paged_attention`, unchecked."""
    batch, num_heads, head_dim = q.shape
    if num_heads != cache.num_kv_heads:
        return paged_stream_triton(q, cache, sequences, scoring, tiles, output, arrivals)
    block_tables, max_seq_len, window = sequences.block_tables, sequences.max_seq_len, scoring.window
    itemsize, out_scales, out = cache.keys.element_size(), output.scales, output.out
    choice = merge_tiles(default_tiles(num_heads, 1, head_dim, itemsize, q.device, batch), tiles)
    out = torch.empty((batch, num_heads, head_dim), dtype=q.dtype, device=q.device) if out is None else out
    if batch == 0:
        return out
    min_tokens = max(choice["MIN_SPLIT"], choice["BLOCK_N"])
    visible = min(max_seq_len, window + choice["BLOCK_N"]) if window else max_seq_len
    num_splits = max(min(choice["MAX_SPLITS"], triton.cdiv(visible, min_tokens)), 1)
    partial = lse = None
    if num_splits > 1:
        shape = (batch, num_heads, num_splits)
        partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
        if arrivals is None:
            arrivals = torch.zeros(batch * num_heads, dtype=torch.int32, device=q.device)
    block_d = max(next_power_of_two(head_dim), 16)
    factor, cap = score_factors(scoring.scale, scoring.softcap)
    chains = 32 * choice["num_warps"] * LOAD_BYTES // (block_d * itemsize)
    paged_attention_single_kernel[(num_splits, num_heads, batch)](
        *(q, *cache.pointers, block_tables, sequences.seq_lens, out),
        *(*end_pointers(out_scales), partial, lse),
        arrivals if num_splits > 1 else None,
        *(q.stride(0), block_tables.stride(0), *cache.keys.stride()[:3]),
        factor,
        window,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_SIZE=cache.block_size,
        MAX_SPLITS=choice["MAX_SPLITS"],
        MIN_TOKENS=min_tokens,
        HAS_WINDOW=window > 0,
        BLOCK_N=choice["BLOCK_N"],
        CHAINS=min(max(chains, 1), choice["BLOCK_N"]),
        PREFETCH=choice["PREFETCH"],
        CAP=cap,
        ASM=knows_asm(q),
        OVERLAP=choice["OVERLAP"],
        **end_constants(out_scales, num_heads * head_dim),
        **launch_options(choice, q.device),
    )
    return out


def paged_attention_reference(
    q: torch.Tensor,
    cache: PagedCache,
    sequences: Sequences,
    scoring: Scoring,
    output: AttentionOutput = PLAIN_OUTPUT,
) -> torch.Tensor:
    """The PyTorch reference of :func:`paged_attention`."""
    out, out_scales, steady = output
    if out_scales is not None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        wide = AttentionOutput(steady=steady)
        put_heads(paged_attention_reference(q, cache, sequences, scoring, wide), out, out_scales)
        return out
    block_tables, seq_lens = sequences.block_tables, sequences.seq_lens
    scale, window, softcap = scoring
    num_kv_heads, dtype = cache.num_kv_heads, torch.float64 if steady else q.dtype
    if len(q) == 1 and (length := int(seq_lens)):
        pair = cache.gather(block_tables[0], max(length - window, 0) if window else 0, length, q.dtype)
        keys, values = (t.to(dtype) for t in pair) if steady else pair
        queries = q.to(dtype).reshape(1, num_kv_heads, -1, q.shape[2])
        found = plain_attention(queries, keys[None], values[None], scale, softcap).view(q.shape)
        return found.to(q.dtype) if out is None else out.copy_(found)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out.zero_()
    for first, last in _alike(block_tables, seq_lens):
        length = int(seq_lens[first])
        if length == 0:
            continue
        start = max(length - window, 0) if window else 0
        keys, values = (t.to(dtype) for t in cache.gather(block_tables[first], start, length, q.dtype))
        queries = q[first:last].to(dtype).unflatten(1, (num_kv_heads, -1))  # [n, KV heads, group, head_dim]
        if last - first == 1:
            out[first] = plain_attention(queries, keys[None], values[None], scale, softcap).flatten(0, 2)
            continue
        grouped = queries.permute(1, 2, 0, 3)
        attended = plain_attention(grouped, keys[:, None], values[:, None], scale, softcap)
        out[first:last] = attended.permute(2, 0, 1, 3).flatten(1, 2)
    return out


def _alike(block_tables: torch.Tensor, seq_lens: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Ranges of neighbouring rows that see the same keys, such as a prompt's tokens in cross-attention."""
    same = (block_tables[1:] == block_tables[:-1]).all(1) & (seq_lens[1:] == seq_lens[:-1])
    begins = [0, *(row for row, found in enumerate(same.tolist(), start=1) if not found)]
    yield from itertools.pairwise([*begins[: len(seq_lens)], len(seq_lens)])


def paged_attention(
    q: torch.Tensor,
    cache: PagedCache,
    sequences: Sequences,
    scoring: Scoring,
    tiles: Mapping[str, int] | None = None,
    output: AttentionOutput = PLAIN_OUTPUT,
    arrivals: torch.Tensor | None = None,
) -> torch.Tensor:
    """o = softmax(scale q K^T) V over the cached keys of each request (split as in Flash-Decoding, 2023).

    Args:
        q: [B, num_heads, head_dim] fp16, bf16 or fp32; head_dim 8 to 256.
        cache: in the dtype of q, or in 8 bits.
        sequences: with one query per request.
        tiles: ``BLOCK_N``, ``MAX_SPLITS``, ``MIN_SPLIT`` (least tokens per split), ``OVERLAP``
            (launch_overlap.py; 4, the default where it exists: also read seq_lens, block_tables and, without
            groups or with ``EARLY``, all keys but each request's newest before the wait, allowed if no kernel
            has written them since the last launch without overlap), ``num_warps``, ``num_stages``; without
            groups ``PREFETCH`` (1: load a tile while the one before is computed), with groups ``AXIS``,
            ``MERGE`` and ``EARLY`` (paged_stream.py).
        arrivals: at least B * num_kv_heads int32 zeros, which the kernel leaves at zero: one tensor serves
            all calls on a CUDA stream. Without it each call that splits makes its own, one more launch.

    Returns:
        [B, num_heads, head_dim], dtype of q: the output's ``out``, or a new tensor.
    """
    batch = q.shape[0] if q.dim() else 0
    expect_attention(q, cache, sequences, scoring, batch)
    expect_out(output.out, output.scales, q)
    expect_arrivals(arrivals, q, batch * cache.num_kv_heads)
    if runs_on_gpu(q):
        return paged_attention_triton(q, cache, sequences, scoring, tiles, output, arrivals)
    return paged_attention_reference(q, cache, sequences, scoring, output)
