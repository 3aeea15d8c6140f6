"""The PyTorch reference of prefill attention, request by request.

out = prefill_attention_reference(q, cache, sequences, Scoring(128**-0.5))
"""

from __future__ import annotations

import torch

from ingot.kernels.attention.attention_arguments import (
    PLAIN_OUTPUT,
    AttentionOutput,
    Scoring,
    Sequences,
    TileList,
)
from ingot.kernels.attention.int8_heads import put_heads, scales_at
from ingot.kernels.attention.score_exponents import plain_attention
from ingot.kernels.cache.paged_cache import PagedCache

NO_TILE = 2**20  # in a list of tiles: past every request


def prefill_attention_reference(
    q: torch.Tensor,
    cache: PagedCache,
    sequences: Sequences,
    scoring: Scoring,
    output: AttentionOutput = PLAIN_OUTPUT,
    listed: TileList | None = None,
) -> torch.Tensor:
    """Arguments as in :func:`prefill_attention`."""
    block_tables, seq_lens, _, query_start, _ = sequences
    assert query_start is not None
    out, out_scales, steady = output
    if listed is not None:
        rows = [request for request, tile, *_ in listed.tiles.tolist() if tile < NO_TILE]
        first = min(rows, default=len(seq_lens))
        block_tables, seq_lens, query_start = block_tables[first:], seq_lens[first:], query_start[first:]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if out_scales is not None:
        own = slice(int(query_start[0]), int(query_start[-1]))
        wide = AttentionOutput(steady=steady)
        attended = prefill_attention_reference(q, cache, sequences, scoring, wide, listed)
        put_heads(attended[own], out[own], scales_at(out_scales, own))
        return out
    scale, window, softcap = scoring
    starts, group = query_start.tolist(), q.shape[1] // cache.num_kv_heads
    dtype = torch.float64 if steady else q.dtype
    for row, length in enumerate(seq_lens.tolist()):
        begin, stop = starts[row], starts[row + 1]
        context = length - (stop - begin)  # position of the first new token
        if length == 0 or begin == stop:
            out[begin:stop] = 0
            continue
        first = max(context - window + 1, 0) if window else 0
        keys, values = (t.to(dtype) for t in cache.gather(block_tables[row], first, length, q.dtype))
        grouped = q[begin:stop].to(dtype).unflatten(1, (-1, group)).permute(1, 2, 0, 3)  # [KV, group, n, D]
        plain, mask = stop - begin == 1 or (context == 0 and window == 0), None
        if not plain:
            asking = torch.arange(context, length, device=q.device)[:, None]
            asked = torch.arange(first, length, device=q.device)[None, :]
            mask = (asked <= asking) & (asked > asking - window) if window else asked <= asking
        pair, causal = (keys[:, None], values[:, None]), plain and context == 0
        attended = plain_attention(grouped, *pair, scale, softcap, mask, causal=causal)
        out[begin:stop] = attended.permute(2, 0, 1, 3).flatten(1, 2)
    return out
