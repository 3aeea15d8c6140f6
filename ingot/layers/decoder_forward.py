"""One forward through a decoder.

Owns the products that a kind of step takes, layer by layer, and the way from embedded tokens to logits, all
at once or some layers at a time. What a layer does is decoder.py's. Knows no kernel and no number format.

    operations = Operations(decoder, Ways(decoder, caches), Step(decodes=True, rows=8))
    logits = operations.logits(hidden, batch, caches)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ingot.layers.decoder import Decoder, DecoderLayer
from ingot.layers.forward_batch import ForwardBatch, LayerCache
from ingot.layers.layer_products import LayerProducts, Product
from ingot.layers.mlp import GatedMLP
from ingot.layers.norm import Norm
from ingot.layers.product_choice import Step, Ways
from ingot.layers.row_forms import Rows


@dataclass
class Between:
    """A step between two layers: what the next one reads, ``hidden`` [T, hidden_size] behind its norm, and
    ``hidden`` itself.
    """

    x: Rows
    hidden: torch.Tensor


class Operations:
    """What a decoder does in one kind of step.

    Attributes:
        layers: each layer's products.
    """

    def __init__(self, decoder: Decoder, ways: Ways, step: Step) -> None:
        self.step = step
        self._decoder = decoder
        modules = [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
        self._norms: list[Norm] = [layer.input_layernorm for layer in modules] + [decoder.norm]
        starts = [("qkv", layer.self_attn.qkv_proj) for layer in modules] + [("head", decoder.lm_head)]
        self._starts = [
            ways.product(name, linear, step, norm)
            for (name, linear), norm in zip(starts, self._norms, strict=True)
        ]
        self.layers = [self._products(index, layer, ways) for index, layer in enumerate(modules)]

    def _products(self, index: int, layer: DecoderLayer, ways: Ways) -> LayerProducts:
        mlp, norm = layer.mlp, layer.post_attention_layernorm
        up = mlp.gate_up_proj if isinstance(mlp, GatedMLP) else mlp.up_proj
        return LayerProducts(
            qkv=self._starts[index],
            output=ways.product("o", layer.self_attn.o_proj, self.step),
            up=ways.product("gate_up", up, self.step, norm),
            down=ways.product("down", mlp.down_proj, self.step),
            next_norm=self._norms[index + 1],
            after=self._starts[index + 1],
            encoded=self._encoded(layer, ways),
        )

    def _encoded(self, layer: DecoderLayer, ways: Ways) -> tuple[Product, Product] | None:
        """Cross-attention's products; None in a layer without it."""
        if layer.encoder_attn is None:
            return None
        query, output = layer.encoder_attn.q_proj, layer.encoder_attn.o_proj
        norm = layer.encoder_attn_layernorm
        return ways.product("qkv", query, self.step, norm), ways.product("o", output, self.step)

    def begin(self, hidden: torch.Tensor) -> Between:
        """Embedded tokens [T, hidden_size], written over later → what the first layer takes."""
        return Between(*self._starts[0].form.norm(self._norms[0], hidden))

    def through(
        self, at: Between, batch: ForwardBatch, caches: Sequence[LayerCache], first: int, last: int
    ) -> None:
        """Move ``at``, which is before layer ``first``, through the layers [first, last)."""
        decoder = self._decoder
        rope = None if decoder.rotary is None else decoder.rotary.table
        for index in range(first, last):
            layer, cache, products = decoder.layers[index], caches[index], self.layers[index]
            at.x, at.hidden = layer(at.x, at.hidden, batch, cache, rope, products)

    def logits(self, hidden: torch.Tensor, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Embedded tokens [T, hidden_size], written over → logits [L, vocab_size] of the wanted ones."""
        decoder = self._decoder
        at = self.begin(hidden)
        del hidden  # memory of a long prompt
        self.through(at, batch, caches, 0, len(self.layers))
        x = at.x
        assert isinstance(x, torch.Tensor)
        del at  # as above
        # Steps that all decode have a row for each request, in order, unless some are padding.
        if len(batch.logits_indices) != len(x) or not self.step.decodes:
            x = x[batch.logits_indices]
        return decoder.capped(self._starts[-1].whole(x))
