"""What launchers check of a paged KV cache before they touch memory.

Owns the checks of shapes, layouts and scales. Knows no op.

    expect_cache(key_cache, value_cache, num_kv_heads, head_dim, like=q, scales=scales)
"""

from __future__ import annotations

import torch

from ingot.kernels.cache.cache_scales import NARROW_CACHES, CacheScales
from ingot.kernels.checks import KernelArgumentError, expect


def expect_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int | None,
    head_dim: int,
    like: torch.Tensor,
    scales: CacheScales | None = None,
) -> None:
    """Raise unless both are paged caches [num_blocks, num_kv_heads, block_size, head_dim] of one layout: in
    the dtype of ``like``, or contiguous and in 8 bits with scales.
    """
    dtype = like.dtype if scales is None else key_cache.dtype
    if scales is not None and dtype not in NARROW_CACHES.values():
        allowed = ", ".join(map(str, NARROW_CACHES.values()))
        raise KernelArgumentError("key_cache has the wrong dtype", seen=dtype, allowed=allowed)
    expect("key_cache", key_cache, (None, num_kv_heads, None, head_dim), like=like, dtype=dtype)
    expect("value_cache", value_cache, tuple(key_cache.shape), like=like, dtype=dtype)
    if scales is not None:
        whole = {"key_cache": key_cache, "key scales": scales.keys, "value scales": scales.values}
        for name in ("key scales", "value scales"):
            shape = tuple(key_cache.shape[:3])
            expect(name, whole[name], shape, like=like, dtype=torch.float32)
        for name, tensor in whole.items():
            if not tensor.is_contiguous():
                raise KernelArgumentError(f"{name} is not contiguous", seen=tensor.stride())
    if key_cache.stride() != value_cache.stride():
        raise KernelArgumentError(
            "key_cache and value_cache differ in layout",
            seen=value_cache.stride(),
            allowed=key_cache.stride(),
        )
