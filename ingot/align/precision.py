"""The numbers that a reference computes in.

Owns the two precisions of a comparison and how a loaded model is brought to one. Knows no class of model.

    plain, low = Precision.pair(weights=torch.float16, compute=torch.float16)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ingot.device import dtype_name
from ingot.layers.decoder import Decoder, DecoderLayer
from ingot.layers.linear import linears
from ingot.layers.mlp import GatedMLP


@dataclass(frozen=True)
class Precision:
    """``weights``: what weights are rounded to (None: not at all); ``compute``: dtype of arithmetic."""

    weights: torch.dtype | None
    compute: torch.dtype

    @property
    def name(self) -> str:
        """``fp32``, or ``fp16 (weights bf16)``."""
        plain = self.weights in (None, self.compute) or self.compute == torch.float64
        own = "fp64" if self.compute == torch.float64 else dtype_name(self.compute)
        return own if plain or self.weights is None else f"{own} (weights {dtype_name(self.weights)})"


PLAIN = Precision(None, torch.float32)


def noisy(weights: torch.dtype, compute: torch.dtype) -> Precision:
    """The precision whose distance from ``PLAIN`` is noise: the engine's own; for an fp32 engine fp64."""
    return Precision(weights, torch.float64 if compute == torch.float32 else compute)


@torch.no_grad()
def round_weights(model: nn.Module, weights: torch.dtype | None) -> None:
    """Round every floating-point parameter to a dtype's values, in place; buffers (rotary tables) stay."""
    for parameter in model.parameters() if weights is not None else ():
        if parameter.is_floating_point():
            parameter.copy_(parameter.to(weights))


@torch.no_grad()
def permute_channels(model: Decoder) -> torch.Tensor:
    """Rename the hidden and the inner channels of a model: the same mathematics, another order of sums.

    A weight in fewer bits becomes what its numbers mean, and activations are not rounded to 8 bits any more.

    Returns:
        [hidden_size] int64: ``stream[..., result]`` has the old order.
    """
    for linear in linears(model).values():
        linear.widen()
    config = model.config
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randperm(config.hidden_size, generator=generator)
    inner = torch.randperm(config.intermediate_size, generator=generator)
    embeddings = [model.embed_tokens, model.embed_positions, *([] if model.tied else [model.lm_head])]
    for module in embeddings:
        _select(module, "weight", hidden, 1)
    _permute_outputs(model.norm, hidden)
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        posts = [post for post in (layer.self_attn_norm, layer.mlp_norm) if post is not None]
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, *posts):
            _permute_outputs(norm, hidden)
        _select(layer.self_attn.qkv_proj, "weight", hidden, 1)
        _permute_outputs(layer.self_attn.o_proj, hidden)
        _permute_mlp(layer.mlp, hidden, inner)
    return hidden.argsort()


def _permute_outputs(module: nn.Module, order: torch.Tensor) -> None:
    """Rows of a linear layer, or a norm."""
    _select(module, "weight", order, 0)
    _select(module, "bias", order, 0)


def _permute_mlp(mlp: nn.Module, hidden: torch.Tensor, inner: torch.Tensor) -> None:
    up = mlp.gate_up_proj if isinstance(mlp, GatedMLP) else mlp.up_proj
    rows = torch.cat([inner, inner + len(inner)]) if isinstance(mlp, GatedMLP) else inner
    assert isinstance(up, nn.Module)
    assert isinstance(mlp.down_proj, nn.Module)
    _select(up, "weight", hidden, 1)
    _permute_outputs(up, rows)
    _select(mlp.down_proj, "weight", inner, 1)
    _permute_outputs(mlp.down_proj, hidden)


def _select(module: nn.Module | None, leaf: str, order: torch.Tensor, dim: int) -> None:
    weight = getattr(module, leaf, None)
    if isinstance(weight, torch.Tensor):
        weight.copy_(weight.index_select(dim, order.to(weight.device)))
