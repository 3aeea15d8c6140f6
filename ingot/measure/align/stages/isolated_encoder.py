"""One module of an encoder, or of cross-attention, run on the reference's input."""

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
    """The stage that a stage of the encoder reads; None for other stages."""
    stages = EncoderStages.of(model.config)
    if stages is not None and stage.startswith("layers.") and stage.rpartition(".")[2] in CROSS_PARTS:
        return stages.kept
    return None if stages is None or not stage.startswith("encoder.") else stages.source(stage)


def isolated_encoder(model: Decoder, stage: str, get: Get) -> torch.Tensor | None:
    """The engine's stage, computed from the reference's place before it, [positions, size]; None if that is
    not recorded. ``get`` is the reference's stage of a step, as a module reads it.
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
    kind = stage.rpartition(".")[2]
    layer: Any = model.get_submodule(name)
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
    if not stages.post_norm(name):
        norm = layer.input_layernorm if kind == "input_norm" else layer.post_attention_layernorm
    elif kind == "output":
        norm = layer.mlp_norm
    else:
        crosses = kind == "post_norm" and stages.crosses(name)
        norm = layer.encoder_attn_norm if crosses else layer.self_attn_norm
    found: torch.Tensor = norm(x)[0]
    return found


def cross_attended_of(
    attention: CrossAttention, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """The input of cross-attention's last product for states [T, hidden_size] over [P, kv_size]."""
    query = attention.query(attention.q_proj(x))
    count, heads, size = len(keys), attention.config.num_kv_heads, attention.config.head_dim
    blocks = -(-count // _BLOCK)
    second = LayerCache.zeros(blocks, heads, _BLOCK, size, keys.dtype, keys.device)
    for side, part in ((second.keys, keys), (second.values, values)):
        padded = F.pad(part, (0, 0, 0, blocks * _BLOCK - count))
        side.copy_(padded.view(blocks, _BLOCK, heads, size).transpose(1, 2))
    tables = torch.arange(blocks, dtype=torch.int32, device=x.device).expand(len(x), -1).contiguous()
    lens = torch.full((len(x),), count, dtype=torch.int32, device=x.device)
    rows = torch.arange(len(x), device=x.device)
    encoded = Encoded(tables, lens, rows, count, some_without=False)
    batch = request_batch(rows, len(x), -(-len(x) // _BLOCK), _BLOCK, max_seq_len=len(x))
    cache = LayerCache(second.keys, second.values, encoded=second)
    return attention.attend(query, replace(batch, encoded=encoded), cache).flatten(1)
