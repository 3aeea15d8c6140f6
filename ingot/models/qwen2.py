"""Qwen1.5, Qwen2 and Qwen2.5: LLaMA's shape with a bias on queries, keys and values.

Owns the reading of their config and their weight map. Knows no other architecture.
Source: the Hugging Face class ``Qwen2ForCausalLM``.
"""

from __future__ import annotations

from ingot.checkpoint.weight_map import Concat, Ignore, Rename, Rule, Tie, WeightMap
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
    """config.json of a Qwen2-shaped model → DecoderConfig."""
    check_silu(hf)
    hidden, heads = int(require(hf, "hidden_size")), int(require(hf, "num_attention_heads"))
    head_dim = int(hf.get("head_dim") or hidden // heads)
    return DecoderConfig(
        architecture="qwen2",
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
        qkv_bias=True,
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
    rules: tuple[Rule, ...] = (
        Rename("embed_tokens.weight", "model.embed_tokens.weight"),
        Rename(ours + "input_layernorm.weight", theirs + "input_layernorm.weight"),
        Concat(ours + "self_attn.qkv_proj.weight", tuple(f"{attention}{p}_proj.weight" for p in "qkv")),
        Concat(ours + "self_attn.qkv_proj.bias", tuple(f"{attention}{p}_proj.bias" for p in "qkv")),
        Rename(ours + "self_attn.o_proj.weight", attention + "o_proj.weight"),
        Rename(ours + "post_attention_layernorm.weight", theirs + "post_attention_layernorm.weight"),
        Concat(ours + "mlp.gate_up_proj.weight", (mlp + "gate_proj.weight", mlp + "up_proj.weight")),
        Rename(ours + "mlp.down_proj.weight", mlp + "down_proj.weight"),
        Rename("norm.weight", "model.norm.weight"),
        *head,
        Ignore("*.rotary_emb.inv_freq"),
    )
    return WeightMap(rules, config.num_layers, layers)


QWEN2 = Architecture("qwen2", ("Qwen2ForCausalLM",), config_from_hf, weight_map)
