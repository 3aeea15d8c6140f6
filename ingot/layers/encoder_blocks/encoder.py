"""The encoder's interface, and the bidirectional pre-norm layers that encoders share.

hidden = EncoderStack(config, ctx)(hidden, inputs, forward_pass)     # [inputs * positions, hidden_size]
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from ingot.config.encoder_config import StackConfig
from ingot.kernels.attention.encoder_attention import (
    encoder_attention,
    encoder_attention_reference,
    takes_windows,
)
from ingot.layers.build_context import BuildContext
from ingot.layers.encoder_pass import MODULE_BY_MODULE, EncoderPass
from ingot.layers.linear import Linear
from ingot.layers.mlp import MLP
from ingot.layers.norm import LayerNorm
from ingot.layers.products.layer_products import BentProduct, Product
from ingot.layers.products.product_choice import by_scheme
from ingot.layers.products.row_forms import DenseForm

Biases = tuple[torch.Tensor, ...]


class Encoder(Protocol):
    """What an architecture's ``encoder`` builds."""

    @property
    def longest(self) -> tuple[int, ...]:
        """The shape of features with the most outputs."""
        ...

    def positions(self, shape: tuple[int, ...]) -> int:
        """Outputs of features of this shape."""
        ...

    def __call__(self, features: torch.Tensor, forward_pass: EncoderPass) -> torch.Tensor:
        """Features of one input, or of N of one shape [N, ...], in the encoder's dtype → [positions,
        hidden_size], inputs end to end.
        """
        ...


class BidirectionalAttention(nn.Module):
    """Attention of every position to its input; queries, keys and values are one product, in that order."""

    def __init__(self, config: StackConfig, ctx: BuildContext) -> None:
        super().__init__()
        size, output = config.hidden_size, ctx.at("o_proj")
        self.num_heads = config.num_heads
        self.qkv_proj = Linear(size, 3 * size, bias=True, ctx=ctx.at("qkv_proj"))
        group = size // config.num_heads
        self.o_proj = Linear(size, size, bias=True, ctx=output, input_group=group, free_order=True)

    def attend(
        self, joined: torch.Tensor, inputs: int, forward_pass: EncoderPass = MODULE_BY_MODULE
    ) -> torch.Tensor:
        """Queries, keys and values [inputs * P, 3 hidden_size] → [inputs * P, hidden_size]."""
        for name, part in zip(("query", "keys", "values"), joined.chunk(3, dim=-1), strict=True):
            forward_pass.see(name, part)
        if forward_pass.fused and takes_windows(joined, inputs, self.num_heads):
            return encoder_attention(joined, inputs, self.num_heads)
        return encoder_attention_reference(joined, inputs, self.num_heads)


class EncoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: StackConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(config.hidden_size, config.norm_eps, ctx)
        self.self_attn = BidirectionalAttention(config, ctx.at("self_attn"))
        self.post_attention_layernorm = LayerNorm(config.hidden_size, config.norm_eps, ctx)
        self.mlp = MLP(config, ctx.at("mlp"))

    def forward(
        self, hidden: torch.Tensor, inputs: int = 1, forward_pass: EncoderPass = MODULE_BY_MODULE
    ) -> torch.Tensor:
        """[inputs * P, hidden_size], which may be overwritten → the same shape."""
        attention, mlp = self.self_attn, self.mlp
        linears = (attention.qkv_proj, attention.o_proj, mlp.up_proj, mlp.down_proj)
        qkv, output, up, down = (self._product(linear, forward_pass) for linear in linears)
        x, hidden = qkv.form.norm(self.input_layernorm, hidden)
        forward_pass.see("attn_in", x)
        attended = output.in_form(attention.attend(qkv.full_output(x), inputs, forward_pass))
        forward_pass.see("attended", attended)
        x, hidden = output.join(attended, hidden, self.post_attention_layernorm, up.form)
        del attended  # memory of many windows
        forward_pass.see("stream", hidden)
        forward_pass.see("mlp_in", x)
        inner = up.inner(x, mlp, down.form)
        forward_pass.see("inner", inner)
        hidden = down.added(inner, hidden)
        forward_pass.see("stream", hidden)
        return hidden

    def adds_in_place(self, forward_pass: EncoderPass) -> bool:
        """Whether ``added`` is a way through this layer: with dense products in 16 bits, unobserved."""
        linears = (self.self_attn.qkv_proj, self.self_attn.o_proj, self.mlp.up_proj, self.mlp.down_proj)
        dense = all(linear.scheme.dense and linear.has_bias for linear in linears)
        return forward_pass.unobserved and dense and self.input_layernorm.weight.dtype.itemsize == 2

    def added(
        self, hidden: torch.Tensor, lacking: Biases, inputs: int, forward_pass: EncoderPass
    ) -> tuple[torch.Tensor, Biases]:
        """``forward`` of hidden + ``lacking``, in its form. The library adds products to hidden states but no
        bias besides, so that the next norm adds it; sums are rounded as often as in ``forward``.
        """
        attention, mlp = self.self_attn, self.mlp
        output, down = attention.o_proj, mlp.down_proj
        behind_output, behind_down = _bias(output), _bias(down)
        x, hidden = self.input_layernorm.behind(hidden, lacking)
        attended = attention.attend(attention.qkv_proj(x), inputs, forward_pass)
        hidden = hidden.addmm_(attended, _weight(output).t())
        del x, attended  # memory of many windows
        x, _ = self.post_attention_layernorm.behind(hidden, (behind_output,), keeps=False)
        inner = BentProduct(mlp.up_proj).inner(x, mlp, DenseForm())
        assert isinstance(inner, torch.Tensor)
        return hidden.addmm_(inner, _weight(down).t()), (behind_output, behind_down)

    def _product(self, linear: Linear, forward_pass: EncoderPass) -> Product:
        if not forward_pass.fused:
            return Product(linear, fused=False)
        if linear is self.mlp.up_proj and linear.scheme.dense and linear.has_bias:
            return BentProduct(linear)
        return by_scheme(linear, self.input_layernorm.weight.dtype)


class EncoderStack(nn.ModuleList):
    """Layers one after another; the norm after them is the architecture's."""

    def __init__(self, config: StackConfig, ctx: BuildContext) -> None:
        super().__init__(EncoderLayer(config, ctx.at(f"{index}")) for index in range(config.num_layers))

    def forward(
        self, hidden: torch.Tensor, inputs: int = 1, forward_pass: EncoderPass = MODULE_BY_MODULE
    ) -> torch.Tensor:
        """[inputs * P, hidden_size], which may be overwritten → the same shape."""
        forward_pass.see("stream", hidden)
        lacking: Biases = ()
        for layer in self:
            assert isinstance(layer, EncoderLayer)
            if layer.adds_in_place(forward_pass):
                hidden, lacking = layer.added(hidden, lacking, inputs, forward_pass)
            else:
                hidden, lacking = layer(_completed(hidden, lacking), inputs, forward_pass), ()
            forward_pass.layer_ended()
        return _completed(hidden, lacking)


def _completed(hidden: torch.Tensor, lacking: Biases) -> torch.Tensor:
    """hidden [T, hidden_size] + the biases that it lacks, rounded once; overwritten."""
    if not lacking:
        return hidden
    return hidden.add_(sum(bias.float() for bias in lacking))


def _weight(linear: Linear) -> torch.Tensor:
    assert isinstance(linear.weight, torch.Tensor)
    return linear.weight


def _bias(linear: Linear) -> torch.Tensor:
    assert isinstance(linear.bias, torch.Tensor)
    return linear.bias
