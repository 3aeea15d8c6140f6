"""Prefill attention in PyTorch: the kernel's twin, request by request.

out = prefill_attention_reference(q, keys, values, block_tables, query_start, seq_lens, 512, 128**-0.5)
"""

from __future__ import annotations

import torch

from ingot.kernels.attention.int8_heads import OutScales, put_heads, scales_at
from ingot.kernels.attention.scores import plain_attention
from ingot.kernels.cache.scales import CacheScales, gather_pair

NO_TILE = 2**20  # in a list of tiles: beyond every request


def prefill_attention_reference(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    window: int = 0,
    out: torch.Tensor | None = None,
    out_scales: OutScales | None = None,
    scales: CacheScales | None = None,
    steady: bool = False,
    softcap: float = 0.0,
    tile_list: torch.Tensor | None = None,
) -> torch.Tensor:
    """Arguments as in :func:`prefill_attention`. Each request sees exactly its own keys."""
    if tile_list is not None:
        listed = [request for request, tile, *_ in tile_list.tolist() if tile < NO_TILE]
        first = min(listed, default=len(seq_lens))
        block_tables, seq_lens, query_start = block_tables[first:], seq_lens[first:], query_start[first:]
    if out_scales is not None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        arguments = (q, key_cache, value_cache, block_tables, query_start, seq_lens, max_query_len)
        attended = prefill_attention_reference(
            *arguments, scale, window, scales=scales, steady=steady, softcap=softcap
        )
        own = slice(int(query_start[0]), int(query_start[-1]))
        put_heads(attended[own], out[own], scales_at(out_scales, own))
        return out
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    starts, group = query_start.tolist(), q.shape[1] // key_cache.shape[1]
    dtype = torch.float64 if steady else q.dtype
    for row, length in enumerate(seq_lens.tolist()):
        begin, stop = starts[row], starts[row + 1]
        context = length - (stop - begin)  # position of the first new token
        if length == 0 or begin == stop:
            out[begin:stop] = 0
            continue
        first = max(context - window + 1, 0) if window else 0
        where = (block_tables[row], first, length, q.dtype)
        keys, values = (t.to(dtype) for t in gather_pair(key_cache, value_cache, scales, *where))
        grouped = q[begin:stop].to(dtype).unflatten(1, (-1, group)).permute(1, 2, 0, 3)  # [KV, group, n, D]
        plain = stop - begin == 1 or (context == 0 and window == 0)
        attended = plain_attention(
            grouped,
            keys[:, None],
            values[:, None],
            scale,
            softcap,
            None if plain else _visible(context, first, length, window, q.device),
            causal=plain and context == 0,
        )
        out[begin:stop] = attended.permute(2, 0, 1, 3).flatten(1, 2)
    return out


def _visible(context: int, first: int, length: int, window: int, device: torch.device) -> torch.Tensor:
    """[length - context, length - first] bool: which keys each new token sees."""
    queries = torch.arange(context, length, device=device)[:, None]
    keys = torch.arange(first, length, device=device)[None, :]
    seen = keys <= queries
    return seen & (keys > queries - window) if window else seen
