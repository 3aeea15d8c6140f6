"""Launchers of kernels over a KV cache in 8 bits on meta tensors, as in compile_cases.py.

CACHE_CASES["int8 cache 32x128 fp16 alone"]()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ingot.kernels.cache.cache_scales import E4M3, CacheScales
from ingot.kernels.tiles.prefill_tiles import most_parts
from tests.kernels.compile_cases import BRAIN, FULL, HALF, LONG, empty
from tests.kernels.flat_calls import (
    invariant_attention_triton,
    paged_attention_triton,
    prefill_attention_triton,
    rope_kv_write_triton,
)


def narrow_cache(
    kind: torch.dtype, kv_heads: int, head_dim: int, block_size: int = 64
) -> tuple[torch.Tensor, CacheScales]:
    """Keys or values, and the scales of both."""
    scale = empty(100, kv_heads, block_size, dtype=FULL)
    return empty(100, kv_heads, block_size, head_dim, dtype=kind), CacheScales(scale, scale)


def attention(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    batch: int,
    longest: int = 2048,
    window: int = 0,
    block_size: int = 64,
    overlap: int = 1,
    kind: torch.dtype = torch.int8,
) -> None:
    """A step of decodes and one of prompts over a cache in 8 bits, and their writes."""
    cache, scales = narrow_cache(kind, kv_heads, head_dim, block_size)
    index, qkv = empty(4, dtype=LONG), empty(4, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    place = (empty(100, head_dim, dtype=FULL), index, index, index, cache, cache, heads, kv_heads, head_dim)
    rope_kv_write_triton(qkv, *place, tiles={"OVERLAP": min(overlap, 2)}, scales=scales)
    tables, lengths = empty(batch, 64, dtype=torch.int32), empty(batch, dtype=torch.int32)
    q, tiles = empty(batch, heads, head_dim, dtype=dtype), {"OVERLAP": overlap}
    paged_attention_triton(q, cache, cache, tables, lengths, 0.1, 4096, window, tiles, scales=scales)
    q, bounds = empty(batch * longest, heads, head_dim, dtype=dtype), empty(batch + 1, dtype=torch.int32)
    place = (q, cache, cache, tables, bounds, lengths, longest, 0.1, window)
    prefill_attention_triton(*place, scales=scales)
    if longest <= 64:
        tile_list, parts = empty(40, 4, dtype=torch.int32), most_parts(heads, longest, 64)
        prefill_attention_triton(*place, scales=scales, tile_list=tile_list, parts=parts)


def written(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, rotary: int, kind: torch.dtype = torch.int8
) -> None:
    """Writes with head norms, of heads that turn in part."""
    cache, scales = narrow_cache(kind, kv_heads, head_dim)
    index, qkv = empty(4, dtype=LONG), empty(4, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    place = (empty(100, rotary, dtype=FULL), index, index, index, cache, cache, heads, kv_heads, head_dim)
    norm = empty(head_dim, dtype=dtype)
    rope_kv_write_triton(qkv, *place, norm, norm, 1e-6, scales=scales)


def encoded(dtype: torch.dtype, kv_heads: int, head_dim: int, kind: torch.dtype = torch.int8) -> None:
    """Writes of keys and values alone."""
    cache, scales = narrow_cache(kind, kv_heads, head_dim)
    index, kv = empty(4, dtype=LONG), empty(4, 2 * kv_heads * head_dim, dtype=dtype)
    rope_kv_write_triton(kv, None, index, index, index, cache, cache, 0, kv_heads, head_dim, scales=scales)


def invariant(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, kind: torch.dtype = torch.int8
) -> None:
    """Batch-invariant attention over a cache in 8 bits: decodes and prompts."""
    cache, scales = narrow_cache(kind, kv_heads, head_dim)
    place = (cache, cache, empty(4, 64, dtype=torch.int32), empty(5, dtype=torch.int32))
    for queries in (1, 512):
        q, lengths = empty(4 * queries, heads, head_dim, dtype=dtype), empty(4, dtype=torch.int32)
        invariant_attention_triton(q, *place, lengths, queries, 4096, 0.1, scales=scales)


CACHE_CASES: dict[str, Callable[[], Any]] = {
    "int8 cache 32x128 fp16 alone": lambda: attention(HALF, 32, 32, 128, 1),
    "int8 cache 32x128 fp16 of 64": lambda: attention(HALF, 32, 32, 128, 64),
    "int8 cache 32x128 bf16 of 8": lambda: attention(BRAIN, 32, 32, 128, 8, 64),
    "int8 cache 32/8x128 fp16 alone": lambda: attention(HALF, 32, 8, 128, 1, 512),
    "int8 cache 32/8x128 bf16 of 8": lambda: attention(BRAIN, 32, 8, 128, 8),
    "int8 cache 32/8x128 fp16 of 64": lambda: attention(HALF, 32, 8, 128, 64, 16),
    "int8 cache 28/4x80 bf16 window": lambda: attention(BRAIN, 28, 4, 80, 8, 512, 256, 16),
    "int8 cache 16x80 fp16 window": lambda: attention(HALF, 16, 16, 80, 8, 512, 256, 16),
    "int8 cache 12x64 fp32": lambda: attention(FULL, 12, 12, 64, 4, 512),
    "int8 cache 14/2x64 fp32": lambda: attention(FULL, 14, 2, 64, 4, 512),
    "int8 cache 8x256 bf16": lambda: attention(BRAIN, 8, 8, 256, 4, 512),
    "int8 cache 16/8x256 fp16": lambda: attention(HALF, 16, 8, 256, 16, 512),
    "int8 cache 6x64 fp16 no queries": lambda: encoded(HALF, 6, 64),
    "int8 cache 8/2x64 fp32 half turned": lambda: written(FULL, 8, 2, 64, 32),
    "int8 cache 8/2x64 fp16 half turned": lambda: written(HALF, 8, 2, 64, 32),
    "int8 cache 16x80 bf16 all turned": lambda: written(BRAIN, 16, 16, 80, 80),
    "int8 cache invariant 32x128 fp16": lambda: invariant(HALF, 32, 32, 128),
    "int8 cache invariant 32/8x128 bf16": lambda: invariant(BRAIN, 32, 8, 128),
    "int8 cache invariant 12x64 fp32": lambda: invariant(FULL, 12, 12, 64),
}

CACHE_OVERLAPPING: dict[str, Callable[[], Any]] = {  # sm_90 and later
    "int8 cache 32x128 fp16 of 64 fetching early": lambda: attention(HALF, 32, 32, 128, 64, overlap=4),
    "int8 cache 32x128 fp16 alone fetching early": lambda: attention(HALF, 32, 32, 128, 1, overlap=4),
    "int8 cache 32/8x128 bf16 of 64 fetching early": lambda: attention(BRAIN, 32, 8, 128, 64, overlap=4),
    "int8 cache 32x80 bf16 two fetching early": lambda: attention(BRAIN, 32, 32, 80, 2, overlap=4),
    "fp8 cache 32x128 fp16 alone": lambda: attention(HALF, 32, 32, 128, 1, kind=E4M3),
    "fp8 cache 32/8x128 bf16 of 8": lambda: attention(BRAIN, 32, 8, 128, 8, kind=E4M3),
    "fp8 cache 32x128 fp16 of 64": lambda: attention(HALF, 32, 32, 128, 64, kind=E4M3),
    "fp8 cache 28/4x80 bf16 window": lambda: attention(BRAIN, 28, 4, 80, 8, 512, 256, 16, kind=E4M3),
    "fp8 cache 12x64 fp32": lambda: attention(FULL, 12, 12, 64, 4, 512, kind=E4M3),
    "fp8 cache 14/2x64 fp32": lambda: attention(FULL, 14, 2, 64, 4, 512, kind=E4M3),
    "fp8 cache 16/8x256 fp16": lambda: attention(HALF, 16, 8, 256, 16, 512, kind=E4M3),
    "fp8 cache 6x64 fp16 no queries": lambda: encoded(HALF, 6, 64, E4M3),
    "fp8 cache 8/2x64 fp32 half turned": lambda: written(FULL, 8, 2, 64, 32, E4M3),
    "fp8 cache 16x80 bf16 all turned": lambda: written(BRAIN, 16, 16, 80, 80, E4M3),
    "fp8 cache invariant 32x128 fp16": lambda: invariant(HALF, 32, 32, 128, E4M3),
    "fp8 cache invariant 32/8x128 bf16": lambda: invariant(BRAIN, 32, 8, 128, E4M3),
    "fp8 cache invariant 12x64 fp32": lambda: invariant(FULL, 12, 12, 64, E4M3),
    "fp8 cache 32x128 fp16 of 64 early": lambda: attention(HALF, 32, 32, 128, 64, overlap=4, kind=E4M3),
    "fp8 cache 32x128 bf16 alone early": lambda: attention(BRAIN, 32, 32, 128, 1, overlap=4, kind=E4M3),
}
