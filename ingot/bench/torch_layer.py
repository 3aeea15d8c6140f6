"""A decoder layer in PyTorch's own operators: what a kernel or a fused layer is compared with.

Owns the plain formulation of each part. Keys and values lie contiguous a request, as PyTorch's attention
wants them. Knows no Ingot kernel.

    hidden = torch_layer(config, layer, hidden, keys, values, turns)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ingot.config.model import DecoderConfig
from ingot.layers.decoder import DecoderLayer
from ingot.layers.linear import Linear
from ingot.layers.mlp import MLP
from ingot.layers.norm import LayerNorm, RMSNorm

Turns = tuple[torch.Tensor, torch.Tensor]  # cosines and sines [M, 1, dim / 2]


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [M, 2 I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(x: torch.Tensor, turns: Turns) -> torch.Tensor:
    """Rotary embedding of [M, heads, head_dim], half-split order; channels past the rotary ones stay."""
    cos, sin = turns
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """[M, heads, 1 or T, head_dim] over [M, kv_heads, tokens, head_dim]."""
    grouped = query.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(query, keys, values, is_causal=causal, enable_gqa=grouped)


def torch_layer(
    config: DecoderConfig,
    layer: DecoderLayer,
    hidden: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    turns: Turns | None,
) -> torch.Tensor:
    """One decode step of a layer: [M, hidden_size] → the same.

    Args:
        keys, values: [M, kv_heads, tokens, head_dim]; the last token of each is written.
    """
    rows, heads, kv_heads = hidden.shape[0], config.num_heads, config.num_kv_heads
    qkv = _linear(layer.self_attn.qkv_proj, _norm(layer.input_layernorm, hidden))
    q, k, v = qkv.view(rows, heads + 2 * kv_heads, config.head_dim).split([heads, kv_heads, kv_heads], dim=1)
    if turns is not None:
        q, k = rotate(q, turns), rotate(k, turns)
    keys[:, :, -1], values[:, :, -1] = k, v
    attended = attention(q[:, :, None], keys, values).reshape(rows, -1)
    hidden = hidden + _linear(layer.self_attn.o_proj, attended)
    inner = _norm(layer.post_attention_layernorm, hidden)
    mlp = layer.mlp
    if isinstance(mlp, MLP):
        activated = F.gelu(_linear(mlp.up_proj, inner), approximate="tanh")
    else:
        activated = silu_mul(_linear(mlp.gate_up_proj, inner))
    return hidden + _linear(mlp.down_proj, activated)


def _norm(norm: RMSNorm | LayerNorm, x: torch.Tensor) -> torch.Tensor:
    if isinstance(norm, RMSNorm):
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
    return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.eps)


def _linear(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    weight = linear._parameters["weight"]
    assert weight is not None
    return F.linear(x, weight, linear._parameters.get("bias"))
