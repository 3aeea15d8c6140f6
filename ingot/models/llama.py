"""LLaMA 1, 2, 3, Vicuna, and Mistral-shaped models.

Owns the reading of their config and their weight map. Knows no other architecture.
Source: the Hugging Face classes ``LlamaForCausalLM`` and ``MistralForCausalLM``.
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
    """config.json of a LLaMA-shaped model → DecoderConfig."""
    check_silu(hf)
    hidden, heads = int(require(hf, "hidden_size")), int(require(hf, "num_attention_heads"))
    head_dim = int(hf.get("head_dim") or hidden // heads)
    bias = bool(hf.get("attention_bias", False))
    return DecoderConfig(
        architecture="llama",
        vocab_size=int(require(hf, "vocab_size")),
        hidden_size=hidden,
        intermediate_size=int(require(hf, "intermediate_size")),
        num_layers=int(require(hf, "num_hidden_layers")),
        num_heads=heads,
        num_kv_heads=int(hf.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        max_positions=int(hf.get("max_position_embeddings") or 2048),
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        rope=rope_from_hf(hf, head_dim),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias", False)),
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        sliding_window=sliding_window(hf, default_on=True),
    )


def weight_map(config: DecoderConfig, layers: LayerRange = None) -> WeightMap:
    """Hugging Face names → ours; q, k, v and gate, up are joined."""
    ours, theirs = "layers.{layer}.", "model.layers.{layer}."
    attention, mlp = theirs + "self_attn.", theirs + "mlp."
    rules: list[Rule] = [
        Rename("embed_tokens.weight", "model.embed_tokens.weight"),
        Rename(ours + "input_layernorm.weight", theirs + "input_layernorm.weight"),
        Rename(ours + "post_attention_layernorm.weight", theirs + "post_attention_layernorm.weight"),
        Rename("norm.weight", "model.norm.weight"),
        Ignore("*.rotary_emb.inv_freq"),
    ]
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        sources = tuple(f"{attention}{p}_proj.{kind}" for p in "qkv")
        rules.append(Concat(f"{ours}self_attn.qkv_proj.{kind}", sources))
        rules.append(Rename(f"{ours}self_attn.o_proj.{kind}", f"{attention}o_proj.{kind}"))
    for kind in ("weight", "bias") if config.mlp_bias else ("weight",):
        rules.append(
            Concat(f"{ours}mlp.gate_up_proj.{kind}", (f"{mlp}gate_proj.{kind}", f"{mlp}up_proj.{kind}"))
        )
        rules.append(Rename(f"{ours}mlp.down_proj.{kind}", f"{mlp}down_proj.{kind}"))
    if config.tie_word_embeddings:
        rules += [Tie("lm_head.weight", "embed_tokens.weight")]
    else:
        rules.append(Rename("lm_head.weight", "lm_head.weight"))
    return WeightMap(tuple(rules), config.num_layers, layers)


LLAMA = Architecture("llama", ("LlamaForCausalLM", "MistralForCausalLM"), config_from_hf, weight_map)
