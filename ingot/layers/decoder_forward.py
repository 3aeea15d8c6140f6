"""One forward pass through a decoder: each layer's products for a kind of step, and the way from embedded
tokens to logits, all layers at once or some at a time.

    operations = Operations(decoder, product_chooser(decoder, caches), Step(decodes=True, rows=8))
    logits = operations.logits(hidden, batch, caches)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ingot.layers.decoder import Decoder, DecoderLayer
from ingot.layers.forward_batch import ForwardBatch, LayerCache
from ingot.layers.linear import all_dense, linears
from ingot.layers.mlp import GatedMLP
from ingot.layers.norm import Norm
from ingot.layers.products.layer_products import LayerProducts, Product
from ingot.layers.products.product_choice import ProductChooser, Step
from ingot.layers.products.row_forms import Rows


@dataclass
class Between:
    """A step between two layers: ``hidden`` [T, hidden_size], and ``x``, normalised for the next layer."""

    x: Rows
    hidden: torch.Tensor


def fuses(model: Decoder) -> bool:
    """Whether a GPU's steps may take kernels that do more than a module: in 16 bits, and of dense weights."""
    dtypes = [model.dtype] if model.encoder is None else [model.dtype, model.encoder_dtype]
    return all(dtype.itemsize == 2 for dtype in dtypes) or all_dense(model)


def product_chooser(decoder: Decoder, caches: Sequence[LayerCache]) -> ProductChooser:
    """What chooses the products of a decoder's layers."""
    layers = [*linears(decoder.layers).values()]
    return ProductChooser(decoder.config, decoder.dtype, caches, all_dense=all_dense(decoder), layers=layers)


class Operations:
    """What a decoder does in one kind of step; ``layers``: each layer's products."""

    def __init__(self, decoder: Decoder, chooser: ProductChooser, step: Step) -> None:
        self.step = step
        self._decoder = decoder
        modules = [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
        self._norms: list[Norm] = [layer.input_layernorm for layer in modules] + [decoder.norm]
        starts = [("qkv", layer.self_attn.qkv_proj) for layer in modules] + [("head", decoder.lm_head)]
        self._starts = [
            chooser.product(name, linear, step, norm)
            for (name, linear), norm in zip(starts, self._norms, strict=True)
        ]
        self.layers = [self._products(index, layer, chooser) for index, layer in enumerate(modules)]

    def _products(self, index: int, layer: DecoderLayer, chooser: ProductChooser) -> LayerProducts:
        mlp, norm = layer.mlp, layer.post_attention_layernorm
        up = mlp.gate_up_proj if isinstance(mlp, GatedMLP) else mlp.up_proj
        return LayerProducts(
            qkv=self._starts[index],
            output=chooser.product("o", layer.self_attn.o_proj, self.step),
            up=chooser.product("gate_up", up, self.step, norm),
            down=chooser.product("down", mlp.down_proj, self.step),
            next_norm=self._norms[index + 1],
            after=self._starts[index + 1],
            encoded=self._encoded(layer, chooser),
        )

    def _encoded(self, layer: DecoderLayer, chooser: ProductChooser) -> tuple[Product, Product] | None:
        """Cross-attention's products, if the layer has it."""
        if layer.encoder_attn is None:
            return None
        query, output = layer.encoder_attn.q_proj, layer.encoder_attn.o_proj
        norm = layer.encoder_attn_layernorm
        return chooser.product("qkv", query, self.step, norm), chooser.product("o", output, self.step)

    def begin(self, hidden: torch.Tensor) -> Between:
        """Embedded tokens [T, hidden_size], overwritten later → what the first layer takes."""
        return Between(*self._starts[0].form.norm(self._norms[0], hidden))

    def run_layers(
        self, at: Between, batch: ForwardBatch, caches: Sequence[LayerCache], first: int, last: int
    ) -> None:
        """Move ``at``, which is before layer ``first``, through the layers [first, last)."""
        decoder = self._decoder
        for index in range(first, last):
            layer, cache, products = decoder.layers[index], caches[index], self.layers[index]
            rope = decoder.rope_table(index)
            at.x, at.hidden = layer(at.x, at.hidden, batch, cache, rope, products)

    def logits(
        self,
        hidden: torch.Tensor,
        batch: ForwardBatch,
        caches: Sequence[LayerCache],
        only: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Embedded tokens [T, hidden_size], overwritten → logits [L, vocab_size] of the wanted ones.
        ``only``: the layers to launch, the last one among them, for the sake of their kernels alone.
        """
        decoder = self._decoder
        at = self.begin(hidden)
        del hidden  # memory of a long prompt
        if only is None:
            self.run_layers(at, batch, caches, 0, len(self.layers))
        for index in only or ():
            at = Between(*self._starts[index].form.norm(self._norms[index], at.hidden))
            self.run_layers(at, batch, caches, index, index + 1)
        x = at.x
        assert isinstance(x, torch.Tensor)
        del at  # as above
        # A step that decodes has one row per request, in order, unless some are padding or there is a probe.
        if batch.probes or len(batch.logits_indices) != len(x) or not self.step.decodes:
            x = x[batch.logits_indices]
        return decoder.capped(self._starts[-1].full_output(x))
