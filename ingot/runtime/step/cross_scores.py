"""Cross-attention scores of chosen heads, read while a step runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ingot.layers.forward_batch import LayerCache
from ingot.layers.observer import Observed
from ingot.runtime.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest

Head = tuple[int, int]  # layer, head
Scores = dict[str, torch.Tensor]  # by request


class ScoreReader:
    """An observer that takes cross-attention's queries [T, num_heads, head_dim] layer by layer.

    Attributes:
        scores: by request, float32 [its tokens of the step, heads, positions] on the CPU: q·k times the
            scale, before the softmax. Heads are in the request's order.
    """

    def __init__(self, step: ScheduledBatch, caches: Sequence[LayerCache], scale: float) -> None:
        self._rows = [
            (item, step.layout.rows_of(index))
            for index, item in enumerate(step.requests)
            if item.request.heads
        ]
        self._caches = iter(caches)
        self._scale = scale
        self._layer = 0
        self.scores: Scores = {
            item.request.request_id: torch.empty(
                item.count, len(item.request.heads), item.request.inputs[0].positions
            )
            for item, _ in self._rows
        }

    def __call__(self, place: str, query: Observed) -> None:
        if place != "cross_query":
            return
        assert isinstance(query, torch.Tensor)
        layer, cache = self._layer, next(self._caches).encoded
        assert cache is not None
        self._layer += 1
        for item, rows in self._rows:
            wanted = [(place, head) for place, (at, head) in enumerate(item.request.heads) if at == layer]
            if wanted:
                places, heads = zip(*wanted, strict=True)
                keys = _keys(cache, item, heads, query.shape[1] // cache.num_kv_heads)
                asked = query[rows][:, list(heads)].float()
                found = torch.einsum("thd,hpd->thp", asked, keys) * self._scale
                self.scores[item.request.request_id][:, list(places)] = found.cpu()


def _keys(cache: LayerCache, item: ScheduledRequest, heads: Sequence[int], shared: int) -> torch.Tensor:
    """Float32 [heads, positions, head_dim] of a request's input; ``shared``: queries per head of keys."""
    entry = item.request.encoded[0]
    index = (
        torch.tensor(entry.blocks, device=cache.keys.device)[None],
        torch.tensor([head // shared for head in heads], device=cache.keys.device)[:, None],
    )
    keys = cache.keys[index].float()  # [heads, blocks, block_size, head_dim]
    if cache.scales is not None:
        keys = keys * cache.scales.keys[index][..., None]
    return keys.flatten(1, 2)[:, : entry.positions]
