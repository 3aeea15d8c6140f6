"""The paged KV cache of a layer: blocks of keys and values, and their scales in 8 bits.

cache = PagedCache(keys, values)                     # or with CacheScales, in 8 bits
keys, values = cache.gather(table, 0, 17, dtype)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ingot.kernels.cache.cache_scales import NARROW_CACHES, CacheScales, dequantize_heads
from ingot.kernels.kernel_checks import KernelArgumentError, expect, expect_contiguous


@dataclass
class PagedCache:
    """Keys and values of one layer.

    Attributes:
        keys, values: [num_blocks, num_kv_heads, block_size, head_dim] with the same strides, in the model's
            dtype, or contiguous int8 or e4m3 with ``scales``.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: CacheScales | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Keys, values and scales; the first dimension of each is the block."""
        return (self.keys, self.values, *(() if self.scales is None else self.scales.tensors))

    @property
    def pointers(self) -> tuple[Any, Any, Any, Any]:
        """Keys, values and their scales or None: a kernel's arguments."""
        scales = self.scales
        return (self.keys, self.values, *((None, None) if scales is None else (scales.keys, scales.values)))

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.keys.shape[2]

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads."""
        return self.keys.shape[1]

    def expect(self, num_kv_heads: int | None, head_dim: int, like: torch.Tensor) -> None:
        """Raise unless a kernel can take the cache beside ``like``, whose dtype a cache without scales has;
        None: any number of heads.
        """
        keys, values, scales = self.keys, self.values, self.scales
        dtype = like.dtype if scales is None else keys.dtype
        if scales is not None and dtype not in NARROW_CACHES.values():
            allowed = ", ".join(map(str, NARROW_CACHES.values()))
            raise KernelArgumentError("key_cache has the wrong dtype", seen=dtype, allowed=allowed)
        expect("key_cache", keys, (None, num_kv_heads, None, head_dim), like=like, dtype=dtype)
        expect("value_cache", values, tuple(keys.shape), like=like, dtype=dtype)
        if scales is not None:
            whole = {"key_cache": keys, "key scales": scales.keys, "value scales": scales.values}
            for name in ("key scales", "value scales"):
                expect(name, whole[name], tuple(keys.shape[:3]), like=like, dtype=torch.float32)
            for name, tensor in whole.items():
                expect_contiguous(name, tensor)
        if keys.stride() != values.stride():
            raise KernelArgumentError(
                "key_cache and value_cache differ in layout", seen=values.stride(), allowed=keys.stride()
            )

    def gather(
        self, table: torch.Tensor, start: int, end: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [num_kv_heads, end - start, head_dim] of tokens ``start`` to ``end`` of the request
        with this ``table`` [max_blocks]; of a cache in 8 bits dequantized to ``dtype``.
        """
        keys, values = (gather_tokens(cache, table, start, end) for cache in (self.keys, self.values))
        if self.scales is None:
            return keys, values
        own = [gather_tokens(scale, table, start, end) for scale in self.scales.tensors]
        return dequantize_heads(keys, own[0], dtype), dequantize_heads(values, own[1], dtype)


def gather_tokens(cache: torch.Tensor, table: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Tokens ``start`` to ``end`` of one request, [num_kv_heads, end - start, ...], of a ``cache``
    [num_blocks, num_kv_heads, block_size, ...]; ``table`` [max_blocks] int32 are its blocks in order.
    """
    block_size = cache.shape[2]
    first_block = start // block_size
    wanted = table[first_block : -(-end // block_size)].tolist()
    if wanted and wanted == list(range(wanted[0], wanted[0] + len(wanted))):  # a view, no copy
        blocks = cache[wanted[0] : wanted[0] + len(wanted)]
    else:
        blocks = cache[wanted]  # [n, num_kv_heads, block_size, ...]
    tokens = blocks.transpose(0, 1).flatten(1, 2)  # [num_kv_heads, n * block_size, ...]
    return tokens[:, start - first_block * block_size : end - first_block * block_size]
