"""Gemma-2. Source: Hugging Face's ``Gemma2ForCausalLM``; its norms store their weight less one."""

from __future__ import annotations

import math

from ingot.checkpoint.name_rules import PlusOne
from ingot.checkpoint.weight_map import Rule, WeightMap
from ingot.config.decoder_config import DecoderConfig
from ingot.errors import CheckpointError
from ingot.models.architecture import Architecture, LayerRange
from ingot.models.hf_values import HfConfig, flag, integer, number, refused
from ingot.models.llama import llama_weight_map
from ingot.models.rope_config import ROPE_KEYS, longest, rope_from_hf

_ACTIVATION = "gelu_pytorch_tanh"
_KINDS = ("sliding_attention", "full_attention")
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_KEYS = (
    frozenset({"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"})
    | {"num_key_value_heads", "head_dim", "max_position_embeddings", "hidden_activation", "rms_norm_eps"}
    | {"tie_word_embeddings", "attention_bias", "query_pre_attn_scalar", "sliding_window", "layer_types"}
    | {*_SOFTCAPS, *ROPE_KEYS}
    # which Hugging Face's class does not read
    | {"hidden_act", "sliding_window_size", "cache_implementation"}
)
# Ours → theirs, whose names say less: two stand before a product, two after it.
_NORMS = {
    "input_layernorm": "input_layernorm",
    "self_attn_norm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}


def config_from_hf(hf: HfConfig) -> DecoderConfig:
    check_activation(hf)
    hidden, head_dim = integer(hf, "hidden_size"), integer(hf, "head_dim", default=256)
    stated = integer(hf, "max_position_embeddings", default=8192)
    rope = rope_from_hf(hf, head_dim, stated)
    attention, final = (  # null is no cap
        0.0 if key in hf and hf[key] is None else number(hf, key, default=default)
        for key, default in zip(_SOFTCAPS, (50.0, 30.0), strict=True)
    )
    layers, bias = integer(hf, "num_hidden_layers"), flag(hf, "attention_bias", False)
    return DecoderConfig(
        architecture="gemma2",
        vocab_size=integer(hf, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer(hf, "intermediate_size"),
        num_layers=layers,
        num_heads=integer(hf, "num_attention_heads"),
        num_kv_heads=integer(hf, "num_key_value_heads", default=4),
        head_dim=head_dim,
        max_positions=longest(hf, rope, stated),
        norm_eps=number(hf, "rms_norm_eps", default=1e-6),
        mlp="gelu_tanh_gated",
        rope=rope,
        qkv_bias=bias,
        output_bias=bias,
        tie_word_embeddings=flag(hf, "tie_word_embeddings", True),
        sliding_window=integer(hf, "sliding_window", default=4096),
        full_layers=full_layers(hf, layers, every=2),
        wide_norms=True,
        post_norms=True,
        query_scalar=number(hf, "query_pre_attn_scalar", default=256.0),
        attention_softcap=attention,
        logit_softcap=final,
        embedding_scale=math.sqrt(hidden),
    )


def check_activation(hf: HfConfig) -> None:
    if hf.get("hidden_activation", _ACTIVATION) != _ACTIVATION:
        raise refused("hidden_activation", hf["hidden_activation"], _ACTIVATION)


def full_layers(hf: HfConfig, layers: int, every: int) -> tuple[int, ...]:
    """The layers without a window, by ``layer_types``; without it the last of each ``every``.

    Raises:
        CheckpointError: types are unknown, or not one per layer; a layer has a window of null.
    """
    kinds = hf.get("layer_types")
    if kinds is None:
        full = tuple(range(every - 1, layers, every))
    elif not isinstance(kinds, list) or any(kind not in _KINDS for kind in kinds):
        raise refused("layer_types", kinds, " or ".join(_KINDS))
    elif len(kinds) != layers:
        what, seen = "layer_types must have one type per layer", f"{len(kinds)} types"
        raise CheckpointError(what, seen=seen, fix="correct config.json")
    else:
        full = tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
    if len(full) < layers and "sliding_window" in hf and hf["sliding_window"] is None:
        raise refused("sliding_window", None, "a number of tokens, where layers have a window")
    return full


def weight_map(config: DecoderConfig, layers: LayerRange = None) -> WeightMap:
    """LLaMA's names, except the norms; ``layers`` are those to keep."""
    shared = llama_weight_map(config, layers)
    norms: list[Rule] = [PlusOne("norm.weight", "model.norm.weight")]
    ours, theirs = "layers.{layer}.", "model.layers.{layer}."
    norms += [PlusOne(f"{ours}{a}.weight", f"{theirs}{b}.weight") for a, b in _NORMS.items()]
    made = {name for rule in norms for name in getattr(rule, "outputs", ())}
    others = (rule for rule in shared.rules if made.isdisjoint(getattr(rule, "outputs", ())))
    return WeightMap((*others, *norms), config.num_layers, layers)


GEMMA2 = Architecture("gemma2", ("Gemma2ForCausalLM",), "gemma2", _KEYS, config_from_hf, weight_map)
