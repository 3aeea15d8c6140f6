"""Paged caches with known contents, and attention in float64 over the same contents laid out plainly.

case = paged_case([5, 0, 17], kv_heads=2, head_dim=64, block_size=16, dtype=torch.float16)
expected = attention64(q, case.keys[0], case.values[0], positions, scale, window)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.kernels.numerics import normal


@dataclass
class PagedCase:
    """Keys and values of each request, [length, kv_heads, head_dim], and the same in a paged cache."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor


def paged_case(
    lengths: list[int],
    *,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
) -> PagedCase:
    """Scatter requests over shuffled blocks; every slot and table entry that no request owns leads to NaN."""
    needed = [-(-length // block_size) for length in lengths]
    num_blocks = sum(needed) + 1
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
    shape = (num_blocks, kv_heads, block_size, head_dim)
    nan = float("nan")
    caches = [torch.full(shape, nan, dtype=dtype, device=device) for _ in range(2)]
    tables = torch.zeros(len(lengths), max(needed, default=0) + 2, dtype=torch.int32)  # block 0 is all NaN
    dense: list[list[torch.Tensor]] = [[], []]
    taken = 0
    for request, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        blocks = order[taken : taken + count]
        tables[request, :count] = blocks.int()
        for which, cache in enumerate(caches):
            tokens = normal(
                length, kv_heads, head_dim, dtype=dtype, device=device, seed=seed + 2 * request + which + 1
            )
            for index, block in enumerate(blocks.tolist()):
                piece = tokens[index * block_size : (index + 1) * block_size]
                cache[block, :, : len(piece)] = piece.transpose(0, 1)
            dense[which].append(tokens)
        taken += count
    return PagedCase(
        dense[0],
        dense[1],
        caches[0],
        caches[1],
        tables.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def attention64(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Float64 attention of q [n, heads, D], each query seeing the keys at or before its position [n]."""
    group = q.shape[1] // keys.shape[1]
    k = keys.double().repeat_interleave(group, dim=1)
    v = values.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    token = torch.arange(len(keys), device=q.device)
    hidden = token[None, :] > positions[:, None]
    if window:
        hidden |= token[None, :] <= positions[:, None] - window
    scores.masked_fill_(hidden, float("-inf"))
    return torch.einsum("hnl,lhd->nhd", scores.softmax(dim=-1), v)
