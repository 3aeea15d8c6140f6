"""Paged caches in 8 bits, and what their numbers mean.

wide = paged_case([5, 0, 17], kv_heads=2, head_dim=64, block_size=16, dtype=torch.float16)
narrow = narrow_case(wide, torch.int8)
expected = attention64(q, narrow.keys[0], narrow.values[0], positions, scale)
op(q, narrow.key_cache, narrow.value_cache, ..., scales=narrow.scales)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ingot.kernels.cache.cache_scales import CacheScales, dequantize_heads, quantize_heads
from tests.kernels.paged_case import PagedCase


@dataclass
class NarrowCase(PagedCase):
    """A case whose caches are in 8 bits; ``keys`` and ``values`` are float64 of what they mean."""

    scales: CacheScales


def narrow_case(case: PagedCase, dtype: torch.dtype, sizes: tuple[float, float] = (1.0, 1.0)) -> NarrowCase:
    """The same requests, quantized to ``dtype``; slots that no request owns hold the byte 127 (no number in
    e4m3) and a scale that is no number.

    Keys and values are multiplied by ``sizes`` first; each token and head also by a size of its own, over
    four powers of ten.
    """
    found = [
        _narrow(cache, dtype, size)
        for cache, size in zip((case.key_cache, case.value_cache), sizes, strict=True)
    ]
    dense = []
    for (numbers, scales), tokens in zip(found, (case.keys, case.values), strict=True):
        means = dequantize_heads(numbers, scales, torch.float32).double()
        flat = means.transpose(1, 2).flatten(0, 1)  # [num_blocks * block_size, kv_heads, head_dim]
        dense.append([flat[_slots(case, row, len(own))] for row, own in enumerate(tokens)])
    (keys, key_scales), (values, value_scales) = found
    scales = CacheScales(key_scales, value_scales)
    return NarrowCase(dense[0], dense[1], keys, values, case.block_tables, case.seq_lens, scales)


def _narrow(cache: torch.Tensor, dtype: torch.dtype, size: float) -> tuple[torch.Tensor, torch.Tensor]:
    owned = cache.isfinite().all(dim=-1)
    own = torch.logspace(-2, 0, math.prod(cache.shape[:3])).reshape(cache.shape[:3]).to(cache.device)
    numbers, scales = quantize_heads(cache.float().nan_to_num() * own[..., None] * size, dtype)
    numbers.view(torch.int8)[~owned] = 127
    scales[~owned] = math.nan
    return numbers, scales


def _slots(case: PagedCase, row: int, length: int) -> torch.Tensor:
    block_size = case.key_cache.shape[2]
    tokens = torch.arange(length, device=case.block_tables.device)
    return case.block_tables[row].long()[tokens // block_size] * block_size + tokens % block_size
