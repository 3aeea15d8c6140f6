"""Self-attention over a paged KV cache.

Owns the order of a decoder's attention: QKV product, position, cache write, attention, output product. Knows
no model and no kernel's inside.

    Attention(config, ctx)(hidden, batch, cache, rope_table)
"""

from __future__ import annotations

import torch
from torch import nn

from ingot.config.model import DecoderConfig
from ingot.kernels.invariant_attention import invariant_attention
from ingot.kernels.paged_attention import paged_attention
from ingot.kernels.prefill_attention import prefill_attention
from ingot.kernels.rope_kv_write import rope_kv_write
from ingot.layers.batch import ForwardBatch, LayerCache
from ingot.layers.context import BuildContext, empty_weight
from ingot.layers.linear import Linear


class HeadNorm(nn.Module):
    """Weight of the RMSNorm over one head's channels (Qwen3); the rotary kernel applies it."""

    def __init__(self, head_dim: int, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = empty_weight(head_dim, dtype=ctx.dtype)


class Attention(nn.Module):
    """Causal attention with MHA or GQA; queries, keys and values are one product, in that order.

    With ``batch_invariant`` every token is computed by the same arithmetic in any step (invariance.py).
    """

    def __init__(self, config: DecoderConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.plan = ctx.plan
        self.batch_invariant = False
        width = config.q_size + 2 * config.kv_size
        self.qkv_proj = Linear(config.hidden_size, width, bias=config.qkv_bias, ctx=ctx)
        self.o_proj = Linear(config.q_size, config.hidden_size, bias=config.output_bias, ctx=ctx)
        self.q_norm = HeadNorm(config.head_dim, ctx) if config.qk_norm else None
        self.k_norm = HeadNorm(config.head_dim, ctx) if config.qk_norm else None

    def forward(
        self, hidden: torch.Tensor, batch: ForwardBatch, cache: LayerCache, rope: torch.Tensor | None
    ) -> torch.Tensor:
        """[T, hidden_size] → [T, hidden_size]; writes the tokens' keys and values into ``cache``."""
        query = self._place(self.qkv_proj(hidden), batch, cache, rope)  # [T, num_heads, head_dim]
        return self.o_proj(self._attend(query, batch, cache).flatten(1))

    def _place(
        self, qkv: torch.Tensor, batch: ForwardBatch, cache: LayerCache, rope: torch.Tensor | None
    ) -> torch.Tensor:
        config = self.config
        return rope_kv_write(
            qkv,
            rope,
            batch.rope_rows,
            batch.positions,
            batch.slot_mapping,
            cache.keys,
            cache.values,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            q_norm_weight=None if self.q_norm is None else self.q_norm.weight,
            k_norm_weight=None if self.k_norm is None else self.k_norm.weight,
            norm_eps=config.norm_eps,
            logn_length=config.logn_length,
            tiles=self.plan.for_op("rope_kv_write"),
        )

    def _attend(self, query: torch.Tensor, batch: ForwardBatch, cache: LayerCache) -> torch.Tensor:
        config = self.config
        if self.batch_invariant:
            return invariant_attention(
                query,
                cache.keys,
                cache.values,
                batch.block_tables,
                batch.query_start,
                batch.seq_lens,
                batch.max_query_len,
                batch.max_seq_len,
                config.attention_scale,
                window=config.sliding_window,
            )
        if batch.max_query_len == 1:
            return paged_attention(
                query,
                cache.keys,
                cache.values,
                batch.block_tables,
                batch.seq_lens,
                config.attention_scale,
                batch.max_seq_len,
                window=config.sliding_window,
                tiles=self.plan.for_op("paged_attention"),
            )
        return prefill_attention(
            query,
            cache.keys,
            cache.values,
            batch.block_tables,
            batch.query_start,
            batch.seq_lens,
            batch.max_query_len,
            config.attention_scale,
            window=config.sliding_window,
            tiles=self.plan.for_op("prefill_attention"),
        )
