"""Launchers of kernels with numbers by blocks of columns (RPTQ) on meta tensors, as in compile_cases.py.

BLOCK_CASES["blocks 1 fp16"]()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ingot.kernels.activation.silu_mul_blocks import in_blocks, silu_mul_in_blocks
from ingot.kernels.norm.rms_norm import rms_norm
from ingot.kernels.norm.sum_norm import sum_norm
from ingot.kernels.product.int8.int8_linear import int8_linear, int8_linear_parts
from ingot.kernels.rows.block_rows import BlockSteps
from tests.kernels.compile_cases import BRAIN, FULL, HALF, empty
from tests.kernels.compile_int8_cases import weight_in_8
from tests.kernels.flat_calls import paged_attention_triton, prefill_attention_triton
from tests.kernels.numerics import launched


def block_steps(width: int, block: int, bits: int = 8, ordered: bool = False) -> BlockSteps:
    """Empty ones."""
    blocks = -(-width // block)
    order = empty(width, dtype=torch.int32) if ordered else None
    return BlockSteps(empty(blocks, dtype=FULL), empty(blocks, dtype=FULL), block, bits, order)


def by_blocks(dtype: torch.dtype, rows: int, block: int = 128, bits: int = 8, **tiles: int) -> None:
    """Every kernel that ends in numbers by blocks, and the products of them."""
    x, norm = empty(rows, 4096, dtype=dtype), empty(4096, dtype=dtype)
    ordered, plain = block_steps(4096, block, bits, True), block_steps(4096, block, bits)
    x8, _ = launched(rms_norm)(x, norm, 1e-6, x, tiles, ordered)
    launched(rms_norm)(x, norm, 1e-6, None, tiles, plain)
    launched(in_blocks)(x, ordered, tiles)
    launched(in_blocks)(x, plain, tiles)
    inner = launched(silu_mul_in_blocks)(
        empty(rows, 22016, dtype=dtype), block_steps(11008, block, bits), tiles
    )
    launched(int8_linear)(x8, weight_in_8(12288, 4096), dtype, empty(12288, dtype=FULL))
    shift = empty(4096, dtype=FULL)
    launched(int8_linear)(inner, weight_in_8(4096, 11008), dtype, shift, x, x)


def wide(dtype: torch.dtype) -> None:
    """Norms of the widest rows, whose order is gathered."""
    x, norm = empty(4, 16384, dtype=dtype), empty(16384, dtype=dtype)
    steps = block_steps(16384, 128, 8, True)
    launched(rms_norm)(x, norm, 1e-6, x, None, steps)
    parts, shift = empty(8, 4, 16384, dtype=FULL), empty(16384, dtype=FULL)
    launched(sum_norm)(parts, x, norm, 1e-6, shift, None, steps)


def split(dtype: torch.dtype, rows: int, block: int = 128, bits: int = 8, **tiles: int) -> None:
    """Output and down products of a decode step, in parts, and the norms that add them up."""
    x, norm, shift = empty(rows, 4096, dtype=dtype), empty(4096, dtype=dtype), empty(4096, dtype=FULL)
    early = {"OVERLAP": tiles.get("OVERLAP", 1)}
    for width, ordered in ((4096, True), (11008, False)):
        values = empty(rows, width, dtype=torch.int8)
        x8 = block_steps(width, block, bits).rows(values)
        parts = launched(int8_linear_parts)(x8, weight_in_8(4096, width), tiles)
        assert isinstance(parts, torch.Tensor)
        assert len(parts) > 1
        steps = block_steps(4096, block, bits, ordered)
        launched(sum_norm)(parts, x, norm, 1e-6, shift, early, steps)


def attention(
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    block: int,
    bits: int = 8,
    batch: int = 8,
    longest: int = 2048,
    window: int = 0,
    **tiles: int,
) -> None:
    """A step of decodes and one of prompts that end in numbers; ``heads`` of queries and of keys."""
    cache, steps = (
        empty(100, heads[1], 64, head_dim, dtype=dtype),
        block_steps(heads[0] * head_dim, block, bits),
    )
    place = (cache, cache, empty(batch, 64, dtype=torch.int32))
    lengths, bounds = empty(batch, dtype=torch.int32), empty(batch + 1, dtype=torch.int32)
    q = empty(batch, heads[0], head_dim, dtype=dtype)
    out = empty(*q.shape, dtype=torch.int8)
    paged_attention_triton(q, *place, lengths, 0.1, 4096, window, tiles, out, None, steps)
    q = empty(batch * longest, heads[0], head_dim, dtype=dtype)
    out = empty(*q.shape, dtype=torch.int8)
    prefill_attention_triton(q, *place, bounds, lengths, longest, 0.1, window, None, out, steps)


BLOCK_CASES: dict[str, Callable[[], Any]] = {
    "blocks 1 fp16": lambda: by_blocks(HALF, 1),
    "blocks 16 bf16 of 64 in 4 bits": lambda: by_blocks(BRAIN, 16, 64, 4),
    "blocks 64 fp32 of 32": lambda: by_blocks(FULL, 64, 32),
    "blocks 2048 fp16": lambda: by_blocks(HALF, 2048),
    "blocks 256 bf16 of 64": lambda: by_blocks(BRAIN, 256, 64),
    "blocks of a wide norm": lambda: wide(HALF),
    "blocks in parts 1 fp16": lambda: split(HALF, 1),
    "blocks in parts 16 bf16 of 64 in 4 bits": lambda: split(BRAIN, 16, 64, 4),
    "blocks in parts 64 fp32 of 32": lambda: split(FULL, 64, 32),
    "blocks of 32x128 heads fp16": lambda: attention(HALF, (32, 32), 128, 128),
    "blocks of 32x128 heads bf16 alone by 64": lambda: attention(BRAIN, (32, 32), 128, 64, 4, 1, 64),
    "blocks of 32/8x128 heads bf16 of 64": lambda: attention(BRAIN, (32, 8), 128, 128, 8, 64, 16),
    "blocks of 32/8x128 heads fp16 by 64": lambda: attention(HALF, (32, 8), 128, 64, 8, 1, 512),
    "blocks of 28/4x80 heads bf16 across": lambda: attention(BRAIN, (28, 4), 80, 128, 4, 8, 512, 256),
    "blocks of 12x64 heads fp32": lambda: attention(FULL, (12, 12), 64, 128, 8, 4, 512),
    "blocks of 14/2x64 heads fp32 by 32": lambda: attention(FULL, (14, 2), 64, 32, 8, 4, 512),
}
BLOCK_OVERLAPPING: dict[str, Callable[[], Any]] = {
    "blocks 8 fp16 overlapping": lambda: by_blocks(HALF, 8, OVERLAP=2),
    "blocks in parts 1 fp16 overlapping": lambda: split(HALF, 1, OVERLAP=2),
    "blocks in parts 8 bf16 overlapping": lambda: split(BRAIN, 8, OVERLAP=2),
    "blocks in parts 16 fp16 overlapping": lambda: split(HALF, 16, OVERLAP=2),
    "blocks in parts 32 bf16 overlapping": lambda: split(BRAIN, 32, OVERLAP=2),
    "blocks in parts 64 fp16 overlapping": lambda: split(HALF, 64, OVERLAP=2),
    "blocks of 32x128 heads fp16 overlapping": lambda: attention(HALF, (32, 32), 128, 128, OVERLAP=4),
    "blocks of 32/8x128 heads fp16 overlapping": lambda: attention(HALF, (32, 8), 128, 128, OVERLAP=4),
}
