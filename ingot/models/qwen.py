"""Qwen v1 (Qwen-7B, Qwen-14B and their chat models), in the V1.0 and V1.1 forms of its config.

One product for q, k, v with a bias and no other bias; c_proj(w1(x) · silu(w2(x))); beyond ``seq_length`` a
rotary base that grows with the prompt (dynamic NTK) and queries scaled by log-n. Source: the published
``QWenLMHeadModel``.
"""

from __future__ import annotations

from ingot.checkpoint.weight_map import Concat, Ignore, Rename, Rule, WeightMap
from ingot.config.decoder_config import DecoderConfig, RopeConfig
from ingot.errors import CheckpointError
from ingot.models.architecture import Architecture, LayerRange, head_rule, weight_and_bias
from ingot.models.hf_values import HfConfig, flag, head_size, integer, number, optional_integer

# What the published class does, whatever else its config could say.
_FIXED = {
    "no_bias": True,
    "scale_attn_weights": True,
    "activation": "swiglu",
    "pos_emb": "rotary",
    "rotary_pct": 1.0,
}
# The dtype of training and of a softmax.
_IDLE = {"bf16", "fp16", "fp32", "params_dtype", "onnx_safe", "softmax_in_fp32"}
_KEYS = frozenset(
    {"vocab_size", "padded_vocab_size", "hidden_size", "n_embd", "intermediate_size", "ffn_hidden_size"}
    | {"num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "kv_channels"}
    | {"seq_length", "n_positions", "max_position_embeddings", "rotary_emb_base", "layer_norm_epsilon"}
    | {"rope_theta"}
    | {"use_dynamic_ntk", "use_logn_attn", "tie_word_embeddings"}
    | _FIXED.keys()
    | _IDLE
)


def config_from_hf(hf: HfConfig) -> DecoderConfig:
    """config.json of a Qwen v1 model → DecoderConfig.

    V1.1 gives ``intermediate_size`` for both branches together, V1.0 calls it ``ffn_hidden_size``, and stores
    the padded number of rows apart.
    """
    odd = {key: hf[key] for key, value in _FIXED.items() if hf.get(key, value) not in (value, None)}
    if odd:
        raise CheckpointError(
            "unsupported settings of Qwen v1 in config.json",
            seen=odd,
            allowed={key: _FIXED[key] for key in odd},
            fix="a model with these values",
        )
    hidden, heads = integer(hf, "hidden_size", "n_embd"), integer(hf, "num_attention_heads", "n_head")
    head_dim = optional_integer(hf, "kv_channels") or head_size(hidden, heads)
    seq_length = integer(hf, "seq_length", "n_positions", "max_position_embeddings")
    ntk = flag(hf, "use_dynamic_ntk", True)
    rope = RopeConfig(
        dim=head_dim,
        theta=_base(hf),
        scaling="qwen_ntk" if ntk else "none",
        original_max=seq_length if ntk else 0,
    )
    longest = integer(hf, "max_position_embeddings", "n_positions", default=seq_length)
    return DecoderConfig(
        architecture="qwen",
        vocab_size=integer(hf, "padded_vocab_size", "vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer(hf, "intermediate_size", "ffn_hidden_size") // 2,
        num_layers=integer(hf, "num_hidden_layers", "n_layer"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        max_positions=max(seq_length, longest),
        norm_eps=number(hf, "layer_norm_epsilon", default=1e-6),
        rope=rope,
        qkv_bias=True,
        tie_word_embeddings=flag(hf, "tie_word_embeddings", False),
        logn_length=seq_length if flag(hf, "use_logn_attn", True) else 0,
    )


def _base(hf: HfConfig) -> float:
    """``rotary_emb_base``, which the class reads; ``rope_theta`` beside it (Qwen-72B) must be the same."""
    base = number(hf, "rotary_emb_base", default=10000.0)
    if number(hf, "rope_theta", default=base) != base:
        raise CheckpointError(
            "rotary_emb_base and rope_theta of config.json differ, and Qwen v1 reads the first",
            seen=f"{base:g} and {hf['rope_theta']}",
            fix="correct config.json, or download it again",
        )
    return base


def weight_map(config: DecoderConfig, layers: LayerRange = None) -> WeightMap:
    """Published names → ours; w2 is the gate (SiLU), w1 the plain branch."""
    ours, theirs = "layers.{layer}.", "transformer.h.{layer}."
    rules: tuple[Rule, ...] = (
        Rename("embed_tokens.weight", "transformer.wte.weight"),
        Rename(ours + "input_layernorm.weight", theirs + "ln_1.weight"),
        *weight_and_bias(ours + "self_attn.qkv_proj", theirs + "attn.c_attn"),
        Rename(ours + "self_attn.o_proj.weight", theirs + "attn.c_proj.weight"),
        Rename(ours + "post_attention_layernorm.weight", theirs + "ln_2.weight"),
        Concat(ours + "mlp.gate_up_proj.weight", (theirs + "mlp.w2.weight", theirs + "mlp.w1.weight")),
        Rename(ours + "mlp.down_proj.weight", theirs + "mlp.c_proj.weight"),
        Rename("norm.weight", "transformer.ln_f.weight"),
        head_rule(config),
        Ignore("*.rotary_emb.inv_freq"),
        Ignore("*.attn.masked_bias"),
    )
    return WeightMap(rules, config.num_layers, layers)


QWEN = Architecture("qwen", ("QWenLMHeadModel",), "qwen", _KEYS, config_from_hf, weight_map)
