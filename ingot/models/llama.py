"""LLaMA 1, 2, 3 and Vicuna, and what Mistral, Qwen2 and Qwen3 share with them: config keys, tensor names."""

from __future__ import annotations

from functools import partial
from typing import Any

from ingot.checkpoint.weight_map import Concat, Ignore, Rename, Rule, WeightMap
from ingot.config.decoder_config import DecoderConfig
from ingot.errors import CheckpointError
from ingot.models.architecture import Architecture, LayerRange, head_rule
from ingot.models.hf_values import HfConfig, flag, head_size, integer, number, optional_integer
from ingot.models.rope_config import ROPE_KEYS, longest, rope_from_hf

# "pretraining_tp" splits products into sums of parts; the others say what the rest of the config says.
_IDLE = {"pretraining_tp", "max_seq_len", "max_seq_length", "model_max_length", "is_llama_config"}
LLAMA_KEYS = (
    frozenset({"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"})
    | {"num_key_value_heads", "head_dim", "max_position_embeddings", "max_sequence_length", "hidden_act"}
    | {"rms_norm_eps", "tie_word_embeddings"}
    | ROPE_KEYS
    | _IDLE
)
WINDOW_KEYS = frozenset(
    {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
    | {"sliding_window_pattern", "_sliding_window_pattern"}
)

OWN_LLAMA_KEYS = LLAMA_KEYS | WINDOW_KEYS | {"attention_bias", "mlp_bias"}


def own_llama_config(hf: HfConfig, architecture: str) -> DecoderConfig:
    bias, mlp_bias = flag(hf, "attention_bias", False), flag(hf, "mlp_bias", False)
    config = llama_config(hf, architecture, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
    no_window(hf, "LlamaForCausalLM", config.max_positions)
    return config


def llama_config(
    hf: HfConfig,
    architecture: str,
    *,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    positions: int = 2048,
    **own: Any,
) -> DecoderConfig:
    """config.json with LLaMA's keys → DecoderConfig.

    Args:
        head_dim: what a config without ``head_dim`` means; None: hidden size / heads.
        kv_heads: what one without ``num_key_value_heads`` means; None, and null: as many as query heads.
        positions: what one without ``max_position_embeddings`` means.
        own: fields of DecoderConfig that this architecture sets itself.
    """
    check_silu(hf)
    hidden, heads = integer(hf, "hidden_size"), integer(hf, "num_attention_heads")
    head_dim = optional_integer(hf, "head_dim") or head_dim or head_size(hidden, heads)
    stated = integer(hf, "max_position_embeddings", "max_sequence_length", default=positions)
    rope = rope_from_hf(hf, head_dim, stated)
    kv_heads = optional_integer(hf, "num_key_value_heads") if "num_key_value_heads" in hf else kv_heads
    shared: dict[str, Any] = {
        "vocab_size": integer(hf, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": integer(hf, "intermediate_size"),
        "num_layers": integer(hf, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads or heads,
        "head_dim": head_dim,
        "max_positions": longest(hf, rope, stated),
        "norm_eps": number(hf, "rms_norm_eps", default=1e-6),
        "rope": rope,
        "tie_word_embeddings": flag(hf, "tie_word_embeddings", False),
    }
    return DecoderConfig(architecture=architecture, **(shared | own))


def llama_weight_map(config: DecoderConfig, layers: LayerRange = None) -> WeightMap:
    """LLaMA's tensor names → ours; q, k, v and gate, up are joined, biases and q/k norms by the config."""
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
    return WeightMap((*rules, head_rule(config)), config.num_layers, layers)


def _kinds(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)


def _joined(target: str, prefix: str, parts: tuple[str, ...], bias: bool) -> list[Rule]:
    """One Concat for the weights of ``parts`` and one for their biases."""
    return [
        Concat(f"{target}.{kind}", tuple(f"{prefix}{part}_proj.{kind}" for part in parts))
        for kind in _kinds(bias)
    ]


def check_silu(hf: HfConfig) -> None:
    activation = hf.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(
            "unsupported hidden_act in config.json", seen=activation, allowed="silu", fix="a model with SiLU"
        )


def sliding_window(hf: HfConfig, on: bool, default: int = 0, full: int = 0) -> int:
    """Window of every layer, 0 for none.

    Args:
        on: whether a window is in use.
        default: the window of a config without ``sliding_window``; null is none.
        full: how many layers come before the first with a window, where ``layer_types`` does not say it.

    Raises:
        CheckpointError: only some layers have a window, or the settings contradict each other.
    """
    stated, known = hf.get("layer_types") or [], ("full_attention", "sliding_attention")
    if not isinstance(stated, list) or any(kind not in known for kind in stated):
        raise CheckpointError(
            "unsupported layer_types in config.json",
            seen=stated,
            allowed=known,
            fix="a model with only these",
        )
    if stated and len(stated) != integer(hf, "num_hidden_layers"):
        raise _mixed("layer_types must have one type per layer", f"{len(stated)} types")
    kinds = set(stated)
    window = stated_window(hf, default) if on else 0
    if "sliding_attention" in kinds and not window:
        raise _mixed("layer_types has sliding_attention, but no sliding_window is in use", sorted(kinds))
    if kinds == {"full_attention"} or not window or (not kinds and full >= integer(hf, "num_hidden_layers")):
        return 0
    full = 0 if kinds else full
    pattern = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 1
    if len(kinds) > 1 or full > 0 or pattern != 1:
        what = "layers with and without a sliding window in one model are not supported"
        raise _mixed(what, sorted(kinds) or full or pattern)
    return window


def stated_window(hf: HfConfig, default: int) -> int:
    """``sliding_window``; 0 where it is null or 0."""
    return integer(hf, "sliding_window", default=default) if hf.get("sliding_window", default) else 0


def qwen_window(hf: HfConfig) -> int:
    """``sliding_window`` of Qwen2 and Qwen3: off by default, used from layer ``max_window_layers`` on."""
    full = integer(hf, "max_window_layers", default=28) if hf.get("max_window_layers") != 0 else 0
    return sliding_window(hf, flag(hf, "use_sliding_window", False), default=4096, full=full)


def no_window(hf: HfConfig, model: str, max_positions: int) -> None:
    """Refuse a window that would be in use in a model that has none.

    Raises:
        CheckpointError: there is one; some programs ignore it, and some do not.
    """
    full = (hf.get("max_window_layers") or 0) if hf.get("use_sliding_window") else 0
    window = sliding_window(hf, flag(hf, "use_sliding_window", True), full=full)
    if 0 < window < max_positions:
        raise _mixed(f"{model} has no sliding window, but config.json sets one", window)


def _mixed(what: str, seen: object) -> CheckpointError:
    return CheckpointError(what, seen=seen, fix="a model with one kind of attention, or correct config.json")


LLAMA = Architecture(
    "llama",
    ("LlamaForCausalLM", "LLaMAForCausalLM"),  # the second in the first conversions
    "llama",
    OWN_LLAMA_KEYS,
    partial(own_llama_config, architecture="llama"),
    llama_weight_map,
)
