"""One decoder layer in plain PyTorch: the mathematics without a kernel.

Owns an unfused, uncached way of computing a ``DecoderLayer`` for one request, to hold kernels and their twins
against. Shares with the layer its weights and what their numbers mean, and nothing else. Knows no batch and
no cache.

    plain_layer(layer, config, hidden, positions, rope_rows, torch.float32)
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ingot.config.model import DecoderConfig
from ingot.layers.attention import Attention
from ingot.layers.decoder import DecoderLayer
from ingot.layers.linear import Linear
from ingot.layers.mlp import MLP, GatedMLP
from ingot.layers.norm import LayerNorm, RMSNorm
from ingot.quant.int8_blocks import Int8Blocks
from ingot.quant.int8_products import Int8Products
from ingot.quant.plain_rows import rounded_heads, rounded_rows


def plain_layer(
    layer: DecoderLayer,
    config: DecoderConfig,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    flips: bool = False,
    kv_dtype: str = "model",
) -> torch.Tensor:
    """A layer's hidden states for all tokens of a request, in ``dtype`` on the CPU.

    Args:
        hidden: [T, hidden_size], the layer's input.
        positions: [T] int64: 0 to T - 1.
        rope: [T, rotary dim], each token's cosines and sines; None for learned positions.
        flips: where inputs are rounded to 8 bits, each token's closest call goes the other way.
        kv_dtype: round keys and values as such a cache does (``RuntimeConfig``); ``model`` and ``auto``: not.
    """
    x = hidden.to("cpu", dtype)
    normed = _norm(layer.input_layernorm, x)
    x = x + _attention(layer.self_attn, config, normed, positions.cpu(), rope, flips, kv_dtype)
    return x + _mlp(layer.mlp, config, _norm(layer.post_attention_layernorm, x), flips)


def _norm(norm: RMSNorm | LayerNorm, x: torch.Tensor) -> torch.Tensor:
    weight = _as(norm.weight, x)
    if isinstance(norm, LayerNorm):
        return F.layer_norm(x, (x.shape[-1],), weight, _as(norm.bias, x), norm.eps)
    return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + norm.eps) * weight


def _product(linear: Linear, x: torch.Tensor, flips: bool) -> torch.Tensor:
    """x · Wᵀ + b with what the layer's weight and input mean, in the dtype of x."""
    tensors = {name: None if p is None else p.detach().cpu() for name, p in linear._parameters.items()}
    if isinstance(linear.scheme, Int8Products):
        wide = x if x.dtype == torch.float64 else x.float()
        step = tensors.get("input_scale")
        x = rounded_rows(wide, linear.scheme.input_group, step, flips=flips).to(x.dtype)
    elif isinstance(linear.scheme, Int8Blocks):
        wide = x if x.dtype == torch.float64 else x.float()
        x = linear.scheme.rounded(wide, tensors, flips=flips).to(x.dtype)
    weight, bias = linear.scheme.dequantize(tensors, linear.in_features, x.dtype), tensors.get("bias")
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def _attention(
    attention: Attention,
    config: DecoderConfig,
    x: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor | None,
    flips: bool,
    kv_dtype: str,
) -> torch.Tensor:
    qkv = _product(attention.qkv_proj, x, flips)
    qkv = qkv.unflatten(-1, (-1, config.head_dim))  # [T, heads + 2 kv_heads, d]
    query, key, value = qkv.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
    if attention.q_norm is not None and attention.k_norm is not None:
        query = _head_norm(query, attention.q_norm.weight, config.norm_eps)
        key = _head_norm(key, attention.k_norm.weight, config.norm_eps)
    if rope is not None:
        query, key = _rotated(query, rope), _rotated(key, rope)
    if config.logn_length:
        scale = torch.log(positions.double() + 1) / math.log(config.logn_length)
        query = query * scale.clamp(min=1.0).to(query)[:, None, None]
    key, value = (rounded_heads(part, kv_dtype, flips=flips) for part in (key, value))
    hidden_from = _mask(positions, config.sliding_window)
    group = config.num_heads // config.num_kv_heads
    heads = [
        _head(query[:, h], key[:, h // group], value[:, h // group], config.attention_scale, hidden_from)
        for h in range(config.num_heads)
    ]
    return _product(attention.o_proj, torch.cat(heads, dim=-1), flips)


def _head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + eps) * _as(weight, x)


def _rotated(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """x [T, heads, d] with its first channels turned, half-split order."""
    size = rope.shape[-1]
    cos, sin = _as(rope, x)[:, None].chunk(2, dim=-1)  # [T, 1, size / 2] each
    first, second = x[..., :size].chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., size:]], dim=-1)


def _mask(positions: torch.Tensor, window: int) -> torch.Tensor:
    """[T, T] bool: keys that a query must not see."""
    distance = positions[:, None] - positions[None, :]
    hidden_from = distance < 0
    return hidden_from | (distance >= window) if window else hidden_from


def _head(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, hidden_from: torch.Tensor
) -> torch.Tensor:
    """One head, [T, d]."""
    scores = (query @ key.T * scale).masked_fill(hidden_from, -math.inf)
    return torch.softmax(scores, dim=-1) @ value


def _mlp(mlp: GatedMLP | MLP, config: DecoderConfig, x: torch.Tensor, flips: bool) -> torch.Tensor:
    if isinstance(mlp, GatedMLP):
        gate, up = _product(mlp.gate_up_proj, x, flips).chunk(2, dim=-1)
        return _product(mlp.down_proj, gate * torch.sigmoid(gate) * up, flips)
    inner = _product(mlp.up_proj, x, flips)
    if config.mlp == "relu":
        bent = inner.clamp(min=0)
    else:
        bent = F.gelu(inner, approximate="tanh" if config.mlp == "gelu_tanh" else "none")
    return _product(mlp.down_proj, bent, flips)


def _as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", like.dtype)
