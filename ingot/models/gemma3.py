"""Gemma-3: Gemma-2 without softcaps, with q/k norms and a rotary base for each kind of layer.

Source: Hugging Face's ``Gemma3ForCausalLM``; of ``Gemma3ForConditionalGeneration`` the text half.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ingot.checkpoint.name_rules import PlusOne
from ingot.checkpoint.weight_map import Concat, Ignore, Rename, Rule, WeightMap
from ingot.config.decoder_config import DecoderConfig, RopeConfig
from ingot.models import gemma2
from ingot.models.architecture import Architecture, LayerRange
from ingot.models.config_keys import check_keys
from ingot.models.hf_values import HfConfig, flag, integer, number, refused
from ingot.models.rope_config import ROPE_KEYS, longest, rope_from_hf

_KEYS = (
    frozenset({"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"})
    | {"num_key_value_heads", "head_dim", "max_position_embeddings", "hidden_activation", "rms_norm_eps"}
    | {"tie_word_embeddings", "attention_bias", "query_pre_attn_scalar", "sliding_window", "layer_types"}
    | {"sliding_window_pattern", "rope_local_base_freq", "final_logit_softcapping", *ROPE_KEYS}
    # which Hugging Face's class does not read
    | {"_sliding_window_pattern", "cache_implementation"}
)
# Of a config.json with a text_config: the other half, and tokens of pictures.
_OUTER_KEYS = frozenset(
    {"text_config", "vision_config", "mm_tokens_per_image", "tie_word_embeddings"}
    | {"boi_token_index", "eoi_token_index", "image_token_index"}
)
# The class's defaults: such a text_config has what differs from them.
_TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
_PICTURES = ("vision_tower.*", "multi_modal_projector.*")
_PREFIXES = ("model.", "language_model.model.", "model.language_model.")


def config_from_hf(hf: HfConfig) -> DecoderConfig:
    gemma2.check_activation(hf)
    hidden, head_dim = integer(hf, "hidden_size"), integer(hf, "head_dim", default=256)
    layers, bias = integer(hf, "num_hidden_layers"), flag(hf, "attention_bias", False)
    every = 6 if "sliding_window_pattern" not in hf else integer(hf, "sliding_window_pattern")
    capped = hf.get("final_logit_softcapping") is not None
    rope, local, positions = _ropes(hf, head_dim)
    return DecoderConfig(
        architecture="gemma3",
        vocab_size=integer(hf, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer(hf, "intermediate_size"),
        num_layers=layers,
        num_heads=integer(hf, "num_attention_heads"),
        num_kv_heads=integer(hf, "num_key_value_heads", default=4),
        head_dim=head_dim,
        max_positions=positions,
        norm_eps=number(hf, "rms_norm_eps", default=1e-6),
        mlp="gelu_tanh_gated",
        rope=rope,
        local_rope=local,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        tie_word_embeddings=flag(hf, "tie_word_embeddings", True),
        sliding_window=integer(hf, "sliding_window", default=4096),
        full_layers=gemma2.full_layers(hf, layers, every),
        wide_norms=True,
        post_norms=True,
        query_scalar=number(hf, "query_pre_attn_scalar", default=256.0),
        logit_softcap=number(hf, "final_logit_softcapping") if capped else 0.0,
        embedding_scale=math.sqrt(hidden),
    )


def _ropes(hf: HfConfig, head_dim: int) -> tuple[RopeConfig, RopeConfig, int]:
    """Rotary settings of full layers and of those with a window, and the context length.

    ``rope_parameters`` has them by type of layer. Older configs have ``rope_scaling``, of full layers alone,
    and two bases.
    """
    by_kind = hf.get("rope_parameters") or {}
    if not isinstance(by_kind, dict):
        raise refused("rope_parameters", by_kind, "an object with settings by type of layer")
    check_keys(by_kind, {"full_attention", "sliding_attention"}, "gemma3", "rope_parameters")
    stated = integer(hf, "max_position_embeddings", default=131072)
    full: dict[str, Any] = {key: hf.get(key) for key in ("rope_scaling", "original_max_position_embeddings")}
    full |= {"rope_theta": number(hf, "rope_theta", default=1e6)}
    full |= {"rope_parameters": by_kind.get("full_attention")}
    local: dict[str, Any] = {"rope_theta": number(hf, "rope_local_base_freq", default=1e4)}
    local |= {"rope_parameters": by_kind.get("sliding_attention")}
    rope = rope_from_hf(full, head_dim, stated)
    return rope, rope_from_hf(local, head_dim, stated), longest(full, rope, stated)


def text_config(hf: HfConfig) -> HfConfig:
    """config.json of ``Gemma3ForConditionalGeneration`` → that of its text half; others as they are.

    Raises:
        CheckpointError: it has no ``text_config``, or settings that are unknown.
    """
    if "text_config" not in hf and hf.get("model_type") != "gemma3":
        return hf
    text = hf.get("text_config")
    if not isinstance(text, dict):
        raise refused("text_config", text, "an object: the settings of the text half")
    check_keys(hf, _OUTER_KEYS, "gemma3")
    outer = {key: hf[key] for key in ("tie_word_embeddings", "eos_token_id") if key in hf}
    return {"model_type": "gemma3_text"} | _TEXT_DEFAULTS | text | outer


def weight_map(config: DecoderConfig, layers: LayerRange = None) -> WeightMap:
    """Gemma-2's names with q/k norms, under one of three prefixes, without the picture half."""
    shared = gemma2.weight_map(config, layers)
    rules: list[Rule] = [_unprefixed(rule) for rule in shared.rules if not _of_head(rule)]
    norms = (f"layers.{{layer}}.self_attn.{part}_norm.weight" for part in "qk")
    rules += [PlusOne(name, name) for name in norms]
    rules += [Ignore(prefix + name) for name in _PICTURES for prefix in ("", "model.")]
    return WeightMap(tuple(rules), config.num_layers, layers, prefixes=_PREFIXES)


def _of_head(rule: Rule) -> bool:
    """Whether a rule makes a q or k norm, whose weight Gemma stores less one."""
    return isinstance(rule, Rename) and rule.target.endswith(("q_norm.weight", "k_norm.weight"))


def _unprefixed(rule: Rule) -> Rule:
    """A rule with its sources named as beside any prefix."""
    if isinstance(rule, Rename):
        return replace(rule, source=rule.source.removeprefix("model."))
    if isinstance(rule, Concat):
        return replace(rule, sources=tuple(source.removeprefix("model.") for source in rule.sources))
    return rule


GEMMA3 = Architecture(
    "gemma3",
    ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    "gemma3_text",
    _KEYS,
    config_from_hf,
    weight_map,
    text_config=text_config,
)
