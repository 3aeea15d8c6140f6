"""The checks that every attention launcher makes of its arguments.

Owns what queries, caches, tables and lengths must be. Knows no kernel.

    expect_attention(q, key_cache, value_cache, block_tables, seq_lens, scales, window, softcap)
"""

from __future__ import annotations

import math

import torch

from ingot.kernels.cache.scales import CacheScales, expect_cache
from ingot.kernels.checks import (
    KernelArgumentError,
    expect,
    expect_float,
    expect_group,
    expect_heads,
    expect_range,
)


def expect_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scales: CacheScales | None,
    window: int,
    softcap: float,
    batch: int | None = None,
) -> None:
    """Raise unless a kernel can take these; ``batch`` None: as many requests as ``seq_lens`` has."""
    expect_float("q", q)
    expect_heads("q", q, like=q)
    expect_cache(key_cache, value_cache, None, q.shape[2], like=q, scales=scales)
    expect_group(q.shape[1], key_cache.shape[1])
    if batch is None:
        batch = seq_lens.shape[0] if seq_lens.dim() else 0
    expect("seq_lens", seq_lens, (batch,), like=q, dtype=torch.int32)
    expect("block_tables", block_tables, (batch, None), like=q, dtype=torch.int32)
    expect_range("window", window, 0)
    if not 0 <= softcap < math.inf:
        raise KernelArgumentError("softcap is out of range", seen=softcap, allowed="0 for none, or positive")


def expect_queries(q: torch.Tensor, query_start: torch.Tensor, requests: int, max_query_len: int) -> None:
    """Raise unless ``query_start`` can say where each request's new tokens are."""
    expect("query_start", query_start, (requests + 1,), like=q, dtype=torch.int32)
    expect_range("max_query_len", max_query_len, 0, None)
