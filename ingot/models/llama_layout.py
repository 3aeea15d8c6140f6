"""The config keys and tensor names that LLaMA set and others kept.

Owns what Mistral, Qwen2, Qwen3 and their kin share with LLaMA on disk. Knows no architecture: each passes
what is its own.

    llama_config(hf, "qwen3", qk_norm=True)
"""

from __future__ import annotations

from typing import Any

from ingot.checkpoint.weight_map import Concat, Ignore, Rename, Rule, Tie, WeightMap
from ingot.config.model import DecoderConfig
from ingot.errors import CheckpointError
from ingot.models.base import HfConfig, LayerRange, require
from ingot.models.rope import rope_from_hf


def llama_config(
    hf: HfConfig, architecture: str, *, head_dim: int | None = None, **own: Any
) -> DecoderConfig:
    """config.json with LLaMA's keys → DecoderConfig.

    Args:
        head_dim: what a config without ``head_dim`` means; None: hidden size / heads.
        own: fields of DecoderConfig that this architecture sets itself.
    """
    check_silu(hf)
    hidden, heads = int(require(hf, "hidden_size")), int(require(hf, "num_attention_heads"))
    head_dim = int(hf.get("head_dim") or head_dim or hidden // heads)
    shared: dict[str, Any] = {
        "vocab_size": int(require(hf, "vocab_size")),
        "hidden_size": hidden,
        "intermediate_size": int(require(hf, "intermediate_size")),
        "num_layers": int(require(hf, "num_hidden_layers")),
        "num_heads": heads,
        "num_kv_heads": int(hf.get("num_key_value_heads") or heads),
        "head_dim": head_dim,
        "max_positions": int(hf.get("max_position_embeddings") or 2048),
        "norm_eps": float(hf.get("rms_norm_eps", 1e-6)),
        "rope": rope_from_hf(hf, head_dim),
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
    }
    return DecoderConfig(architecture=architecture, **(shared | own))


def llama_weight_map(config: DecoderConfig, layers: LayerRange = None) -> WeightMap:
    """LLaMA's tensor names → ours; q, k, v and gate, up are joined. The config decides on biases and q/k
    norms.
    """
    ours, theirs = "layers.{layer}.", "model.layers.{layer}."
    rules: list[Rule] = [
        Rename("embed_tokens.weight", "model.embed_tokens.weight"),
        Rename(ours + "input_layernorm.weight", theirs + "input_layernorm.weight"),
        Rename(ours + "post_attention_layernorm.weight", theirs + "post_attention_layernorm.weight"),
        Rename("norm.weight", "model.norm.weight"),
        Ignore("*.rotary_emb.inv_freq"),
    ]
    rules += _joined(ours + "self_attn.qkv_proj", theirs + "self_attn.", ("q", "k", "v"), config.qkv_bias)
    rules += _joined(ours + "mlp.gate_up_proj", theirs + "mlp.", ("gate", "up"), config.mlp_bias)
    for name, bias in (("self_attn.o_proj", config.output_bias), ("mlp.down_proj", config.mlp_bias)):
        rules += [Rename(f"{ours}{name}.{kind}", f"{theirs}{name}.{kind}") for kind in _kinds(bias)]
    if config.qk_norm:
        names = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
        rules += [Rename(ours + name, theirs + name) for name in names]
    tied = config.tie_word_embeddings
    rules.append(
        Tie("lm_head.weight", "embed_tokens.weight") if tied else Rename("lm_head.weight", "lm_head.weight")
    )
    return WeightMap(tuple(rules), config.num_layers, layers)


def _kinds(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)


def _joined(target: str, prefix: str, parts: tuple[str, ...], bias: bool) -> list[Rule]:
    """One Concat for the weights of ``parts`` and one for their biases."""
    return [
        Concat(f"{target}.{kind}", tuple(f"{prefix}{part}_proj.{kind}" for part in parts))
        for kind in _kinds(bias)
    ]


def check_silu(hf: HfConfig) -> None:
    """Refuse a gated MLP with another activation than SiLU."""
    activation = hf.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(
            "unsupported activation", seen=activation, allowed="silu", fix="hidden_act in config.json"
        )


def sliding_window(hf: HfConfig, default_on: bool = False) -> int:
    """Window of every layer, 0 for none.

    Args:
        default_on: what a config without ``use_sliding_window`` means (Mistral: on, Qwen: off).

    Raises:
        CheckpointError: some layers have a window and others do not.
    """
    kinds = set(hf.get("layer_types") or ())
    window = hf.get("sliding_window") or 0
    if kinds == {"full_attention"} or not window or not hf.get("use_sliding_window", default_on):
        return 0
    full = (hf.get("max_window_layers") or 0) if hf.get("use_sliding_window") and not kinds else 0
    if full and full >= int(require(hf, "num_hidden_layers")):
        return 0
    mixed = len(kinds) > 1 or full > 0
    if mixed:
        raise CheckpointError(
            "layers with and without a sliding window in one model are not supported",
            seen=sorted(kinds) or full,
        )
    return int(window)
