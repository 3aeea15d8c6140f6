"""The Q-Former: learned queries that read a picture's patches, in post-norm layers of self-attention, in some
layers cross-attention to the picture, and MLP.

    asked = QFormer(config, ctx)(seen, pictures=2)      # [2 * P, encoder_width] → [2 * queries, hidden_size]
Source: BLIP-2 (arXiv:2301.12597) and its BertModel with ``query_tokens``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ingot.config.encoder_config import StackConfig
from ingot.config.json_config import JsonConfig
from ingot.layers.build_context import BuildContext, empty_weight
from ingot.layers.encoder_blocks.encoder import BidirectionalAttention
from ingot.layers.encoder_pass import MODULE_BY_MODULE, EncoderPass
from ingot.layers.linear import Linear
from ingot.layers.mlp import MLP
from ingot.layers.norm import LayerNorm


@dataclass(frozen=True)
class QFormerConfig(JsonConfig):
    """``encoder_width``: channels of the patches; ``cross_every``: layers 0, n, 2n … read them."""

    stack: StackConfig
    queries: int
    encoder_width: int
    cross_every: int = 2


class PatchAttention(nn.Module):
    """Queries read all positions of their picture; keys and values are one product, in that order."""

    def __init__(self, config: QFormerConfig, ctx: BuildContext) -> None:
        super().__init__()
        size, width = config.stack.hidden_size, config.encoder_width
        self.num_heads = config.stack.num_heads
        self.q_proj = Linear(size, size, bias=True, ctx=ctx.at("q_proj"))
        self.kv_proj = Linear(width, 2 * size, bias=True, ctx=ctx.at("kv_proj"))
        self.o_proj = Linear(size, size, bias=True, ctx=ctx.at("o_proj"))

    def forward(
        self,
        hidden: torch.Tensor,
        seen: torch.Tensor,
        pictures: int,
        forward_pass: EncoderPass = MODULE_BY_MODULE,
    ) -> torch.Tensor:
        """[pictures * queries, hidden_size] and [pictures * P, encoder_width] → the first's shape."""
        asked = self.q_proj(hidden)
        forward_pass.see("cross_query", asked)
        keys, values = self.kv_proj(seen).chunk(2, dim=-1)
        attended = self.attend(asked, keys, values, pictures)
        forward_pass.see("cross_attended", attended)
        return self.o_proj(attended)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pictures: int
    ) -> torch.Tensor:
        """Queries, keys and values, one row per position → the queries' shape."""
        q, k, v = (self._heads(part, pictures) for part in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1)

    def _heads(self, x: torch.Tensor, pictures: int) -> torch.Tensor:
        """[pictures * N, hidden_size] → [pictures, num_heads, N, head_dim]."""
        return x.unflatten(0, (pictures, -1)).unflatten(2, (self.num_heads, -1)).transpose(1, 2)


class QFormerLayer(nn.Module):
    """norm(x + attention(x)), then the same with cross-attention, then with the MLP."""

    def __init__(self, config: QFormerConfig, ctx: BuildContext, index: int) -> None:
        super().__init__()
        stack = config.stack
        self.self_attn = BidirectionalAttention(stack, ctx.at("self_attn"))
        self.self_attn_norm = LayerNorm(stack.hidden_size, stack.norm_eps, ctx)
        self.encoder_attn: PatchAttention | None = None
        if index % config.cross_every == 0:
            self.encoder_attn = PatchAttention(config, ctx.at("encoder_attn"))
            self.encoder_attn_norm = LayerNorm(stack.hidden_size, stack.norm_eps, ctx)
        self.mlp = MLP(stack, ctx.at("mlp"))
        self.mlp_norm = LayerNorm(stack.hidden_size, stack.norm_eps, ctx)

    def forward(
        self,
        hidden: torch.Tensor,
        seen: torch.Tensor,
        pictures: int,
        forward_pass: EncoderPass = MODULE_BY_MODULE,
    ) -> torch.Tensor:
        """Queries [pictures * queries, hidden_size] and a picture's outputs → the queries' shape."""
        forward_pass.see("attn_in", hidden)
        attended = self.self_attn.attend(self.self_attn.qkv_proj(hidden), pictures, forward_pass)
        forward_pass.see("attended", attended)
        hidden = _joined(hidden, self.self_attn.o_proj(attended), self.self_attn_norm, forward_pass)
        if self.encoder_attn is not None:
            forward_pass.see("cross_in", hidden)
            found = self.encoder_attn(hidden, seen, pictures, forward_pass)
            hidden = _joined(hidden, found, self.encoder_attn_norm, forward_pass)
        forward_pass.see("mlp_in", hidden)
        inner = self.mlp.activate(self.mlp.up_proj(hidden))
        forward_pass.see("inner", inner)
        return _joined(hidden, self.mlp.down_proj(inner), self.mlp_norm, forward_pass)


def _joined(
    hidden: torch.Tensor, branch: torch.Tensor, norm: LayerNorm, forward_pass: EncoderPass
) -> torch.Tensor:
    """norm(hidden + branch)."""
    total = hidden + branch
    forward_pass.see("stream", total)
    found: torch.Tensor = norm(total)[0]
    return found


class QFormer(nn.Module):
    """Learned queries, their norm, the layers."""

    def __init__(self, config: QFormerConfig, ctx: BuildContext) -> None:
        super().__init__()
        stack = config.stack
        self.queries = empty_weight(config.queries, stack.hidden_size, dtype=ctx.dtype)
        self.norm = LayerNorm(stack.hidden_size, stack.norm_eps, ctx)
        self.layers = nn.ModuleList(
            QFormerLayer(config, ctx.at(f"layers.{index}"), index) for index in range(stack.num_layers)
        )

    def forward(
        self, seen: torch.Tensor, pictures: int, forward_pass: EncoderPass = MODULE_BY_MODULE
    ) -> torch.Tensor:
        """[pictures * P, encoder_width] → [pictures * queries, hidden_size]."""
        hidden: torch.Tensor = self.norm(self.queries)[0].repeat(pictures, 1)
        for layer in self.layers:
            hidden = layer(hidden, seen, pictures, forward_pass)
            forward_pass.layer_ended()
        return hidden
