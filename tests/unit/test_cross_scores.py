"""Scores of cross-attention, each beside a product of its query and its key."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot.layers.forward_batch import LayerCache
from ingot.runtime.scheduling.inputs import EncoderEntry
from ingot.runtime.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest, layout_of
from ingot.runtime.step.cross_scores import ScoreReader
from tests.unit.test_scheduler import request

LAYERS, HEADS, SIZE, BLOCK, BLOCKS, SCALE = 2, 4, 8, 4, 7, 0.37
ASKED = {  # tokens of the step, heads, blocks of the input, its positions
    "text": (3, (), (), 0),
    "first": (2, ((1, 2), (0, 3), (1, 0)), (4, 1), 6),
    "between": (1, (), (5,), 4),
    "second": (4, ((1, 3),), (3, 6, 0), 9),
}


def cache_of(kv_heads: int, dtype: torch.dtype) -> LayerCache:
    cache = LayerCache.zeros(BLOCKS, kv_heads, BLOCK, SIZE, dtype, torch.device("cpu"))
    if cache.scales is None:
        cache.keys.copy_(torch.randn(cache.keys.shape))
    else:
        cache.keys.copy_(torch.randint(-100, 100, cache.keys.shape))
        cache.scales.keys.copy_(torch.rand(cache.scales.keys.shape) + 0.1)
    return LayerCache(cache.keys, cache.values, encoded=cache)


def key_of(cache: LayerCache, blocks: tuple[int, ...], position: int, head: int) -> torch.Tensor:
    second = cache.encoded
    assert second is not None
    block, place = blocks[position // BLOCK], position % BLOCK
    factor = 1.0 if second.scales is None else float(second.scales.keys[block, head, place])
    return second.keys[block, head, place].double() * factor


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_each_request_has_its_own_rows_heads_and_keys(kv_heads: int, dtype: torch.dtype) -> None:
    """Whatever runs beside it, in the order of its heads; query heads of one key head are neighbours."""
    torch.manual_seed(1)
    items, rows, first = [], {}, 0
    for name, (count, heads, blocks, positions) in ASKED.items():
        given: Any = SimpleNamespace(positions=positions, encodes=True, tokens=0, end=0)
        one = request(name, 9, heads=heads, inputs=(given,) if positions else ())
        one.encoded = {0: EncoderEntry(b"", list(blocks), positions)} if positions else {}
        one.blocks = list(range(9))
        items.append(ScheduledRequest(one, 2, count, samples=False))
        rows[name], first = first, first + count
    caches = [cache_of(kv_heads, dtype) for _ in range(LAYERS)]
    queries = [torch.randn(first, HEADS, SIZE) for _ in range(LAYERS)]
    reader = ScoreReader(ScheduledBatch(items, layout=layout_of(items, BLOCK)), caches, SCALE)
    for query in queries:
        reader("query", torch.full_like(query, math.nan))
        reader("cross_query", query)
    assert set(reader.scores) == {"first", "second"}
    for name, scores in reader.scores.items():
        count, heads, blocks, positions = ASKED[name]
        assert (scores.shape, scores.dtype) == ((count, len(heads), positions), torch.float32)
        for token in range(count):
            for place, (layer, head) in enumerate(heads):
                query = queries[layer][rows[name] + token, head].double()
                keys = [
                    key_of(caches[layer], blocks, at, head * kv_heads // HEADS) for at in range(positions)
                ]
                wanted = torch.stack(keys) @ query * SCALE
                torch.testing.assert_close(scores[token, place].double(), wanted, rtol=1e-4, atol=1e-4)
