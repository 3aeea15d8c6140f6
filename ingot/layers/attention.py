"""Self-attention over a paged KV cache.

Owns a decoder's attention between its two products: position, cache write, attention. Knows no model and no
kernel's inside.

    query = attention.place(qkv, batch, cache, rope)
    attended = attention.attend(query, batch, cache)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ingot.config.decoder_config import DecoderConfig
from ingot.config.kernel_plan import TileTable
from ingot.kernels.attention.int8_heads import OutScales, scales_at
from ingot.kernels.attention.invariant_attention import invariant_attention
from ingot.kernels.attention.paged_attention import paged_attention
from ingot.kernels.attention.prefill_attention import prefill_attention
from ingot.kernels.cache.rope_kv_write import QkvParts, rope_kv_write
from ingot.kernels.checks import merge_tiles
from ingot.kernels.tiles.prefill_tiles import default_tiles
from ingot.layers.build_context import BuildContext, empty_weight
from ingot.layers.forward_batch import ForwardBatch, LayerCache
from ingot.layers.linear import Linear


class HeadNorm(nn.Module):
    """Weight of the RMSNorm over one head's channels (Qwen3); the rotary kernel applies it."""

    def __init__(self, head_dim: int, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = empty_weight(head_dim, dtype=ctx.dtype)


class Attention(nn.Module):
    """Causal attention with MHA or GQA; queries, keys and values are one product, in that order.

    A query sees the last ``window`` tokens, 0: all. With ``batch_invariant`` every token is computed by the
    same arithmetic in any step (invariance.py).
    """

    def __init__(self, config: DecoderConfig, ctx: BuildContext, window: int) -> None:
        super().__init__()
        self.config = config
        self.window = window
        self.batch_invariant = False
        width = config.q_size + 2 * config.kv_size
        heads = {"q": config.num_heads, "kv": config.num_kv_heads, "d": config.head_dim}
        self.place_tiles = ctx.plan.table("rope_kv_write", **heads)
        self.decode_tiles = ctx.plan.table("paged_attention", **heads)
        self.prefill_tiles = ctx.plan.table("prefill_attention", **heads)
        qkv, output = ctx.at("qkv_proj"), ctx.at("o_proj")
        self.small_tiles = qkv.product_tiles("small_qkv", n=width, k=config.hidden_size)
        self.qkv_proj = Linear(config.hidden_size, width, bias=config.qkv_bias, ctx=qkv)
        self.o_proj = Linear(
            config.q_size,
            config.hidden_size,
            bias=config.output_bias,
            ctx=output,
            input_group=config.head_dim,
            free_order=True,
        )
        self.q_norm = HeadNorm(config.head_dim, ctx) if config.qk_norm else None
        self.k_norm = HeadNorm(config.head_dim, ctx) if config.qk_norm else None

    def place(
        self,
        qkv: torch.Tensor | QkvParts,
        batch: ForwardBatch,
        cache: LayerCache,
        rope: torch.Tensor | None,
        tiles: Mapping[str, int] | None = None,
    ) -> torch.Tensor:
        """[T, q_size + 2 kv_size] → queries [T, num_heads, head_dim]; keys and values go into ``cache``.

        ``tiles`` are put over the plan's.
        """
        config = self.config
        query = rope_kv_write(
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
            tiles=self.place_tiles.at(len(batch.positions), tiles),
            scales=cache.scales,
        )
        batch.see("query", query)
        return query

    def attend(
        self,
        query: torch.Tensor,
        batch: ForwardBatch,
        cache: LayerCache,
        out: torch.Tensor | None = None,
        out_scales: OutScales | None = None,
    ) -> torch.Tensor:
        """Queries [T, num_heads, head_dim] → the same shape, ``out`` where it is given.

        Leading requests of one token go to the decode kernel, the others to the prefill kernel, which comes
        second: in a captured step the first also writes rows of the others. With
        ``out_scales``, as in ``kernels/attention/int8_heads.py``, ``out`` is int8; never with
        ``batch_invariant``.
        """
        if self.batch_invariant:
            assert out is None
            return self._attend_invariantly(query, batch, cache)
        config, split = self.config, batch.split
        single, lens, chunks = batch.leading_decodes, batch.seq_lens, slice(batch.leading_decodes, None)
        if split is not None:
            single, lens, chunks = len(split.decode_lens), split.decode_lens, slice(None)
        out = torch.empty_like(query) if out is None else out
        steady = self.o_proj.scheme.rounds
        if single:
            paged_attention(
                query[:single],
                cache.keys,
                cache.values,
                batch.block_tables[:single],
                lens[:single],
                config.attention_scale,
                batch.max_seq_len,
                window=self.window,
                tiles=self.tiles_of(self.decode_tiles, single, cache),
                out=out[:single],
                arrivals=batch.arrivals,
                out_scales=None if out_scales is None else scales_at(out_scales, slice(single)),
                scales=cache.scales,
                steady=steady,
                softcap=config.attention_softcap,
            )
        if split is not None or single < len(batch.seq_lens):
            tiles = self.tiles_of(self.prefill_tiles, batch.max_query_len, cache)
            if split is not None:
                tiles = {**(tiles or {}), "BLOCK_M": split.tile_rows}
            prefill_attention(
                query,
                cache.keys,
                cache.values,
                batch.block_tables[chunks],
                batch.query_start[chunks],
                batch.seq_lens[chunks],
                batch.max_query_len,
                config.attention_scale,
                window=self.window,
                tiles=tiles,
                out=out,
                out_scales=out_scales,
                scales=cache.scales,
                steady=steady,
                softcap=config.attention_softcap,
                tile_list=None if split is None else split.tile_list,
                parts=0 if split is None else split.tile_parts,
                arrivals=None if split is None else batch.arrivals,
            )
        return out

    def tile_rows(self, max_query_len: int, cache: LayerCache, dtype: torch.dtype) -> int:
        """Queries of a tile of the prefill kernel where a request has so many, in ``dtype``."""
        tiles = default_tiles(max_query_len, self.config.head_dim, dtype.itemsize, cache.scales is not None)
        return merge_tiles(tiles, self.tiles_of(self.prefill_tiles, max_query_len, cache))["BLOCK_M"]

    @staticmethod
    def tiles_of(table: TileTable, rows: int, cache: LayerCache) -> Mapping[str, int] | None:
        """The plan's tiles, which were measured on a cache in the model's dtype; None for one in 8 bits."""
        return table.at(rows) if cache.scales is None else None

    def _attend_invariantly(
        self, query: torch.Tensor, batch: ForwardBatch, cache: LayerCache
    ) -> torch.Tensor:
        """``attend`` with one order of sums for decodes and prompts."""
        return invariant_attention(
            query,
            cache.keys,
            cache.values,
            batch.block_tables,
            batch.query_start,
            batch.seq_lens,
            batch.max_query_len,
            batch.max_seq_len,
            self.config.attention_scale,
            window=self.window,
            scales=cache.scales,
            softcap=self.config.attention_softcap,
        )
