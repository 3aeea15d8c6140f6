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
from ingot.kernels.overlap import launch_options, overlaps
from ingot.kernels.paged_grouped import paged_attention_grouped_kernel
from ingot.kernels.paged_merge import paged_attention_merge_kernel
from ingot.kernels.paged_single import paged_attention_single_kernel
from ingot.kernels.paged_tile import gather_tokens

TARGET_PROGRAMS = 264  # two a multiprocessor of an H200, reached by a single long request
MOST_SPLITS = 64
EARLY_FETCHERS = 2  # requests: fetching before the wait gains 4 % of a step at 1 and loses 2 to 4 % at 8
WARP_BYTES = 4096  # of keys, and of values, that one warp holds in registers
LOAD_BYTES = 16  # by one thread at once
LOG2_E = math.log2(math.e)


def default_overlap(group: int, batch: int, device: torch.device) -> int:
    """``OVERLAP`` by the number of requests: the one tile that may follow it, as it does not change bits."""
    if not overlaps(device):
        return 1
    return 4 if group == 1 and batch <= EARLY_FETCHERS else 2


def default_tiles(
    num_kv_heads: int, group: int, head_dim: int, itemsize: int, device: torch.device, batch: int = 1
) -> dict[str, int]:
    """Tile choices for an H200: one warp that holds 4 KiB of keys, two where the matrix unit shares them."""
    row_bytes = next_power_of_two(max(head_dim, 16)) * itemsize
    splits = max(min(TARGET_PROGRAMS // num_kv_heads, MOST_SPLITS), 1)
    tiles = {"MAX_SPLITS": splits, "OVERLAP": default_overlap(group, batch, device)}
    if group > 1:
        block = max(min(2 * WARP_BYTES // row_bytes, 32), 16)
        return {**tiles, "BLOCK_N": block, "MIN_SPLIT": 128, "num_warps": 2, "num_stages": 5}
    block = max(min(WARP_BYTES // row_bytes, 64), 16)
    warps = max(block * row_bytes // WARP_BYTES, 1)
    return {**tiles, "BLOCK_N": block, "MIN_SPLIT": 64, "num_warps": warps, "num_stages": 1}


def candidate_tiles(
    num_kv_heads: int, group: int, head_dim: int, itemsize: int, device: torch.device
) -> list[dict[str, int]]:
    """Tiles worth timing, the default first; arguments as in :func:`default_tiles`.

    All but a change of ``OVERLAP`` also change the last bits of the result. A candidate without ``OVERLAP``
    leaves it to :func:`default_overlap`.
    """
    first = default_tiles(num_kv_heads, group, head_dim, itemsize, device)
    del first["OVERLAP"]
    block, splits, warps = first["BLOCK_N"], first["MAX_SPLITS"], first["num_warps"]
    few = {"MAX_SPLITS": max(splits // 2, 1)}
    if group > 1:
        changes = [
            {},
            {"MIN_SPLIT": 256, **few},
            {"BLOCK_N": 2 * block, "num_warps": 4, "num_stages": 4},
            {"BLOCK_N": 2 * block, "num_warps": 4, "num_stages": 3, "MIN_SPLIT": 256, **few},
            {"BLOCK_N": 4 * block, "num_warps": 4, "num_stages": 2, "MIN_SPLIT": 256, **few},
        ]
        return [{**first, **change} for change in changes]
    wide = {"BLOCK_N": 4 * block, "num_warps": 2 * warps}
    changes = [
        {},
        *({"OVERLAP": overlap} for overlap in ((2, 4) if overlaps(device) else ())),
        wide,
        {**wide, "MAX_SPLITS": 2 * splits},
        {"BLOCK_N": 2 * block},
        {"BLOCK_N": 2 * block, "MIN_SPLIT": 128, **few},
    ]
    found = [{**first, **change} for change in changes]
    return [tiles for index, tiles in enumerate(found) if tiles not in found[:index]]


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
    arrivals: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the kernels; arguments as in :func:`paged_attention`, unchecked."""
    batch, num_heads, head_dim = q.shape
    num_kv_heads = key_cache.shape[1]
    group = num_heads // num_kv_heads
    defaults = default_tiles(num_kv_heads, group, head_dim, q.element_size(), q.device, batch)
    choice = merge_tiles(defaults, tiles)
    out = torch.empty((batch, num_heads, head_dim), dtype=q.dtype, device=q.device) if out is None else out
    if batch == 0:
        return out
    min_tokens = max(choice["MIN_SPLIT"], choice["BLOCK_N"])
    visible = min(max_seq_len, window + choice["BLOCK_N"]) if window else max_seq_len
    num_splits = max(min(choice["MAX_SPLITS"], triton.cdiv(visible, min_tokens)), 1)
    shared = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(next_power_of_two(head_dim), 16),
        "MAX_SPLITS": choice["MAX_SPLITS"],
        "MIN_TOKENS": min_tokens,
        "HAS_WINDOW": window > 0,
        "BLOCK_N": choice["BLOCK_N"],
        "OVERLAP": choice["OVERLAP"],
    }
    partial = lse = None
    if num_splits > 1:
        shape = (batch, num_heads, num_splits)
        partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    strides = (q.stride(0), block_tables.stride(0), *key_cache.stride()[:3])
    inputs = (q, key_cache, value_cache, block_tables, seq_lens)
    options = {**shared, "BLOCK_SIZE": key_cache.shape[2], **launch_options(choice, q.device)}
    grid = (num_splits, num_kv_heads, batch)
    if group == 1:
        if num_splits > 1 and arrivals is None:
            arrivals = torch.zeros(batch * num_heads, dtype=torch.int32, device=q.device)
        row_bytes = shared["BLOCK_D"] * q.element_size()
        chains = 32 * choice["num_warps"] * LOAD_BYTES // row_bytes
        paged_attention_single_kernel[grid](
            *inputs,
            out,
            partial,
            lse,
            arrivals if num_splits > 1 else None,
            *strides,
            scale * LOG2_E,
            window,
            CHAINS=min(max(chains, 1), choice["BLOCK_N"]),
            **options,
        )
        return out
    paged_attention_grouped_kernel[grid](
        *inputs,
        out if partial is None else partial,
        lse,
        *strides,
        scale * LOG2_E,
        window,
        GROUP=group,
        BLOCK_G=max(next_power_of_two(group), 16),
        num_stages=choice["num_stages"],
        **options,
    )
    if lse is not None:
        paged_attention_merge_kernel[(num_heads, batch)](
            partial,
            lse,
            seq_lens,
            out,
            window,
            num_splits,
            BLOCK_S=next_power_of_two(choice["MAX_SPLITS"]),  # not num_splits: the order of the sum is fixed
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
    arrivals: torch.Tensor | None = None,
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
            overlap.py; 4, the default of at most two requests without groups: besides, read seq_lens,
            block_tables and all keys but each request's newest before the wait, allowed if no kernel has
            written them since the last launch without overlap), ``num_warps``, ``num_stages`` (of the grouped
            kernel).
        out: [B, num_heads, head_dim] contiguous, or None: receives the result.
        arrivals: at least B * num_kv_heads int32 zeros, which the kernel leaves at zero: one tensor serves
            all calls on a stream. Without it each call that splits makes its own, one more launch. Not used
            where query heads share keys.

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
    if arrivals is not None:
        expect("arrivals", arrivals, (None,), like=q, dtype=torch.int32)
        expect_range("arrivals", arrivals.numel(), batch * key_cache.shape[1])
    arguments = (q, key_cache, value_cache, block_tables, seq_lens, scale, max_seq_len, window)
    if runs_on_gpu(q):
        return paged_attention_triton(*arguments, tiles, out, arrivals)
    return paged_attention_reference(*arguments, out)
