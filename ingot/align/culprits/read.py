"""From an engine's modules to specs.

Owns the reading of weights and settings: weights as the engine holds them, settings as its config says.
Knows no variant.

    spec = read_stage(divergence, model, config)
"""

from __future__ import annotations

import torch

from ingot.align.culprits.spec import (
    Activation,
    AttentionSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    RopeSpec,
    Spec,
    SumSpec,
)
from ingot.align.divergence import Divergence
from ingot.config.model import DecoderConfig, RopeConfig
from ingot.layers.attention import Attention, HeadNorm
from ingot.layers.decoder import Decoder, DecoderLayer
from ingot.layers.linear import Linear
from ingot.layers.mlp import MLP, GatedMLP
from ingot.layers.norm import LayerNorm, RMSNorm
from ingot.layers.rotary import RotaryTable, frequencies


def read_stage(divergence: Divergence, model: Decoder, config: DecoderConfig) -> Spec | None:
    """The spec of a divergence's stage; None for a stage that cannot be run again from what is there."""
    if divergence.stage == "embedding":
        return read_embedding(model, divergence.positions.to(model.embed_tokens.weight.device))
    if divergence.stage == "final_norm":
        return read_norm("norm", model.norm, config)
    if divergence.stage == "logits":
        return HeadSpec("lm_head", *linear_tensors(model.lm_head))
    if divergence.layer is None:
        return None
    layer, name = model.layers[divergence.layer], f"layers.{divergence.layer}"
    assert isinstance(layer, DecoderLayer)
    kind = divergence.stage.removeprefix(name).removeprefix(".")
    match kind:
        case "input_norm":
            return read_norm(f"{name}.input_layernorm", layer.input_layernorm, config)
        case "post_attention_norm" | "post_norm":
            return read_norm(f"{name}.post_attention_layernorm", layer.post_attention_layernorm, config)
        case "mlp":
            return read_mlp(f"{name}.mlp", layer.mlp, config)
        case "residual" | "output":
            device = model.embed_tokens.weight.device
            stream = (divergence.expected.float() - divergence.inputs.float()).to(device)
            return SumSpec(name, "attention" if kind == "residual" else "mlp", stream)
    positions = all_positions(divergence)
    if positions is None:
        return None
    positions = positions.to(model.embed_tokens.weight.device)
    prompt_len = positions.shape[0] - divergence.step
    if kind == "attention":
        return read_attention(f"{name}.self_attn", layer.self_attn, config, positions, prompt_len)
    return read_layer(name, layer, config, positions, prompt_len) if not kind else None


def all_positions(divergence: Divergence) -> torch.Tensor | None:
    """Positions of every row of ``inputs``, [S]; None where earlier tokens' inputs are missing."""
    rows, positions = divergence.inputs.shape[0], divergence.positions.cpu()
    if rows != positions.shape[0]:
        positions = torch.arange(rows) + int(positions[-1]) - rows + 1
    return positions if int(positions[0]) == 0 else None


def linear_tensors(linear: Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight [out, in] and bias [out] in fp32, as the layer's scheme uses them."""
    bias = linear._parameters.get("bias")
    return linear.dequantized(torch.float32), None if bias is None else bias.float()


def read_norm(name: str, norm: RMSNorm | LayerNorm, config: DecoderConfig) -> NormSpec:
    """The norm over the hidden states."""
    bias = norm._parameters.get("bias")
    return NormSpec(
        name, norm.weight.float(), None if bias is None else bias.float(), config.norm_eps, config.norm
    )


def read_attention(
    name: str, attention: Attention, config: DecoderConfig, positions: torch.Tensor, prompt_len: int
) -> AttentionSpec:
    """Attention over tokens at ``positions`` [S], the first ``prompt_len`` of which are the prompt."""
    qkv, qkv_bias = linear_tensors(attention.qkv_proj)
    output, output_bias = linear_tensors(attention.o_proj)
    return AttentionSpec(
        name,
        qkv,
        qkv_bias,
        output,
        output_bias,
        _head_norm(f"{name}.q_norm", attention.q_norm, config),
        _head_norm(f"{name}.k_norm", attention.k_norm, config),
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        positions,
        None if config.rope is None else rope_spec(config.rope, positions, prompt_len),
        config.attention_scale,
        config.logn_length,
        config.sliding_window,
    )


def _head_norm(name: str, norm: HeadNorm | None, config: DecoderConfig) -> NormSpec | None:
    return None if norm is None else NormSpec(name, norm.weight.float(), None, config.norm_eps, "rms_norm")


def rope_spec(rope: RopeConfig, positions: torch.Tensor, prompt_len: int) -> RopeSpec:
    """The rotation that a config means for a request with this many prompt tokens."""
    alpha = 1.0
    if rope.scaling == "qwen_ntk":
        section = RotaryTable(rope, 1).offset(prompt_len)  # sections of one row
        alpha = float(2 ** (section + 1) - 1)
    turning = frequencies(rope, alpha).to(positions.device)
    return RopeSpec(turning, positions, positions, rope.attention_factor)


def read_mlp(name: str, mlp: GatedMLP | MLP, config: DecoderConfig) -> MlpSpec:
    """The feed-forward."""
    down, down_bias = linear_tensors(mlp.down_proj)
    if isinstance(mlp, MLP):
        up, up_bias = linear_tensors(mlp.up_proj)
        kind: Activation = config.mlp  # type: ignore[assignment]
        return MlpSpec(name, None, None, up, up_bias, down, down_bias, kind)
    both, bias = linear_tensors(mlp.gate_up_proj)
    gate, up = both.chunk(2)
    gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2)
    return MlpSpec(name, gate, gate_bias, up, up_bias, down, down_bias, "silu")


def read_layer(
    name: str, layer: DecoderLayer, config: DecoderConfig, positions: torch.Tensor, prompt_len: int
) -> LayerSpec:
    """A whole layer."""
    return LayerSpec(
        read_norm(f"{name}.input_layernorm", layer.input_layernorm, config),
        read_attention(f"{name}.self_attn", layer.self_attn, config, positions, prompt_len),
        read_norm(f"{name}.post_attention_layernorm", layer.post_attention_layernorm, config),
        read_mlp(f"{name}.mlp", layer.mlp, config),
    )


def read_embedding(model: Decoder, positions: torch.Tensor) -> EmbeddingSpec:
    """Token embeddings, and learned positions where the model has them."""
    places = None if model.embed_positions is None else model.embed_positions.weight.float()
    return EmbeddingSpec("embed_tokens", model.embed_tokens.weight.float(), places, positions)
