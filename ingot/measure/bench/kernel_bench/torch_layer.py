"""A decoder layer in PyTorch's own operators, with keys and values contiguous per request."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from ingot.config.decoder_config import DecoderConfig
from ingot.layers.decoder import DecoderLayer
from ingot.reference.plain_layer import Activation, Hooks, NormSpec, PlainAttention, Turns, bend, plain_layer


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


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
    positions: torch.Tensor,
    turns: Turns | None,
) -> torch.Tensor:
    """One decode step of a layer: [M, hidden_size] → the same.

    Args:
        keys, values: [M, kv_heads, tokens, head_dim]; the last token of each is written.
        positions: [M], with their ``turns``.
    """
    hooks = _Operators(layer, keys, values)
    plain = plain_layer(config, 0, hooks.tensor, positions, turns, "layer")
    plain = replace(plain, cross=None)  # as Ingot's step, which has no encoded positions
    return plain.run(hidden, hooks)


@dataclass(frozen=True)
class _Operators(Hooks):
    """PyTorch's operators for parts of the checking decoder's layer."""

    layer: DecoderLayer
    keys: torch.Tensor
    values: torch.Tensor

    def tensor(self, name: str) -> torch.Tensor:
        return self.layer.get_parameter(name.removeprefix("layer."))

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        own = self.layer.get_submodule(name.removeprefix("layer."))._parameters
        weight = own["weight"]
        assert weight is not None
        return F.linear(x, weight, own.get("bias"))

    def norm(self, norm: NormSpec, x: torch.Tensor) -> torch.Tensor:
        size = norm.weight.shape
        if norm.kind == "layer_norm":
            return F.layer_norm(x, size, norm.weight, norm.bias, norm.eps)
        if norm.wide:
            return F.rms_norm(x.float(), size, norm.weight, norm.eps).to(x.dtype)
        return F.rms_norm(x, size, norm.weight, norm.eps)

    def bend(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        return F.silu(x) if activation == "silu" else bend(x, activation)

    def attend(
        self, attention_: PlainAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self.keys[:, :, -1], self.values[:, :, -1] = key, value
        return attention(query[:, :, None], self.keys, self.values)[:, :, 0]
