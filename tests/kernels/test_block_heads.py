"""Attention that ends in numbers by blocks gives those of its own output, quantized in blocks: every one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.attention.int8_heads import int8_heads
from ingot.kernels.rows.block_rows import BlockSteps, quantize_in_blocks
from tests.kernels.flat_calls import (
    paged_attention,
    paged_attention_triton,
    prefill_attention,
    prefill_attention_triton,
)
from tests.kernels.narrow_cache_case import narrow_case
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, normal
from tests.kernels.paged_case import PagedCase, paged_case
from tests.kernels.test_block_rows import assert_rows, block_steps

LENGTHS = [5, 0, 150]
SHAPES = [  # heads, kv_heads, head_dim, block, bits
    (2, 2, 64, 32, 8),
    (2, 2, 64, 64, 4),
    (2, 2, 64, 128, 8),
    (4, 4, 64, 256, 4),
    (2, 2, 128, 32, 4),
    (1, 1, 128, 64, 8),
    (2, 2, 128, 128, 8),
    (2, 2, 128, 256, 4),
    (4, 2, 64, 32, 4),
    (4, 2, 64, 64, 8),
    (6, 2, 64, 128, 8),
    (4, 1, 64, 256, 8),
    (4, 2, 128, 32, 8),
    (4, 2, 128, 64, 4),
    (7, 1, 128, 128, 8),
    (4, 2, 128, 256, 4),
    (6, 2, 80, 96, 8),  # blocks across the borders of heads
    (3, 3, 48, 72, 4),
]
TILES = {"MERGE": 1}, {"AXIS": 1, "MERGE": 2}, {"AXIS": 2, "MERGE": 2}
WAYS = [(shape, {}) for shape in SHAPES] + [(shape, tiles) for shape in SHAPES[10:13] for tiles in TILES]
Shape = tuple[int, int, int, int, int]


def in_turn(cases: list[Any]) -> list[Any]:
    """Each with one of the dtypes."""
    return [(case, DTYPES[index % len(DTYPES)]) for index, case in enumerate(cases)]


def case_of(
    lengths: list[int], kv_heads: int, head_dim: int, dtype: torch.dtype, device: str, narrow: bool
) -> tuple[PagedCase, dict[str, object]]:
    """Caches, and what an op is told of one in 8 bits."""
    case = paged_case(
        lengths, kv_heads=kv_heads, head_dim=head_dim, block_size=16, dtype=dtype, device=device
    )
    if not narrow:
        return case, {}
    found = narrow_case(case, torch.int8)
    return found, {"scales": found.scales}


def steps_of(q: torch.Tensor, block: int, bits: int) -> BlockSteps:
    """Steps of rows [num_heads * head_dim] for averages of normal values, some of which they cut."""
    found = block_steps(q[0].numel(), block, bits, False, str(q.device))
    return BlockSteps(found.steps / 4, (found.zeros / 2).round(), block, bits)


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("way", "dtype"), in_turn(WAYS))
@pytest.mark.parametrize("split", [64, 512])
def test_paged_attention(
    impl: Implementation, dtype: torch.dtype, way: tuple[Shape, dict[str, int]], split: int
) -> None:
    """One split and several, merged by the last program or by a launch; windows and caches in 8 bits."""
    (heads, kv_heads, head_dim, block, bits), merge = way
    narrow, window = block == 64, 40 if bits == 4 else 0
    case, reported = case_of(LENGTHS, kv_heads, head_dim, dtype, impl.device, narrow)
    q = normal(len(LENGTHS), heads, head_dim, dtype=dtype, device=impl.device)
    place = (q, case.key_cache, case.value_cache, case.block_tables, case.seq_lens, 0.1, 150, window)
    tiles = {"MIN_SPLIT": split, **merge}
    op = impl(paged_attention, paged_attention_triton)
    steps = steps_of(q, block, bits)
    expected = quantize_in_blocks(op(*place, tiles=tiles, **reported).flatten(1), steps)
    out = torch.full(q.shape, 99, dtype=torch.int8, device=q.device)
    assert op(*place, tiles=tiles, out=out, out_scales=steps, **reported) is out
    assert_rows(int8_heads(out, steps), expected)
    assert len(expected.values.unique()) > 10


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("shape", "dtype"), in_turn(SHAPES))
def test_prefill_attention(impl: Implementation, dtype: torch.dtype, shape: Shape) -> None:
    """Two requests of three; the rows of the other stay as they are."""
    heads, kv_heads, head_dim, block, bits = shape
    narrow, window = block == 64, 20 if bits == 4 else 0
    lengths, queries = [3, 40, 20], [2, 17, 20]
    case, reported = case_of(lengths, kv_heads, head_dim, dtype, impl.device, narrow)
    q = normal(sum(queries), heads, head_dim, dtype=dtype, device=impl.device)
    bounds = torch.tensor([2, 19, 39], dtype=torch.int32, device=impl.device)
    tables, lens = case.block_tables[1:], case.seq_lens[1:]
    place = (q, case.key_cache, case.value_cache, tables, bounds, lens, max(queries), 0.1, window)
    op = impl(prefill_attention, prefill_attention_triton)
    steps = steps_of(q, block, bits)
    expected = quantize_in_blocks(op(*place, **reported)[2:].flatten(1), steps)
    out = torch.full(q.shape, 99, dtype=torch.int8, device=q.device)
    assert op(*place, out=out, out_scales=steps, **reported) is out
    assert (out[:2] == 99).all()
    assert_rows(int8_heads(out[2:], steps), expected)


def test_refused() -> None:
    case = paged_case([5], kv_heads=1, head_dim=48, block_size=16, dtype=torch.float32)
    q = normal(1, 2, 48, dtype=torch.float32)
    place = (q, case.key_cache, case.value_cache, case.block_tables)
    bounds = torch.tensor([0, 1], dtype=torch.int32)
    narrow = torch.zeros_like(q).to(torch.int8)

    def call(steps: BlockSteps, out: torch.Tensor | None = narrow) -> None:
        paged_attention(*place, case.seq_lens, 0.1, 5, out=out, out_scales=steps)
        prefill_attention(*place, bounds, case.seq_lens, 1, 0.1, out=out, out_scales=steps)

    right = block_steps(96, 32, 8, False, "cpu")
    call(right)
    with pytest.raises(IngotError, match="out_scales needs an int8 out"):
        call(right, None)
    with pytest.raises(IngotError, match="out has the wrong dtype"):
        call(right, torch.zeros_like(q))
    with pytest.raises(IngotError, match=r"use in_blocks on the output.*\n*.*divide 96"):
        call(block_steps(96, 64, 8, False, "cpu"))
    with pytest.raises(IngotError, match=r"use in_blocks on the output"):
        call(block_steps(96, 32, 8, True, "cpu"))
    with pytest.raises(IngotError, match="steps has the wrong shape"):
        call(block_steps(64, 32, 8, False, "cpu"))
    with pytest.raises(IngotError, match="unsupported bit width"):
        call(BlockSteps(right.steps, right.zeros, 32, 5))
    with pytest.raises(IngotError, match="zeros is not contiguous"):
        call(BlockSteps(right.steps, right.zeros.repeat_interleave(2)[::2], 32, 8))
