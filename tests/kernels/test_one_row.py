"""On a CPU a step of one row goes a way of its own: the same bits as beside others, and nothing is copied."""

from __future__ import annotations

import pytest
import torch

from ingot.kernels.cache.paged_cache import gather_tokens
from ingot.layers.forward_batch import LayerCache
from tests.kernels.flat_calls import paged_attention, rope_kv_write

CPU = torch.device("cpu")
BLOCKS, HEADS, SIZE, DIM = 12, 2, 4, 8


def filled(*, by_head: bool) -> LayerCache:
    cache = LayerCache.zeros(BLOCKS, HEADS, SIZE, DIM, torch.float32, CPU, by_head=by_head)
    for seed, tensor in enumerate((cache.keys, cache.values)):
        values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
        tensor.copy_(values)
    return cache


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_attention_alone_is_attention_beside_others(
    by_head: bool, window: int, steady: bool, given: bool
) -> None:
    cache = filled(by_head=by_head)
    q = torch.randn(3, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(7))
    tables = torch.tensor([[0, 1, 2], [5, 3, 9], [7, 8, 0]], dtype=torch.int32)
    lens = torch.tensor([11, 9, 0], dtype=torch.int32)
    options = {"window": window, "steady": steady}
    wanted = paged_attention(q, cache.keys, cache.values, tables, lens, 0.3, 12, **options)
    for row in range(3):
        one = slice(row, row + 1)
        out = torch.full_like(q[one], 9.0) if given else None
        found = paged_attention(
            q[one], cache.keys, cache.values, tables[one], lens[one], 0.3, 12, out=out, **options
        )
        assert torch.equal(found, wanted[one])
        assert out is None or found is out
    assert not wanted[2].any(), "a row without keys is zeros"


def test_neighbouring_blocks_of_a_head_are_read_where_they_are() -> None:
    cache, table = filled(by_head=True), torch.tensor([3, 4, 5], dtype=torch.int32)
    found = gather_tokens(cache.keys, table, 0, 10)
    assert torch.equal(found, filled(by_head=False).keys[3:6].transpose(0, 1).flatten(1, 2)[:, :10])
    assert found.data_ptr() == cache.keys[3].data_ptr()
    narrow = LayerCache.zeros(BLOCKS, HEADS, SIZE, DIM, torch.int8, CPU, by_head=True)
    assert narrow.keys.is_contiguous(), "kernels of 8 bits read it so"


@pytest.mark.parametrize("slot", [-1, 0, 7, 4 * BLOCKS - 1])
def test_one_token_is_written_where_it_belongs(slot: int) -> None:
    qkv = torch.randn(2, 3 * HEADS * DIM, generator=torch.Generator().manual_seed(3))
    places = torch.zeros(2, dtype=torch.int64)
    both, alone = filled(by_head=False), filled(by_head=False)
    slots = torch.tensor([slot, -1])
    sizes = (HEADS, HEADS, DIM)
    wanted = rope_kv_write(qkv, None, places, places, slots, both.keys, both.values, *sizes)
    found = rope_kv_write(qkv[:1], None, places[:1], places[:1], slots[:1], alone.keys, alone.values, *sizes)
    assert torch.equal(found, wanted[:1])
    assert torch.equal(alone.keys, both.keys)
    assert torch.equal(alone.values, both.values)
    assert torch.equal(alone.keys, filled(by_head=False).keys) == (slot < 0)
