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
        for norm in posts:
            _permute_outputs(norm, hidden)
        _permute_layer(layer, hidden, inner)
        if layer.encoder_attn is not None:
            _permute_outputs(layer.encoder_attn_layernorm, hidden)
            _select(layer.encoder_attn.q_proj, "weight", hidden, 1)
            _select(layer.encoder_attn.kv_proj, "weight", hidden, 1)
            _permute_outputs(layer.encoder_attn.o_proj, hidden)
    if model.encoder is not None:
        _permute_speech(model.encoder, hidden, generator)
    return hidden.argsort()


def mel_order(mels: int) -> torch.Tensor:
    """[mels] int64: the features that each of a permuted encoder's channels reads."""
    return torch.randperm(mels, generator=torch.Generator().manual_seed(1))


def _permute_layer(layer: nn.Module, hidden: torch.Tensor, inner: torch.Tensor) -> None:
    """Of a decoder or an encoder: its two norms, its attention and its MLP."""
    for norm in ("input_layernorm", "post_attention_layernorm"):
        _permute_outputs(layer.get_submodule(norm), hidden)
    _select(layer.get_submodule("self_attn.qkv_proj"), "weight", hidden, 1)
    _permute_outputs(layer.get_submodule("self_attn.o_proj"), hidden)
    _permute_mlp(layer.get_submodule("mlp"), hidden, inner)


def _permute_speech(encoder: nn.Module, hidden: torch.Tensor, generator: torch.Generator) -> None:
    """An encoder of speech, whose hidden states are as wide as the decoder's; its input in ``mel_order``."""
    first = encoder.get_submodule("conv1")
    _select(first, "weight", mel_order(int(first.in_channels)), 1)  # type: ignore[arg-type]
    for name in ("conv1", "conv2", "norm"):
        _permute_outputs(encoder.get_submodule(name), hidden)
    for name in ("conv2", "embed_positions"):
        _select(encoder.get_submodule(name), "weight", hidden, 1)
    for layer in encoder.get_submodule("layers").children():
        size = layer.get_submodule("mlp.down_proj").in_features
        assert isinstance(size, int)
        _permute_layer(layer, hidden, torch.randperm(size, generator=generator))


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
