"""Attention to an encoder's outputs, whose keys and values are in a second paged cache.

attention.write(encoded, cache.encoded, slots)         # once per input
attended = attention.attend(query, batch, cache)       # in every step
"""

from __future__ import annotations

import torch
from torch import nn

from ingot.config.decoder_config import DecoderConfig
from ingot.kernels.attention.attention_arguments import AttentionOutput, Scoring
from ingot.kernels.attention.int8_heads import OutScales
from ingot.kernels.attention.invariant_attention import invariant_attention
from ingot.kernels.attention.paged_attention import paged_attention
from ingot.kernels.cache.qkv_placement import Placement, QkvHeads, TokenPlaces
from ingot.kernels.cache.rope_kv_write import rope_kv_write
from ingot.layers.build_context import BuildContext
from ingot.layers.forward_batch import ForwardBatch, LayerCache
from ingot.layers.linear import Linear


class CrossAttention(nn.Module):
    """Every token of the decoder attends to all of its request's encoded positions.

    With ``batch_invariant`` every token is computed by the same arithmetic in any step (invariance.py).
    """

    def __init__(self, config: DecoderConfig, ctx: BuildContext) -> None:
        super().__init__()
        assert config.encoder is not None
        self.config = config
        self.batch_invariant = False
        self.scoring = Scoring(config.attention_scale)
        size, bias = config.hidden_size, config.qkv_bias
        self.q_proj = Linear(size, config.q_size, bias=bias, ctx=ctx.at("q_proj"))
        width, kv = config.encoder.hidden_size, 2 * config.kv_size
        self.kv_proj = Linear(width, kv, bias=bias, ctx=ctx.at("kv_proj"))
        sizes, output, group = (config.q_size, size), ctx.at("o_proj"), config.head_dim
        self.o_proj = Linear(*sizes, bias=config.output_bias, ctx=output, input_group=group, free_order=True)

    def write(self, encoded: torch.Tensor, cache: LayerCache, slots: torch.Tensor) -> None:
        """Write keys and values of encoded positions [P, encoder's hidden_size] to ``slots`` [P] of a second
        cache (``block * block_size + offset``).
        """
        heads = QkvHeads(0, self.config.num_kv_heads, self.config.head_dim)
        rope_kv_write(self.kv_proj(encoded), Placement(None, TokenPlaces(slots, slots, slots), cache, heads))

    def query(self, projected: torch.Tensor) -> torch.Tensor:
        """[T, q_size] → queries [T, num_heads, head_dim]."""
        return projected.view(len(projected), self.config.num_heads, self.config.head_dim)

    def attend(
        self,
        query: torch.Tensor,
        batch: ForwardBatch,
        cache: LayerCache,
        out: torch.Tensor | None = None,
        out_scales: OutScales | None = None,
    ) -> torch.Tensor:
        """As of ``Attention.attend``; zeros for tokens without an encoded position."""
        encoded, second = batch.encoded, cache.encoded
        assert encoded is not None
        assert second is not None
        if self.batch_invariant:
            assert out is None
            starts = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
            sequences = encoded.sequences._replace(query_start=starts)
            return invariant_attention(query, second, sequences, self.scoring)
        return paged_attention(
            query,
            second,
            encoded.sequences,
            self.scoring,
            output=AttentionOutput(out, out_scales, self.o_proj.scheme.rounds),
            arrivals=batch.arrivals if batch.max_query_len == 1 else None,
        )
