"""Launches of Hopper's prompt attention on meta tensors, as in compile_cases.py.

HOPPER_CASES["hopper 32/8x128 bf16"]()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ingot.kernels.attention.attention_arguments import AttentionOutput, Scoring, Sequences, TileList
from ingot.kernels.attention.encoder_attention import encoder_attention
from ingot.kernels.attention.hopper_attention import hopper_attention
from ingot.kernels.cache.cache_scales import E4M3
from ingot.kernels.cache.paged_cache import PagedCache
from tests.kernels.compile_cache_cases import narrow_cache
from tests.kernels.compile_cases import BRAIN, HALF, empty, in_8
from tests.kernels.numerics import launched


def attention(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int = 128,
    kind: torch.dtype | None = None,
    block_size: int = 64,
    window: int = 0,
    softcap: float = 0.0,
    listed: bool = False,
    to_8_bits: bool = False,
) -> None:
    """Two prompts, perhaps as a list of tiles."""
    keys, scales = empty(100, kv_heads, block_size, head_dim, dtype=dtype), None
    if kind is not None:
        keys, scales = narrow_cache(kind, kv_heads, head_dim, block_size)
    q, index = empty(4096, heads, head_dim, dtype=dtype), empty(3, dtype=torch.int32)
    tiles = TileList(empty(40, 4, dtype=torch.int32)) if listed else None
    output = AttentionOutput(*in_8(q)) if to_8_bits else AttentionOutput()
    sequences = Sequences(empty(2, 64, dtype=torch.int32), index[:2], 4096, index, 2048)
    hopper_attention(
        q, PagedCache(keys, keys, scales), sequences, Scoring(0.1, window, softcap), output, tiles
    )


def windows(dtype: torch.dtype, inputs: int, heads: int) -> None:
    launched(encoder_attention)(empty(inputs * 1500, 192 * heads, dtype=dtype), inputs, heads)


WINDOW_CASES: dict[str, Callable[[], Any]] = {  # sm_90 alone
    "windows 8x20x64 fp16": lambda: windows(HALF, 8, 20),
    "windows 1x20x64 bf16": lambda: windows(BRAIN, 1, 20),
}
HOPPER_CASES: dict[str, Callable[[], Any]] = {  # sm_90 alone
    "hopper 32/8x128 bf16": lambda: attention(BRAIN, 32, 8),
    "hopper 32x128 fp16 window": lambda: attention(HALF, 32, 32, window=100),
    "hopper 16/8x128 fp16 softcap, small blocks": lambda: attention(HALF, 16, 8, block_size=16, softcap=50.0),
    "hopper 32/8x128 fp16 listed, to 8 bits": lambda: attention(HALF, 32, 8, listed=True, to_8_bits=True),
    "hopper 12x64 bf16 large blocks": lambda: attention(BRAIN, 12, 12, 64, block_size=256),
    "hopper int8 cache 32/8x128 bf16": lambda: attention(BRAIN, 32, 8, kind=torch.int8),
    "hopper int8 cache 32x128 fp16 window": lambda: attention(
        HALF, 32, 32, kind=torch.int8, window=100, to_8_bits=True
    ),
    "hopper fp8 cache 32/8x128 fp16": lambda: attention(HALF, 32, 8, kind=E4M3),
    "hopper fp8 cache 14/2x64 bf16": lambda: attention(BRAIN, 14, 2, 64, kind=E4M3, block_size=16),
}
