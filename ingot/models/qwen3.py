"""Qwen3: LLaMA's shape with an RMSNorm on each query and key head.

Owns the reading of its config and its weight map. Knows no other architecture.
Source: the Hugging Face class ``Qwen3ForCausalLM``.
"""

from __future__ import annotations

from ingot.checkpoint.weight_map import Concat, Rename, Rule, Tie, WeightMap
from ingot.config.model import DecoderConfig
from ingot.models.base import (
    Architecture,
    HfConfig,
    LayerRange,
    check_silu,
    require,
    rope_from_hf,
    sliding_window,
)


def config_from_hf(hf: HfConfig) -> DecoderConfig:
    """config.json of a Qwen3-shaped model → DecoderConfig."""
    check_silu(hf)
    hidden, heads = int(require(hf, "hidden_size")), int(require(hf, "num_attention_heads"))
    head_dim = int(hf.get("head_dim") or 128)
    bias = bool(hf.get("attention_bias", False))
    return DecoderConfig(
        architecture="qwen3",
        vocab_size=int(require(hf, "vocab_size")),
        hidden_size=hidden,
        intermediate_size=int(require(hf, "intermediate_size")),
        num_layers=int(require(hf, "num_hidden_layers")),
        num_heads=heads,
        num_kv_heads=int(hf.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        max_positions=int(hf.get("max_position_embeddings") or 32768),
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        rope=rope_from_hf(hf, head_dim),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        sliding_window=sliding_window(hf),
    )


def weight_map(config: DecoderConfig, layers: LayerRange = None) -> WeightMap:
    """Hugging Face names → ours; q, k, v and gate, up are joined."""
    ours, theirs = "layers.{layer}.", "model.layers.{layer}."
    attention, mlp = theirs + "self_attn.", theirs + "mlp."
    head: tuple[Rule, ...] = (Rename("lm_head.weight", "lm_head.weight"),)
    if config.tie_word_embeddings:
        head = (Tie("lm_head.weight", "embed_tokens.weight"),)
    kinds = ("weight", "bias") if config.qkv_bias else ("weight",)
    rules: tuple[Rule, ...] = (
        Rename("embed_tokens.weight", "model.embed_tokens.weight"),
        Rename(ours + "input_layernorm.weight", theirs + "input_layernorm.weight"),
        *(
            Concat(f"{ours}self_attn.qkv_proj.{k}", tuple(f"{attention}{p}_proj.{k}" for p in "qkv"))
            for k in kinds
        ),
        *(Rename(f"{ours}self_attn.o_proj.{k}", f"{attention}o_proj.{k}") for k in kinds),
        Rename(ours + "self_attn.q_norm.weight", attention + "q_norm.weight"),
        Rename(ours + "self_attn.k_norm.weight", attention + "k_norm.weight"),
        Rename(ours + "post_attention_layernorm.weight", theirs + "post_attention_layernorm.weight"),
        Concat(ours + "mlp.gate_up_proj.weight", (mlp + "gate_proj.weight", mlp + "up_proj.weight")),
        Rename(ours + "mlp.down_proj.weight", mlp + "down_proj.weight"),
        Rename("norm.weight", "model.norm.weight"),
        *head,
    )
    return WeightMap(rules, config.num_layers, layers)


QWEN3 = Architecture("qwen3", ("Qwen3ForCausalLM",), config_from_hf, weight_map)
