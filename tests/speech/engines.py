"""Faults that are planted in a tiny engine of speech after it was loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ingot.engine.engine_loader import Engine, load_engine

FAULTS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = {
    # what → tensor of the model, what becomes of it, the place that is named
    "conv1 by 1 %": ("encoder.conv1.weight", lambda w: w * 1.01, "encoder.conv1"),
    "conv2's bias": ("encoder.conv2.bias", lambda w: w.roll(1), "encoder.conv2"),
    "positions by one": ("encoder.embed_positions.weight", lambda w: w.roll(1, 0), "encoder.embed_positions"),
    "a row of queries": (
        "encoder.layers.1.self_attn.qkv_proj.weight",
        lambda w: w.index_fill(0, torch.tensor([3]), 0),
        "encoder.layers.1.self_attn.qkv_proj (queries)",
    ),
    "keys' sign": (
        "encoder.layers.0.self_attn.qkv_proj.weight",
        lambda w: torch.cat([w[:32], -w[32:64], w[64:]]),
        "encoder.layers.0.self_attn.qkv_proj (keys)",
    ),
    "output product": (
        "encoder.layers.1.self_attn.o_proj.weight",
        torch.t,
        "encoder.layers.1.self_attn.o_proj",
    ),
    "norm": (
        "encoder.layers.0.post_attention_layernorm.weight",
        lambda w: w * 1.01,
        "encoder.layers.0.post_attention_layernorm",
    ),
    "up": ("encoder.layers.1.mlp.up_proj.bias", lambda w: w + 0.01, "encoder.layers.1.mlp (activation)"),
    "down": ("encoder.layers.0.mlp.down_proj.weight", lambda w: w * 1.01, "encoder.layers.0.mlp.down_proj"),
    "last norm": ("encoder.norm.bias", lambda w: w + 0.01, "encoder.norm"),
    "cross values": (
        "layers.1.encoder_attn.kv_proj.weight",
        lambda w: torch.cat([w[:32], w[32:] * 1.01]),
        "layers.1.encoder_attn.kv_proj",
    ),
    "cross queries": (
        "layers.0.encoder_attn.q_proj.weight",
        lambda w: w * 1.01,
        "layers.0.encoder_attn.q_proj",
    ),
    "cross output": ("layers.1.encoder_attn.o_proj.bias", lambda w: w + 0.01, "layers.1.encoder_attn.o_proj"),
    "cross norm": (
        "layers.1.encoder_attn_layernorm.bias",
        lambda w: w + 0.01,
        "layers.1.encoder_attn_layernorm",
    ),
    "decoder's MLP": ("layers.1.mlp.down_proj.weight", lambda w: w * 1.01, "layers.1.mlp.down_proj"),
}


def planted(fault: str, *args: Any, **options: Any) -> Engine:
    """What ``load_engine`` gives, with a fault in it."""
    name, changed, _ = FAULTS[fault]
    loaded = load_engine(*args, **options)
    tensor = loaded.model.get_parameter(name)
    tensor.data.copy_(changed(tensor.data).clone())
    return loaded
