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

from ingot.layers.cross_attention import CrossAttention
from ingot.layers.decoder import Decoder
from ingot.layers.forward_batch import Encoded, LayerCache
from ingot.measure.align.stages.encoder_stages import EncoderStages
from ingot.runtime.step.one_layer import request_batch

Get = Callable[[int, str, nn.Module | None], torch.Tensor | None]
_BLOCK = 64
CROSS_PARTS = ("cross_keys", "cross_values")
_NORMS = ("input_norm", "post_norm")
_BRIDGE = "encoder.projector"


def encoder_source(model: Decoder, stage: str) -> str | None:
    """The stage that a stage of the encoder reads; None of another stage."""
    stages = EncoderStages.of(model.config)
    if stages is not None and stage.startswith("layers.") and stage.rpartition(".")[2] in CROSS_PARTS:
        return stages.kept
    return None if stages is None or not stage.startswith("encoder.") else stages.source(stage)


def isolated_encoder(model: Decoder, stage: str, get: Get) -> torch.Tensor | None:
    """What the engine has at the stage, computed from the place before as the reference had it, [positions,
    size]; None where that is not recorded.

    Args:
        get: the reference's stage of a step, as a module reads it.
    """
    stages = EncoderStages.of(model.config)
    assert stages is not None
    source, kind = encoder_source(model, stage), stage.rpartition(".")[2]
    assert source is not None
    layer = stages.layer_of(stage)
    if kind in CROSS_PARTS:
        owner = layer or f"layers.{stage.split('.')[1]}"
        linear = model.get_submodule(f"{owner}.encoder_attn.kv_proj")
        x = get(0, source, linear)
        return None if x is None else linear(x).chunk(2, dim=-1)[CROSS_PARTS.index(kind)]
    if layer is not None:
        return _of_layer(model, stages, layer, stage, get)
    x = get(0, source, model.get_submodule(stage) if stage == _BRIDGE else None)
    return None if x is None else _around(model, stages, stage, x)


def _around(model: Decoder, stages: EncoderStages, stage: str, x: torch.Tensor) -> torch.Tensor:
    """A stage outside the layers."""
    encoder: Any = model.encoder
    match stage:
        case "encoder.conv1" | "encoder.conv2":
            x = F.gelu(x) if stage == "encoder.conv2" else x
            frames: torch.Tensor = model.get_submodule(stage)(x.T[None])[0]
            return frames.T
        case "encoder.embedding":
            return F.gelu(x) + model.get_parameter("encoder.embed_positions.weight")[: len(x)].to(x)
        case "encoder.final_norm":
            found: torch.Tensor = model.get_submodule("encoder.norm")(x)[0]
        case "encoder.vit.patch_embedding":
            found = encoder.vit.patch_embedding(stages.as_features(x)[None])[0]
        case "encoder.vit.embedding":
            found = (
                torch.cat([encoder.vit.class_embedding.view(1, -1), x]) + encoder.vit.embed_positions.weight
            )
        case "encoder.ln_vision":
            found = encoder.ln_vision(x)[0]
        case "encoder.qformer.embedding":
            found = encoder.qformer.norm(encoder.qformer.queries)[0]
        case _:
            found = encoder.projector(x if encoder.qformer is not None else encoder.joined(x))
    return found


def _of_layer(model: Decoder, stages: EncoderStages, name: str, stage: str, get: Get) -> torch.Tensor | None:
    kind, layer = stage.rpartition(".")[2], _layer(model, name)
    linears = {"attended": layer.self_attn.qkv_proj, "attention": layer.self_attn.o_proj}
    linears |= {"inner": layer.mlp.up_proj, "mlp": layer.mlp.down_proj}
    if stages.crosses(name):
        cross = layer.encoder_attn
        linears |= {"cross_attended": cross.q_proj, "cross_attention": cross.o_proj}
    x = get(0, stages.source(stage), linears.get(kind))
    if x is None:
        return None
    if kind in linears:
        y = linears[kind](x)
        if kind == "attended":
            return layer.self_attn.attend(y, 1)
        if kind == "cross_attended":
            pair = [get(0, f"{name}.{part}", None) for part in CROSS_PARTS]
            return None if pair[0] is None or pair[1] is None else layer.encoder_attn.attend(y, *pair, 1)
        return layer.mlp.activate(y) if kind == "inner" else y
    if kind in ("residual", "cross_residual", "mlp_residual") or not (
        stages.post_norm(name) or kind in _NORMS
    ):
        stream = get(0, stages.stream(stage), None)
        return None if stream is None else stream + x
    found: torch.Tensor = _norm(layer, kind, post=stages.post_norm(name), crosses=stages.crosses(name))(x)[0]
    return found


def _layer(model: Decoder, name: str) -> Any:
    return model.get_submodule(name)


def _norm(layer: Any, kind: str, *, post: bool, crosses: bool) -> Any:
    """The norm that makes a stage of a layer."""
    if not post:
        return layer.input_layernorm if kind == "input_norm" else layer.post_attention_layernorm
    if kind == "output":
        return layer.mlp_norm
    return layer.encoder_attn_norm if kind == "post_norm" and crosses else layer.self_attn_norm


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
    batch = request_batch(rows, len(x), -(-len(x) // _BLOCK), _BLOCK, max_seq_len=len(x))
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
