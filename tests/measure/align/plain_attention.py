"""Attention in plain PyTorch over the paged cache, with another mask or scale.

Owns a stand-in for ``Attention.attend`` that is wrong on purpose. Knows no kernel.

    attending(causal=False)(model, layer)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ingot.layers.decoder import Decoder, DecoderLayer
from ingot.layers.forward_batch import ForwardBatch, LayerCache

Plant = Callable[[Decoder, DecoderLayer], None]


def attending(
    causal: bool = True, ahead: int = 0, window: int = 0, scale: Callable[[int], float] | None = None
) -> Plant:
    """A layer's attention sees ``ahead`` tokens after its own (all if not causal), ``window`` back."""

    def put(model: Decoder, layer: DecoderLayer) -> None:
        attention = layer.self_attn
        width = attention.config.head_dim
        factor = 1 / math.sqrt(width) if scale is None else scale(width)

        def attend(query: torch.Tensor, batch: ForwardBatch, cache: LayerCache) -> torch.Tensor:
            out = torch.empty_like(query)
            for b, length in enumerate(batch.seq_lens.tolist()):
                first, last = batch.query_start[b : b + 2].tolist()
                blocks = batch.block_tables[b, : -(-length // cache.block_size)].long()
                group = attention.config.num_heads // attention.config.num_kv_heads
                key, value = (  # [heads, length, width]
                    part[blocks].transpose(1, 2).flatten(0, 1)[:length].repeat_interleave(group, 1)
                    for part in (cache.keys, cache.values)
                )
                distance = batch.positions[first:last, None] - torch.arange(length)
                seen = distance >= -ahead if causal else torch.ones_like(distance, dtype=torch.bool)
                seen = seen & (distance < window) if window else seen
                scores = torch.einsum("qhd,khd->hqk", query[first:last], key) * factor
                weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
                out[first:last] = torch.einsum("hqk,khd->qhd", weights, value)
            return out

        attention.attend = attend

    return put
