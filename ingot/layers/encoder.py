"""What encodes a request's inputs: the interface, and the layers that several encoders share.

Owns bidirectional attention and its pre-norm layer. Knows no features and no architecture: what is before the
layers and after them is in ``models/``.

    hidden = EncoderStack(config, ctx)(hidden, inputs)       # [inputs * positions, hidden_size]
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from ingot.config.encoder import StackConfig
from ingot.layers.context import BuildContext
from ingot.layers.linear import Linear
from ingot.layers.mlp import MLP
from ingot.layers.norm import LayerNorm


class Encoder(Protocol):
    """The module that an architecture's ``encoder`` builds; ``EncoderConfig`` says what features it takes."""

    @property
    def longest(self) -> tuple[int, ...]:
        """The shape of features that have the most outputs."""
        ...

    def positions(self, shape: tuple[int, ...]) -> int:
        """How many outputs features of this shape have."""
        ...

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """Features of one input, or of N of one shape [N, ...], in the model's dtype → [positions,
        hidden_size], of one after another.
        """
        ...


class BidirectionalAttention(nn.Module):
    """Every position attends to all of its input; queries, keys and values are one product, in that order."""

    def __init__(self, config: StackConfig, ctx: BuildContext) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.qkv_proj = Linear(size, 3 * size, bias=True, ctx=ctx.at("qkv_proj"))
        self.o_proj = Linear(
            size,
            size,
            bias=True,
            ctx=ctx.at("o_proj"),
            input_group=size // config.num_heads,
            free_order=True,
        )

    def forward(self, x: torch.Tensor, inputs: int = 1) -> torch.Tensor:
        """[inputs * P, hidden_size] → the same shape."""
        heads = self.qkv_proj(x).unflatten(1, (3, self.num_heads, -1)).unflatten(0, (inputs, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # [inputs, num_heads, P, head_dim] each
        attended = F.scaled_dot_product_attention(query, key, value)
        output: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(2).flatten(0, 1))
        return output


class EncoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: StackConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(config.hidden_size, config.norm_eps, ctx)
        self.self_attn = BidirectionalAttention(config, ctx.at("self_attn"))
        self.post_attention_layernorm = LayerNorm(config.hidden_size, config.norm_eps, ctx)
        self.mlp = MLP(config, ctx.at("mlp"))

    def forward(self, hidden: torch.Tensor, inputs: int = 1) -> torch.Tensor:
        """[inputs * P, hidden_size] → the same shape."""
        x, hidden = self.input_layernorm(hidden)
        x, hidden = self.post_attention_layernorm(self.self_attn(x, inputs), hidden)
        inner = self.mlp.activate(self.mlp.up_proj(x))
        return hidden + self.mlp.down_proj(inner)


class EncoderStack(nn.ModuleList):
    """Layers one after another; the norm after them is the architecture's."""

    def __init__(self, config: StackConfig, ctx: BuildContext) -> None:
        super().__init__(EncoderLayer(config, ctx.at(f"{index}")) for index in range(config.num_layers))

    def forward(self, hidden: torch.Tensor, inputs: int = 1) -> torch.Tensor:
        """[inputs * P, hidden_size] → the same shape."""
        for layer in self:
            hidden = layer(hidden, inputs)
        return hidden
