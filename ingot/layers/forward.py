"""One forward through a decoder's layers.

Owns the order of a layer's operations, and the products that a kind of step takes. Knows no kernel and no
number format: a product says how it takes its input, and what comes before it ends in that form.

    operations = Operations(decoder, ways, Step(decodes=True, rows=8))
    logits = operations.logits(hidden, batch, caches)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ingot.kernels.operand_rows import OperandRows
from ingot.layers.attention import Attention
from ingot.layers.batch import ForwardBatch, LayerCache
from ingot.layers.decoder import Decoder, DecoderLayer
from ingot.layers.forms import Norm, RawForm, Rows
from ingot.layers.mlp import MLP, GatedMLP
from ingot.layers.products import Product
from ingot.layers.ways import Step, Ways


@dataclass(frozen=True)
class LayerOperations:
    """A layer's products for one kind of step, and the norms between them.

    Attributes:
        norm: between attention and MLP.
        next_norm: of the next layer, or the final one.
        after: the product after it: the next layer's QKV, or the head.
    """

    attention: Attention
    mlp: GatedMLP | MLP
    qkv: Product
    output: Product
    up: Product
    down: Product
    norm: Norm
    next_norm: Norm
    after: Product

    def forward(
        self,
        x: Rows,
        hidden: torch.Tensor,
        batch: ForwardBatch,
        cache: LayerCache,
        rope: torch.Tensor | None,
    ) -> tuple[Rows, torch.Tensor]:
        """(normalised input of the layer, hidden states) → the same of the next layer."""
        _see(batch, "attn_in", x, self.qkv)
        query = self.qkv.heads(x, self.attention, batch, cache, rope)
        attended = self.output.form.attention(self.attention, query, batch, cache)
        _see(batch, "attended", attended, self.output)
        x, hidden = self.output.join(attended, hidden, self.norm, self.up.form)
        batch.see("stream", hidden)
        _see(batch, "mlp_in", x, self.up)
        inner = self.up.inner(x, self.mlp, self.down.form)
        _see(batch, "inner", inner, self.down)
        x, hidden = self.down.join(inner, hidden, self.next_norm, self.after.form)
        batch.see("stream", hidden)
        return x, hidden


class Operations:
    """What a decoder does in one kind of step."""

    def __init__(self, decoder: Decoder, ways: Ways, step: Step) -> None:
        self.decodes = step.decodes
        self.rope = None if decoder.rotary is None else decoder.rotary.table
        layers = [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
        self._norms: list[Norm] = [layer.input_layernorm for layer in layers] + [decoder.norm]
        starts = [("qkv", layer.self_attn.qkv_proj) for layer in layers] + [("head", decoder.lm_head)]
        self._starts = [
            ways.product(name, linear, step, norm)
            for (name, linear), norm in zip(starts, self._norms, strict=True)
        ]
        self.layers = [self._layer(index, layer, ways, step) for index, layer in enumerate(layers)]

    def _layer(self, index: int, layer: DecoderLayer, ways: Ways, step: Step) -> LayerOperations:
        attention, mlp, norm = layer.self_attn, layer.mlp, layer.post_attention_layernorm
        up = mlp.gate_up_proj if isinstance(mlp, GatedMLP) else mlp.up_proj
        return LayerOperations(
            attention,
            mlp,
            qkv=self._starts[index],
            output=ways.product("o", attention.o_proj, step),
            up=ways.product("gate_up", up, step, norm),
            down=ways.product("down", mlp.down_proj, step),
            norm=norm,
            next_norm=self._norms[index + 1],
            after=self._starts[index + 1],
        )

    def logits(self, hidden: torch.Tensor, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Embedded tokens [T, hidden_size], written over → logits [L, vocab_size] of the wanted ones."""
        x, hidden = self._starts[0].form.norm(self._norms[0], hidden)
        for layer, cache in zip(self.layers, caches, strict=True):
            x, hidden = layer.forward(x, hidden, batch, cache, self.rope)
        assert isinstance(x, torch.Tensor)
        if len(batch.logits_indices) != len(x) or not self.decodes:
            x = x[batch.logits_indices]
        return self._starts[-1].whole(x)


def _see(batch: ForwardBatch, name: str, x: Rows, product: Product) -> None:
    """Keep what a product takes; one that normalises its input itself has nothing to tell."""
    if batch.record is not None and not isinstance(product.form, RawForm):
        batch.see(name, x.natural() if isinstance(x, OperandRows) else x)
