"""One module of an encoder, or of cross-attention, run on the reference's input.

Owns the way from a stage's name to the call. Knows no verdict.

    got = isolated_encoder(model, "encoder.layers.1.mlp", get)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ingot.align.stages import LOG_MEL
from ingot.layers.batch import Encoded, LayerCache
from ingot.layers.cross_attention import CrossAttention
from ingot.layers.decoder import Decoder
from ingot.runtime.one_layer import request_batch

Get = Callable[[int, str, nn.Module | None], torch.Tensor | None]
_BLOCK = 64
CROSS_PARTS = ("cross_keys", "cross_values")
_OF_LAYER = {
    "attended": "input_norm",
    "attention": "attended",
    "residual": "attention",
    "post_norm": "residual",
    "inner": "post_norm",
    "mlp": "inner",
    "output": "mlp",
}


def encoder_source(model: Decoder, stage: str) -> str | None:
    """The stage that a stage of the encoder reads; None of another stage."""
    kind = stage.rpartition(".")[2]
    if kind in CROSS_PARTS:
        return "encoder.final_norm"
    if not stage.startswith("encoder."):
        return None
    if not stage.startswith("encoder.layers."):
        last = f"encoder.layers.{_num_layers(model) - 1}.output"
        names = {"conv1": LOG_MEL, "conv2": "encoder.conv1", "embedding": "encoder.conv2", "final_norm": last}
        return names[kind]
    index = int(stage.split(".")[2])
    if kind == "input_norm":
        return f"encoder.layers.{index - 1}.output" if index else "encoder.embedding"
    return f"encoder.layers.{index}.{_OF_LAYER[kind]}"


def isolated_encoder(model: Decoder, stage: str, get: Get) -> torch.Tensor | None:
    """What the engine has at the stage, computed from the place before as the reference had it, [positions,
    size]; None where that is not recorded.

    Args:
        get: the reference's stage of a step, as a module reads it.
    """
    source, kind = encoder_source(model, stage), stage.rpartition(".")[2]
    if kind in CROSS_PARTS:
        linear = model.get_submodule(f"layers.{stage.split('.')[1]}.encoder_attn.kv_proj")
        x = get(0, source or "", linear)
        return None if x is None else linear(x).chunk(2, dim=-1)[CROSS_PARTS.index(kind)]
    if stage.startswith("encoder.layers."):
        return _of_layer(model, stage, source or "", get)
    x = None if source is None else get(0, source, None)
    if x is None:
        return None
    if kind == "embedding":
        places = model.get_parameter("encoder.embed_positions.weight")[: len(x)]
        return F.gelu(x) + places.to(x)
    if kind == "final_norm":
        found: torch.Tensor = model.get_submodule("encoder.norm")(x)[0]
        return found
    x = F.gelu(x) if kind == "conv2" else x
    rows: torch.Tensor = model.get_submodule(stage)(x.T[None])[0]
    return rows.T


def _of_layer(model: Decoder, stage: str, source: str, get: Get) -> torch.Tensor | None:
    name, _, kind = stage.rpartition(".")
    layer: Any = model.get_submodule(name)
    linears = {"attended": layer.self_attn.qkv_proj, "attention": layer.self_attn.o_proj}
    linears |= {"inner": layer.mlp.up_proj, "mlp": layer.mlp.down_proj}
    x = get(0, source, linears.get(kind))
    if x is None:
        return None
    if kind == "input_norm":
        return layer.input_layernorm(x)[0]
    if kind == "post_norm":
        return layer.post_attention_layernorm(x)[0]
    if kind in linears:
        y = linears[kind](x)
        y = layer.self_attn.attend(y, 1) if kind == "attended" else y
        return layer.mlp.activate(y) if kind == "inner" else y
    before = encoder_source(model, f"{name}.input_norm") if kind == "residual" else f"{name}.residual"
    stream = get(0, before or "", None)
    return None if stream is None else stream + x


def cross_attended_of(
    attention: CrossAttention, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """What cross-attention's last product reads for normalised states [T, hidden_size], over keys and values
    [P, kv_size].
    """
    query = attention.query(attention.q_proj(x))
    count = len(keys)
    second = _cache_of(attention, keys, values)
    tables = (
        torch.arange(len(second.keys), dtype=torch.int32, device=x.device).expand(len(x), -1).contiguous()
    )
    lens = torch.full((len(x),), count, dtype=torch.int32, device=x.device)
    rows = torch.arange(len(x), device=x.device)
    encoded = Encoded(tables, lens, rows, count, some_without=False)
    batch = request_batch(rows, rows, len(x), 1, max_seq_len=len(x))
    cache = LayerCache(second.keys, second.values, encoded=second)
    return attention.attend(query, replace(batch, encoded=encoded), cache).flatten(1)


def _cache_of(attention: CrossAttention, keys: torch.Tensor, values: torch.Tensor) -> LayerCache:
    """A second cache that holds keys and values [P, kv_size] in its first blocks."""
    heads, size = attention.config.num_kv_heads, attention.config.head_dim
    blocks = -(-len(keys) // _BLOCK)
    cache = LayerCache.zeros(blocks, heads, _BLOCK, size, keys.dtype, keys.device)
    for side, part in ((cache.keys, keys), (cache.values, values)):
        padded = F.pad(part, (0, 0, 0, blocks * _BLOCK - len(part)))
        side.copy_(padded.view(blocks, _BLOCK, heads, size).transpose(1, 2))
    return cache


def _num_layers(model: Decoder) -> int:
    layers: Any = model.get_submodule("encoder.layers")
    return len(layers)
