"""An engine's modules as specs: weights as it holds them, settings as its config says."""

from __future__ import annotations

from typing import Literal

import torch

from ingot.config.decoder_config import DecoderConfig, RopeConfig
from ingot.layers.decoder import Decoder
from ingot.layers.embedding import rounded_scale
from ingot.layers.linear import Linear
from ingot.layers.rotary import RotaryTable, frequencies
from ingot.measure.align.diagnosis.stage_spec import (
    AttentionSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MlpSpec,
    RopeSpec,
    Spec,
    SumSpec,
)
from ingot.measure.align.first_divergence import Divergence
from ingot.reference.plain_layer import ReadVector, norm_spec, plain_attention, plain_mlp, post_norm_spec


def read_stage(divergence: Divergence, model: Decoder, config: DecoderConfig) -> Spec | None:
    """The spec of a divergence's stage; None if it cannot be run again."""
    device = model.embed_tokens.weight.device
    if divergence.stage == "embedding":
        return read_embedding(model, divergence.positions.to(device))
    if divergence.stage == "final_norm":
        return norm_spec(config, "norm", vectors(model))
    if divergence.stage == "logits":
        return HeadSpec("lm_head", *linear_tensors(model, "lm_head"), cap=config.logit_softcap)
    if divergence.layer is None:
        return None
    name = f"layers.{divergence.layer}"
    kind = divergence.stage.removeprefix(name).removeprefix(".")
    match kind:
        case "input_norm":
            return norm_spec(config, f"{name}.input_layernorm", vectors(model))
        case "post_norm":
            return norm_spec(config, f"{name}.post_attention_layernorm", vectors(model))
        case "mlp":
            return read_mlp(f"{name}.mlp", model, config)
        case "residual" | "output":
            return read_sum(name, kind, divergence, model, config)
    positions = all_positions(divergence)
    if positions is None:
        return None
    positions = positions.to(device)
    prompt_len = positions.shape[0] - divergence.step
    if kind == "attention":
        return read_attention(divergence.layer, model, config, positions, prompt_len)
    return read_layer(divergence.layer, model, config, positions, prompt_len) if not kind else None


def read_sum(name: str, kind: str, divergence: Divergence, model: Decoder, config: DecoderConfig) -> SumSpec:
    """A branch, normed if the config has post-norms, and the hidden states to which it is added."""
    of: Literal["attention", "mlp"] = "attention" if kind == "residual" else "mlp"
    post = "self_attn_norm" if of == "attention" else "mlp_norm"
    norm = post_norm_spec(config, f"{name}.{post}", vectors(model))
    device = model.embed_tokens.weight.device
    branch = divergence.inputs.to(device).float()
    added = branch if norm is None else norm.run(branch)
    return SumSpec(name, of, divergence.expected.to(device).float() - added, norm=norm)


def all_positions(divergence: Divergence) -> torch.Tensor | None:
    """Positions of every row of ``inputs``, [S]; None if earlier tokens are missing."""
    rows, positions = divergence.inputs.shape[0], divergence.positions.cpu()
    if rows != positions.shape[0]:
        positions = torch.arange(rows) + int(positions[-1]) - rows + 1
    return positions if int(positions[0]) == 0 else None


def vectors(model: Decoder) -> ReadVector:
    return lambda name: model.get_parameter(name).float()


def linear_tensors(model: Decoder, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight [out, in] and bias [out] of a linear layer, dequantized to fp32."""
    linear = model.get_submodule(name)
    assert isinstance(linear, Linear)
    bias = linear._parameters.get("bias")
    return linear.dequantized(torch.float32), None if bias is None else bias.float()


def read_attention(
    layer: int, model: Decoder, config: DecoderConfig, positions: torch.Tensor, prompt_len: int
) -> AttentionSpec:
    """Attention over tokens at ``positions`` [S], of which the first ``prompt_len`` are the prompt."""
    name = f"layers.{layer}.self_attn"
    rope = None if config.rope is None else rope_spec(config.rope, positions, prompt_len)
    plain = plain_attention(config, layer, name, vectors(model), positions, None)
    qkv, qkv_bias = linear_tensors(model, f"{name}.qkv_proj")
    output, output_bias = linear_tensors(model, f"{name}.o_proj")
    return AttentionSpec(
        **vars(plain), rope=rope, qkv=qkv, qkv_bias=qkv_bias, output=output, output_bias=output_bias
    )


def rope_spec(rope: RopeConfig, positions: torch.Tensor, prompt_len: int) -> RopeSpec:
    """A config's rotation for a request with this many prompt tokens."""
    alpha = 1.0
    if rope.scaling == "qwen_ntk":
        section = RotaryTable(rope, 1).offset(prompt_len)  # sections of one row
        alpha = float(2 ** (section + 1) - 1)
    turning = frequencies(rope, alpha).to(positions.device)
    return RopeSpec(turning, positions, positions, rope.attention_factor)


def read_mlp(name: str, model: Decoder, config: DecoderConfig) -> MlpSpec:
    plain = plain_mlp(config, name)
    down, down_bias = linear_tensors(model, f"{name}.down_proj")
    if plain.on is None:
        up, up_bias = linear_tensors(model, f"{name}.up_proj")
        return MlpSpec(**vars(plain), up=up, up_bias=up_bias, down=down, down_bias=down_bias)
    both, bias = linear_tensors(model, f"{name}.gate_up_proj")
    (gate, up), (gate_bias, up_bias) = both.chunk(2), (None, None) if bias is None else bias.chunk(2)
    return MlpSpec(
        **vars(plain), gate=gate, gate_bias=gate_bias, up=up, up_bias=up_bias, down=down, down_bias=down_bias
    )


def read_layer(
    layer: int, model: Decoder, config: DecoderConfig, positions: torch.Tensor, prompt_len: int
) -> LayerSpec:
    name = f"layers.{layer}"
    return LayerSpec(
        name=name,
        input_norm=norm_spec(config, f"{name}.input_layernorm", vectors(model)),
        attention=read_attention(layer, model, config, positions, prompt_len),
        post_norm=norm_spec(config, f"{name}.post_attention_layernorm", vectors(model)),
        mlp=read_mlp(f"{name}.mlp", model, config),
        attention_norm=post_norm_spec(config, f"{name}.self_attn_norm", vectors(model)),
        mlp_norm=post_norm_spec(config, f"{name}.mlp_norm", vectors(model)),
    )


def read_embedding(model: Decoder, positions: torch.Tensor) -> EmbeddingSpec:
    places = None if model.embed_positions is None else model.embed_positions.weight.float()
    tokens, scale = model.embed_tokens.weight, model.embed_tokens.scale
    scale = rounded_scale(scale, tokens.dtype)
    return EmbeddingSpec("embed_tokens", tokens.float(), places, positions, scale)
