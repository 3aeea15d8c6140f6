"""What kernels do for Gemma-2 and 3 alone, as ``compile_kernels.py`` takes launches: softcaps, GELU,
post-norms, wide head norms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ingot.kernels.activation.gated_mlp import silu_mul
from ingot.kernels.activation.silu_mul_int8 import silu_mul_int8
from ingot.kernels.activation.softcap import softcap
from ingot.kernels.norm.post_norm import post_norm
from ingot.kernels.norm.rms_norm import rms_norm
from ingot.kernels.rows.row_endings import AS_THEY_ARE, InInt8, OperandOrder
from tests.kernels.compile_block_cases import block_steps
from tests.kernels.compile_cache_cases import narrow_cache
from tests.kernels.compile_cases import BRAIN, FULL, HALF, empty
from tests.kernels.flat_calls import (
    invariant_attention_triton,
    paged_attention_triton,
    prefill_attention_triton,
    rope_kv_write_triton,
)
from tests.kernels.numerics import launched

CAP = 50.0


def decode(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    batch: int = 4,
    overlap: int = 1,
) -> None:
    cache = empty(100, kv_heads, 64, head_dim, dtype=dtype)
    tables, lengths = empty(batch, 64, dtype=torch.int32), empty(batch, dtype=torch.int32)
    q = empty(batch, heads, head_dim, dtype=dtype)
    place = (q, cache, cache, tables, lengths, 0.1, 4096, window, {"OVERLAP": overlap})
    paged_attention_triton(*place, softcap=CAP)


def prompts(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int, longest: int) -> None:
    """By the prefill kernel, and by the invariant one, which decodes, too."""
    cache = empty(100, kv_heads, 64, head_dim, dtype=dtype)
    tables, lengths = empty(4, 64, dtype=torch.int32), empty(4, dtype=torch.int32)
    place = (cache, cache, tables, empty(5, dtype=torch.int32), lengths)
    q = empty(4 * longest, heads, head_dim, dtype=dtype)
    prefill_attention_triton(q, *place, longest, 0.1, window, softcap=CAP)
    for queries in (1, longest):
        q = empty(4 * queries, heads, head_dim, dtype=dtype)
        invariant_attention_triton(q, *place, queries, 4096, 0.1, window, softcap=CAP)


def norms(dtype: torch.dtype, hidden: int) -> None:
    x, weight = empty(4, hidden, dtype=dtype), empty(hidden, dtype=FULL)
    launched(rms_norm)(x, weight, 1e-6, x)
    for ending in (AS_THEY_ARE, OperandOrder(), InInt8(), block_steps(hidden, 128, 8)):
        launched(post_norm)(x, x, weight, weight, 1e-6, ending=ending)


def branch_norms(overlap: int) -> None:
    x, weight = empty(4, 3584, dtype=BRAIN), empty(3584, dtype=FULL)
    launched(post_norm)(x, x, weight, weight, 1e-6, {"OVERLAP": overlap})


def gates(dtype: torch.dtype, inner: int) -> None:
    x = empty(4, 2 * inner, dtype=dtype)
    launched(silu_mul)(x, activation="gelu_tanh")
    launched(silu_mul_int8)(x, activation="gelu_tanh")


def heads(dtype: torch.dtype, num_heads: int, kv_heads: int, head_dim: int, *, narrow: bool = False) -> None:
    """Queries and keys normed by weights in fp32, and rotated."""
    width, index = (num_heads + 2 * kv_heads) * head_dim, empty(4, dtype=torch.int64)
    cache, scales = empty(100, kv_heads, 64, head_dim, dtype=dtype), None
    if narrow:
        cache, scales = narrow_cache(torch.int8, kv_heads, head_dim)
    table, weight = empty(4096, head_dim, dtype=FULL), empty(head_dim, dtype=FULL)
    place = (table, index, index, index, cache, cache, num_heads, kv_heads, head_dim)
    rope_kv_write_triton(empty(4, width, dtype=dtype), *place, weight, weight, 1e-6, scales=scales)


GEMMA2_CASES: dict[str, Callable[[], Any]] = {
    "capped decode 16/8x256 bf16": lambda: decode(BRAIN, 16, 8, 256, 0),
    "capped decode 16/8x256 bf16 window of 64": lambda: decode(BRAIN, 16, 8, 256, 2048, 64),
    "capped decode 32x128 fp16": lambda: decode(HALF, 32, 32, 128, 0),
    "capped prompts 16/8x256 bf16": lambda: prompts(BRAIN, 16, 8, 256, 0, 512),
    "capped prompts window 32/16x128 fp16": lambda: prompts(HALF, 32, 16, 128, 300, 512),
    "wide norms 3584 bf16": lambda: norms(BRAIN, 3584),
    "wide norms 2304 fp16": lambda: norms(HALF, 2304),
    "wide head norms 8/4x256 bf16": lambda: heads(BRAIN, 8, 4, 256),
    "wide head norms 4/1x256 fp16 int8 cache": lambda: heads(HALF, 4, 1, 256, narrow=True),
    "gelu gates 14336 bf16": lambda: gates(BRAIN, 14336),
    "softcap 8 of 256000 bf16": lambda: launched(softcap)(empty(8, 256000, dtype=BRAIN), 30.0),
}
GEMMA2_OVERLAPPING: dict[str, Callable[[], Any]] = {
    "capped decode 16/8x256 bf16 fetching early": lambda: decode(BRAIN, 16, 8, 256, 2048, 1, 4),
    "post-norm 3584 bf16 overlapping": lambda: branch_norms(2),
}
