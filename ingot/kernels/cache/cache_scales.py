"""A KV cache in 8 bits: its scales, its dtypes, and the rule by which keys and values are quantized.

Each token's head of keys, and of values, has a scale. int8 follows int8_rows.py; in e4m3 (1 sign, 4 exponent,
3 fraction bits; "FP8 formats for deep learning", Micikevicius et al., 2022) the largest magnitude m becomes
448: the scale is m / 448 and values are x · (448 / m), rounded to the nearest, ties to even. Kernels that
write or read such a cache are tested against this file.

    scales = CacheScales.zeros(num_blocks, num_kv_heads, block_size, device)
    write_tokens(key_cache, scales.keys, blocks, offsets, k)     # quantized where there are scales

keys = key_cache · scales.keys, value by value: exact in fp32, rounded once in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ingot.kernels.rows.int8_rows import E4M3, quantize_rows

NARROW_CACHES = {"int8": torch.int8, "fp8": E4M3}  # dtypes of caches in 8 bits, by the user's words
SCALE_BYTES = 4  # fp32; 16 bits would round a scale after its values were chosen


@dataclass(frozen=True, slots=True)
class CacheScales:
    """fp32 [num_blocks, num_kv_heads, block_size], contiguous: one scale per token and head."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def zeros(cls, num_blocks: int, num_kv_heads: int, block_size: int, device: torch.device) -> CacheScales:
        """The scales of an empty cache."""
        shape = (num_blocks, num_kv_heads, block_size)
        return cls(*(torch.zeros(shape, dtype=torch.float32, device=device) for _ in range(2)))

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of keys and of values."""
        return self.keys, self.values


def quantize_heads(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads x [..., head_dim] of any float dtype → values in ``dtype`` (int8, e4m3), fp32 scales [...]."""
    rows = quantize_rows(x.reshape(-1, x.shape[-1]), dtype=dtype)
    return rows.values.view(x.shape), rows.scales.view(x.shape[:-1])


def dequantize_heads(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values [..., head_dim] times scales [...], rounded to ``dtype``."""
    return (values.float() * scales[..., None]).to(dtype)


def write_tokens(
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
    x: torch.Tensor,
) -> None:
    """Write x [n, num_kv_heads, head_dim] at these blocks and offsets [n]; with scales in 8 bits."""
    if scales is None:
        cache[blocks, :, offsets] = x.to(cache.dtype)
    else:
        cache[blocks, :, offsets], scales[blocks, :, offsets] = quantize_heads(x, cache.dtype)
