"""Qwen v1 (Qwen-7B, Qwen-14B and their chat models), in the V1.0 and V1.1 forms of its config.

Owns the reading of its config and its weight map. Knows no other architecture.
What it has of its own: one product for q, k, v with a bias and no other bias; c_proj(w1(x) · silu(w2(x)));
beyond ``seq_length`` a rotary base that grows with the prompt (dynamic NTK) and queries scaled by log-n.
Source: the published ``QWenLMHeadModel``; figures of it are golden test data.
"""

from __future__ import annotations

from ingot.checkpoint.weight_map import Concat, Ignore, Rename, Rule, Tie, WeightMap
from ingot.config.model import DecoderConfig, RopeConfig
from ingot.errors import CheckpointError
from ingot.models.base import Architecture, HfConfig, LayerRange, require


def config_from_hf(hf: HfConfig) -> DecoderConfig:
    """config.json of a Qwen v1 model → DecoderConfig.

    V1.1 gives ``intermediate_size`` for both branches together, V1.0 calls it ``ffn_hidden_size``.
    """
    if not hf.get("no_bias", True):
        raise CheckpointError("Qwen v1 with biases is not supported", seen="no_bias false", fix="config.json")
    hidden, heads = (
        int(require(hf, "hidden_size", "n_embd")),
        int(require(hf, "num_attention_heads", "n_head")),
    )
    head_dim = int(hf.get("kv_channels") or hidden // heads)
    seq_length = int(require(hf, "seq_length", "n_positions", "max_position_embeddings"))
    ntk = bool(hf.get("use_dynamic_ntk", True))
    rope = RopeConfig(
        dim=int(head_dim * float(hf.get("rotary_pct", 1.0))),
        theta=float(hf.get("rotary_emb_base", 10000.0)),
        scaling="qwen_ntk" if ntk else "none",
        original_max=seq_length if ntk else 0,
    )
    return DecoderConfig(
        architecture="qwen",
        vocab_size=_vocab_size(hf),
        hidden_size=hidden,
        intermediate_size=int(require(hf, "intermediate_size", "ffn_hidden_size")) // 2,
        num_layers=int(require(hf, "num_hidden_layers", "n_layer")),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        max_positions=max(seq_length, int(hf.get("max_position_embeddings") or hf.get("n_positions") or 0)),
        norm_eps=float(hf.get("layer_norm_epsilon", 1e-6)),
        rope=rope,
        qkv_bias=True,
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        logn_length=seq_length if hf.get("use_logn_attn", True) else 0,
    )


def _vocab_size(hf: HfConfig) -> int:
    """V1.0 stores the padded number of rows apart."""
    return int(hf.get("padded_vocab_size") or require(hf, "vocab_size"))


def weight_map(config: DecoderConfig, layers: LayerRange = None) -> WeightMap:
    """Published names → ours; w2 is the gate (SiLU), w1 the plain branch."""
    ours, theirs = "layers.{layer}.", "transformer.h.{layer}."
    head: tuple[Rule, ...] = (Rename("lm_head.weight", "lm_head.weight"),)
    if config.tie_word_embeddings:
        head = (Tie("lm_head.weight", "embed_tokens.weight"),)
    rules: tuple[Rule, ...] = (
        Rename("embed_tokens.weight", "transformer.wte.weight"),
        Rename(ours + "input_layernorm.weight", theirs + "ln_1.weight"),
        Rename(ours + "self_attn.qkv_proj.weight", theirs + "attn.c_attn.weight"),
        Rename(ours + "self_attn.qkv_proj.bias", theirs + "attn.c_attn.bias"),
        Rename(ours + "self_attn.o_proj.weight", theirs + "attn.c_proj.weight"),
        Rename(ours + "post_attention_layernorm.weight", theirs + "ln_2.weight"),
        Concat(ours + "mlp.gate_up_proj.weight", (theirs + "mlp.w2.weight", theirs + "mlp.w1.weight")),
        Rename(ours + "mlp.down_proj.weight", theirs + "mlp.c_proj.weight"),
        Rename("norm.weight", "transformer.ln_f.weight"),
        *head,
        Ignore("*.rotary_emb.inv_freq"),
        Ignore("*.attn.masked_bias"),
    )
    return WeightMap(rules, config.num_layers, layers)


QWEN = Architecture("qwen", ("QWenLMHeadModel",), config_from_hf, weight_map)
