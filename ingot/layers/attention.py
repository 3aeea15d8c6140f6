"""Self-attention over a paged KV cache, between a decoder's QKV and output products.

query = attention.place(qkv, batch, cache, rope)
attended = attention.attend(query, batch, cache)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ingot.config.decoder_config import DecoderConfig
from ingot.config.kernel_plan import TileTable
from ingot.kernels.attention.attention_arguments import AttentionOutput, Scoring
from ingot.kernels.attention.int8_heads import OutScales, scales_at
from ingot.kernels.attention.invariant_attention import invariant_attention
from ingot.kernels.attention.paged_attention import paged_attention
from ingot.kernels.attention.prefill_attention import prefill_attention
from ingot.kernels.cache.qkv_placement import HeadNorms, Placement, QkvHeads
from ingot.kernels.cache.rope_kv_write import QkvParts, rope_kv_write
from ingot.kernels.kernel_checks import merge_tiles
from ingot.kernels.tiles.prefill_tiles import (
    HOPPER_TILES,
    default_tiles,
    is_hopper_tile,
    most_parts,
    on_hopper,
)
from ingot.layers.build_context import BuildContext
from ingot.layers.forward_batch import ForwardBatch, LayerCache
from ingot.layers.linear import Linear
from ingot.layers.norm import HeadNorm


class Attention(nn.Module):
    """Causal MHA or GQA; queries, keys and values are one product, in that order.

    With ``batch_invariant`` every token is computed by the same arithmetic in any step (invariance.py).
    """

    def __init__(self, config: DecoderConfig, ctx: BuildContext, window: int) -> None:
        super().__init__()
        self.config = config
        self.scoring = Scoring(config.attention_scale, window, config.attention_softcap)
        self.heads = QkvHeads(config.num_heads, config.num_kv_heads, config.head_dim, config.logn_length)
        self.batch_invariant = False
        width = config.q_size + 2 * config.kv_size
        heads = {"q": config.num_heads, "kv": config.num_kv_heads, "d": config.head_dim}
        self.place_tiles = ctx.plan.table("rope_kv_write", **heads)
        self.decode_tiles = ctx.plan.table("paged_attention", **heads)
        self.prefill_tiles = ctx.plan.table("prefill_attention", **heads)
        qkv, output = ctx.at("qkv_proj"), ctx.at("o_proj")
        self.small_tiles = qkv.product_tiles("small_qkv", n=width, k=config.hidden_size)
        self.qkv_proj = Linear(config.hidden_size, width, bias=config.qkv_bias, ctx=qkv)
        sizes, group = (config.q_size, config.hidden_size), config.head_dim
        self.o_proj = Linear(*sizes, bias=config.output_bias, ctx=output, input_group=group, free_order=True)
        self.q_norm, self.k_norm = (
            HeadNorm(config.head_dim, ctx, config.wide_norms) if config.qk_norm else None for _ in "qk"
        )

    def placement(self, batch: ForwardBatch, cache: LayerCache, rope: torch.Tensor | None) -> Placement:
        """Where a step's queries, keys and values go, and how they are rotated."""
        return Placement(rope, batch.places, cache, self.heads)

    def place(
        self,
        qkv: torch.Tensor | QkvParts,
        batch: ForwardBatch,
        cache: LayerCache,
        rope: torch.Tensor | None,
        tiles: Mapping[str, int] | None = None,
    ) -> torch.Tensor:
        """[T, q_size + 2 kv_size] → queries [T, num_heads, head_dim]; keys and values go into ``cache``;
        ``tiles`` override the plan's.
        """
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.config.norm_eps)
        chosen = self.place_tiles.at(len(batch.positions), tiles)
        query = rope_kv_write(qkv, self.placement(batch, cache, rope), norms, chosen)
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
        """Queries [T, num_heads, head_dim] → the same shape; ``out`` and ``out_scales`` are as of
        ``AttentionOutput``, and not with ``batch_invariant``.

        Leading requests of one token go to the decode kernel, then the others to the prefill kernel: in a
        captured step the first also writes rows of the others.
        """
        if self.batch_invariant:
            assert out is None
            return invariant_attention(query, cache, batch.sequences, self.scoring)
        split, decodes, chunks = batch.split, batch.decodes, batch.chunks
        out = torch.empty_like(query) if out is None else out
        steady = self.o_proj.scheme.rounds
        if decodes is not None:
            rows = slice(len(decodes.seq_lens))
            scales = None if out_scales is None else scales_at(out_scales, rows)
            paged_attention(
                query[rows],
                cache,
                decodes,
                self.scoring,
                tiles=self.tiles_of(self.decode_tiles, rows.stop, cache),
                output=AttentionOutput(out[rows], scales, steady),
                arrivals=batch.arrivals,
            )
        if chunks is not None:
            tiles = self.tiles_of(self.prefill_tiles, batch.max_query_len, cache)
            if split is not None:
                tiles = {**(tiles or {}), "BLOCK_M": split.tile_rows}
            prefill_attention(
                query,
                cache,
                chunks,
                self.scoring,
                tiles=tiles,
                output=AttentionOutput(out, out_scales, steady),
                listed=None if split is None else split.listed,
                arrivals=batch.arrivals,
            )
        return out

    def tile_rows(self, max_query_len: int, cache: LayerCache, dtype: torch.dtype) -> int:
        """Queries per tile of the prefill kernel in a captured step of so many, in ``dtype``."""
        head_dim, heads, size = self.config.head_dim, self.config.num_heads, dtype.itemsize
        chosen = self.tiles_of(self.prefill_tiles, max_query_len, cache)
        hopper = on_hopper(cache.keys.device, head_dim, size) and is_hopper_tile(chosen or {})
        parts = most_parts(heads, max_query_len, HOPPER_TILES["BLOCK_M"])
        tiles = default_tiles(max_query_len, head_dim, size, cache.scales is not None, parts, hopper)
        return merge_tiles(tiles, chosen)["BLOCK_M"]

    @staticmethod
    def tiles_of(table: TileTable, rows: int, cache: LayerCache) -> Mapping[str, int] | None:
        """The plan's tiles, measured on a cache in the model's dtype; None for a cache in 8 bits."""
        return table.at(rows) if cache.scales is None else None
