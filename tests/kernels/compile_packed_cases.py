"""Launchers of products of many rows, most with weights of 8 and of 4 bits, on meta tensors, as in
compile_cases.py.

PACKED_CASES["many rows in 8 bits 128 fp16"]()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ingot.kernels.cache.paged_cache import PagedCache
from ingot.kernels.cache.qkv_placement import Placement, QkvHeads, TokenPlaces
from ingot.kernels.product.few_rows.stream_product import stream_gate_up, stream_linear, stream_qkv
from ingot.kernels.product.packed.packed_matmul import packed_matmul, packed_matmul_parts
from ingot.kernels.product.packed.packed_prompt import (
    add_packed_prompt,
    packed_prompt,
    packed_prompt_gate_up,
)
from ingot.kernels.product.prompt_gate_up import prompt_gate_up, prompt_up
from ingot.kernels.rows.operand_rows import OperandRows
from tests.kernels.compile_cases import BRAIN, HALF, empty, in_bits
from tests.kernels.numerics import launched


def many_rows(
    dtype: torch.dtype,
    rows: int,
    bits: int,
    group: int = 0,
    zeros: bool = False,
    outputs: int = 4096,
    ordered: bool = False,
    **tiles: int,
) -> None:
    """A whole product with a bias, and one in parts; of rows in the operand's order if ``ordered``."""
    rows_of, weight = empty(rows, 4096, dtype=dtype), in_bits(bits, outputs, 4096, group, zeros, dtype)
    x = OperandRows(rows_of) if ordered else rows_of
    launched(packed_matmul)(x, weight, empty(outputs, dtype=dtype), tiles)
    launched(packed_matmul_parts)(x, weight, tiles)


def straight(dtype: torch.dtype, rows: int, bits: int, outputs: int, group: int = -1, **tiles: int) -> None:
    """Of rows in the operand's order, early, with the default tiles; 4 bits by 128 with zeros."""
    group = (128 if bits == 4 else 0) if group < 0 else group
    many_rows(dtype, rows, bits, group, bits == 4, outputs, ordered=True, OVERLAP=2, **tiles)


def prompt(dtype: torch.dtype, bits: int, group: int = 0, zeros: bool = False, outputs: int = 4096) -> None:
    """With a bias and without."""
    x, weight = empty(300, 4096, dtype=dtype), in_bits(bits, outputs, 4096, group, zeros, dtype)
    launched(packed_prompt)(x, weight, empty(outputs, dtype=dtype))
    launched(packed_prompt)(x, weight)
    launched(add_packed_prompt)(x, weight, None, empty(300, outputs, dtype=dtype))


def packed_gates(dtype: torch.dtype, bits: int, group: int = 0, zeros: bool = False) -> None:
    """Gate and up of a weight of few bits, with their activation."""
    x, weight = empty(300, 4096, dtype=dtype), in_bits(bits, 28672, 4096, group, zeros, dtype)
    launched(packed_prompt_gate_up)(x, weight)


def streamed(bits: int) -> None:
    """Products of a row whose words stream through shared memory: output, gates and heads."""
    group, norm = (128 if bits == 4 else 0), empty(4096, dtype=BRAIN)
    x = empty(1, 4096, dtype=BRAIN)
    launched(stream_linear)(x, in_bits(bits, 4096, 4096, group, bits == 4, BRAIN), None, x, overlap=2)
    weight = in_bits(bits, 28672, 4096, group, bits == 4, BRAIN)
    launched(stream_gate_up)(x, weight, norm, 1e-5, overlap=2)
    index, cache = empty(1, dtype=torch.int64), empty(100, 8, 64, 128, dtype=BRAIN)
    places, kept = TokenPlaces(index, index, index), PagedCache(cache, cache)
    place = Placement(empty(100, 128, dtype=torch.float32), places, kept, QkvHeads(32, 8, 128))
    weight = in_bits(bits, 6144, 4096, group, bits == 4, BRAIN)
    launched(stream_qkv)(x, weight, None, norm, 1e-5, place, overlap=2)


def gate_up(dtype: torch.dtype, rows: int) -> None:
    x, weight = empty(rows, 4096, dtype=dtype), empty(28672, 4096, dtype=dtype)
    launched(prompt_gate_up)(x, weight)


def up(dtype: torch.dtype, rows: int) -> None:
    x, weight = empty(rows, 1280, dtype=dtype), empty(5120, 1280, dtype=dtype)
    launched(prompt_up)(x, weight, empty(5120, dtype=dtype))


PACKED_CASES: dict[str, Callable[[], Any]] = {
    "many rows in 8 bits 128 fp16 by pointers": lambda: many_rows(HALF, 128, 8, TMA=1),
    "many rows in 4 bits 100 bf16 by 32 with zeros by pointers": lambda: many_rows(
        BRAIN, 100, 4, 32, True, 4093, TMA=1, num_stages=2
    ),
}
PACKED_OVERLAPPING: dict[str, Callable[[], Any]] = {
    "streamed in 4 bits": lambda: streamed(4),
    "streamed in 8 bits": lambda: streamed(8),
    "gate and up of prompts bf16": lambda: gate_up(BRAIN, 2000),
    "gate and up of long prompts bf16": lambda: gate_up(BRAIN, 8192),
    "gate and up of prompts fp16": lambda: gate_up(HALF, 2048),
    "up of many windows fp16": lambda: up(HALF, 12000),
    "up of many windows bf16": lambda: up(BRAIN, 12000),
    "prompts in 8 bits bf16": lambda: prompt(BRAIN, 8),
    "prompts in 8 bits fp16 by 128 with zeros": lambda: prompt(HALF, 8, 128, True),
    "prompts in 8 bits bf16 with zeros": lambda: prompt(BRAIN, 8, 0, True),
    "prompts in 4 bits bf16 by 128 with zeros": lambda: prompt(BRAIN, 4, 128, True),
    "prompts in 4 bits fp16": lambda: prompt(HALF, 4),
    "prompts in 8 bits bf16, gates": lambda: packed_gates(BRAIN, 8),
    "prompts in 4 bits bf16 by 128 with zeros, gates": lambda: packed_gates(BRAIN, 4, 128, True),
    "prompts in 4 bits fp16 by 128, gates": lambda: packed_gates(HALF, 4, 128),
    "prompts in 4 bits bf16 by 32 with zeros, gates": lambda: packed_gates(BRAIN, 4, 32, True),
    "prompts in 4 bits bf16 by 32": lambda: prompt(BRAIN, 4, 32),
    "prompts in 4 bits bf16 by 64 with zeros": lambda: prompt(BRAIN, 4, 64, True),
    "prompts in 8 bits fp16 by 64 with zeros": lambda: prompt(HALF, 8, 64, True),
    "straight in 8 bits 16 bf16": lambda: straight(BRAIN, 16, 8, 22016),
    "straight in 8 bits 32 fp16": lambda: straight(HALF, 32, 8, 12288),
    "straight in 8 bits 64 bf16": lambda: straight(BRAIN, 64, 8, 12288),
    "straight in 8 bits 64 fp16 by 128": lambda: straight(HALF, 64, 8, 4096, group=128, BLOCK_N=64),
    "straight in 4 bits 16 bf16": lambda: straight(BRAIN, 16, 4, 12288),
    "straight in 4 bits 32 fp16": lambda: straight(HALF, 32, 4, 22016),
    "straight in 4 bits 64 bf16": lambda: straight(BRAIN, 64, 4, 22016),
    "straight in 4 bits 128 fp16": lambda: straight(HALF, 128, 4, 12288),
    "straight in 4 bits 64 fp16, parts of a step": lambda: straight(HALF, 64, 4, 4096, WIDE=0, DIRECT=2),
    "many rows in 8 bits 128 fp16": lambda: many_rows(HALF, 128, 8, OVERLAP=2, TMA=2),
    "many rows in 8 bits 256 bf16": lambda: many_rows(BRAIN, 256, 8, OVERLAP=2, TMA=2),
    "many rows in 8 bits 300 fp16 by 128": lambda: many_rows(HALF, 300, 8, 128, OVERLAP=2, TMA=2),
    "many rows in 4 bits 128 fp16 by 128 with zeros": lambda: many_rows(
        HALF, 128, 4, 128, True, OVERLAP=2, TMA=2
    ),
    "many rows in 4 bits 128 bf16 by 64": lambda: many_rows(BRAIN, 128, 4, 64, OVERLAP=4, TMA=2),
    "many rows in 4 bits 256 fp16 by 128 with zeros": lambda: many_rows(
        HALF, 256, 4, 128, True, OVERLAP=2, TMA=2
    ),
    "many rows in 4 bits 128 fp16 by 128 with zeros, wide": lambda: many_rows(
        HALF, 128, 4, 128, True, 22016, OVERLAP=2, TMA=2
    ),
    "many rows in 8 bits 16 fp16, wide steps": lambda: many_rows(
        HALF,
        16,
        8,
        BLOCK_T=16,
        BLOCK_N=64,
        num_warps=4,
        num_stages=6,
        WIDE=1,
        AHEAD=2,
        DIRECT=0,
        OVERLAP=2,
        TMA=2,
    ),
    "many rows in 8 bits 64 bf16, wide steps": lambda: many_rows(
        BRAIN, 64, 8, BLOCK_T=64, WIDE=1, AHEAD=2, OVERLAP=2, TMA=2
    ),
    "many rows in 4 bits 16 fp16 by 128 with zeros, wide steps": lambda: many_rows(
        HALF, 16, 4, 128, True, OVERLAP=2, TMA=2
    ),
    "many rows in 4 bits 32 bf16 by 64 with zeros, wide steps": lambda: many_rows(
        BRAIN,
        32,
        4,
        64,
        True,
        BLOCK_T=32,
        BLOCK_N=64,
        num_warps=4,
        REGISTERS=128,
        WIDE=1,
        AHEAD=2,
        DIRECT=0,
        OVERLAP=2,
        TMA=2,
    ),
    "many rows in 4 bits 64 fp16 by 128 with zeros": lambda: many_rows(
        HALF, 64, 4, 128, True, OVERLAP=2, TMA=2
    ),
    "many rows in 4 bits 64 fp16 by 128 with zeros, wide steps": lambda: many_rows(
        HALF, 64, 4, 128, True, WIDE=1, AHEAD=2, OVERLAP=2, TMA=2
    ),
    "many rows in 4 bits 128 bf16 by 128 with zeros, wide steps of half a chunk": lambda: many_rows(
        BRAIN, 128, 4, 128, True, BLOCK_K=128, num_stages=3, WIDE=1, AHEAD=2, OVERLAP=2, TMA=2
    ),
    "many rows in 4 bits 256 bf16 by channel, whole chunks": lambda: many_rows(
        BRAIN, 256, 4, BLOCK_T=128, BLOCK_K=256, OVERLAP=2, TMA=2, num_stages=2
    ),
}
