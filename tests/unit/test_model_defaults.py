"""Missing and null keys of a config mean what its class in transformers makes of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    WhisperConfig,
)

from ingot import LLM
from ingot.config.decoder_config import DecoderConfig
from ingot.errors import CheckpointError
from ingot.models.model_registry import find_architecture
from tests.tiny_models import make_model, random_ids

Json = dict[str, Any]
KINDS: dict[str, tuple[str, type[PretrainedConfig]]] = {
    "llama": ("LlamaForCausalLM", LlamaConfig),
    "mistral": ("MistralForCausalLM", MistralConfig),
    "qwen2": ("Qwen2ForCausalLM", Qwen2Config),
    "qwen3": ("Qwen3ForCausalLM", Qwen3Config),
    "gemma2": ("Gemma2ForCausalLM", Gemma2Config),
    "gemma3": ("Gemma3ForCausalLM", Gemma3TextConfig),
    "gpt2": ("GPT2LMHeadModel", GPT2Config),
    "opt": ("OPTForCausalLM", OPTConfig),
    "whisper": ("WhisperForConditionalGeneration", WhisperConfig),
}
# No value is a default, so that a lost one shows. 32 query heads: as many key heads as any default has.
_SIZES: Json = {"vocab_size": 97, "hidden_size": 256, "intermediate_size": 48, "num_hidden_layers": 2}
_SIZES |= {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 16}
_SIZES |= {"max_position_embeddings": 96, "rms_norm_eps": 1e-3, "tie_word_embeddings": True}
_SIZES |= {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 3.0}}
_WINDOW: Json = {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}
_GEMMA2: Json = {"tie_word_embeddings": False, "attention_bias": True, "sliding_window": 7}
_GEMMA2 |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0, "query_pre_attn_scalar": 12}
_GEMMA3: Json = _GEMMA2 | {"attn_logit_softcapping": None, "sliding_window_pattern": 2}
_GEMMA3 |= {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 3.0},
        "sliding_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    }
}
_GPT2: Json = {"vocab_size": 97, "n_positions": 96, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_inner": 40}
_GPT2 |= {"layer_norm_epsilon": 1e-3, "tie_word_embeddings": False, "activation_function": "relu"}
_OPT: Json = {"vocab_size": 97, "hidden_size": 64, "ffn_dim": 40, "num_hidden_layers": 2}
_OPT |= {"num_attention_heads": 8, "max_position_embeddings": 96, "activation_function": "gelu"}
_OPT |= {"enable_bias": False, "tie_word_embeddings": False}
_WHISPER: Json = {"vocab_size": 97, "num_mel_bins": 128, "d_model": 48, "max_source_positions": 60}
_WHISPER |= {"max_target_positions": 40}
for _side in ("encoder", "decoder"):
    _WHISPER |= {f"{_side}_layers": 2, f"{_side}_attention_heads": 8, f"{_side}_ffn_dim": 40}
GIVEN: dict[str, Json] = {
    "llama": _SIZES | {"attention_bias": True, "mlp_bias": True},
    "mistral": _SIZES | {"sliding_window": 7},
    "qwen2": _SIZES | _WINDOW,
    "qwen3": _SIZES | _WINDOW | {"attention_bias": True},
    "gemma2": _SIZES | _GEMMA2,
    "gemma3": _SIZES | _GEMMA3,
    "gpt2": _GPT2,
    "opt": _OPT,
    "whisper": _WHISPER,
}
# A checkpoint that lacks one of these is not one: refused by name.
NEEDED = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "ffn_dim",
}
NEEDED |= {key for key in _GPT2 if key.startswith("n_")} - {"n_inner"} | set(_WHISPER)
CANNOT_RUN = {"sliding_window"}  # of null in layers that have one
# Null where the class wants a number: as many as query heads, as it reads in transformers 4.
NULLS = {("mistral", "num_key_value_heads")}
_ELSEWHERE = {"architectures", "model_type", "transformers_version", "dtype", "eos_token_id"}


@functools.cache
def written(kind: str) -> Json:
    """A config.json with every key of the class; layers' types are left to their defaults."""
    name, made = KINDS[kind]
    config = made(**GIVEN[kind], eos_token_id=None, bos_token_id=None, pad_token_id=None)
    found: Json = json.loads(json.dumps(config.to_dict() | {"architectures": [name]}))
    if kind in ("qwen2", "qwen3", "gemma2", "gemma3"):
        found.pop("layer_types")
    if kind == "gemma3":  # which the class reads and does not write
        found["sliding_window_pattern"] = GIVEN[kind]["sliding_window_pattern"]
    return found


def changes() -> Iterator[Any]:
    for kind in KINDS:
        for key in sorted(written(kind).keys() - _ELSEWHERE):
            for way in ("missing", "null"):
                yield pytest.param(kind, key, way, id=f"{kind}-{key}-{way}")


def changed(kind: str, key: str, way: str) -> Json:
    found = {name: value for name, value in written(kind).items() if name != key}
    return found | ({key: None} if way == "null" else {})


def read(hf: Json) -> DecoderConfig:
    return find_architecture(hf["architectures"]).read_config(hf)


def theirs(kind: str, hf: Json) -> PretrainedConfig | None:
    """The class's own reading; None where it refuses it."""
    try:
        return KINDS[kind][1].from_dict(json.loads(json.dumps(hf)))
    except Exception:  # of many kinds, by version
        return None


@pytest.mark.parametrize(("kind", "key", "way"), list(changes()))
def test_every_key(kind: str, key: str, way: str) -> None:
    hf = changed(kind, key, way)
    expected = theirs(kind, hf)
    if expected is None:
        refused_or_missing(kind, key)
        return
    if key in NEEDED or (key in CANNOT_RUN and way == "null" and kind in ("gemma2", "gemma3")):
        with pytest.raises(CheckpointError, match=key):
            read(hf)
        return
    config = read(hf)
    for name, value in meaning(kind, expected).items():
        assert ours(config, name) == value, name


def refused_or_missing(kind: str, key: str) -> None:
    """Where the class refuses null, or cannot run with it: an error here, too, or as good as no key."""
    try:
        config = read(changed(kind, key, "null"))
    except CheckpointError:
        return
    if (kind, key) in NULLS:
        assert config.num_kv_heads == config.num_heads
    else:
        assert config == read(changed(kind, key, "missing"))


def ours(config: DecoderConfig, name: str) -> Any:
    if name == "windows":
        return [config.window(layer) for layer in range(config.num_layers)]
    if name == "rope":
        assert config.rope is not None
        return config.rope.theta, config.rope.scaling, config.rope.factor
    if name == "local_rope":
        assert config.local_rope is not None
        return config.local_rope.theta, config.local_rope.scaling, config.local_rope.factor
    return getattr(config, name)


def meaning(kind: str, theirs: Any) -> Json:
    """What the attributes of a class's config mean, in Ingot's words."""
    if kind == "whisper":
        return {
            "vocab_size": theirs.vocab_size,
            "max_positions": theirs.max_target_positions,
            "mlp": "gelu",
            "tie_word_embeddings": theirs.tie_word_embeddings,
        }
    found: Json = {
        "vocab_size": theirs.vocab_size,
        "hidden_size": theirs.hidden_size,
        "num_layers": theirs.num_hidden_layers,
        "num_heads": theirs.num_attention_heads,
        "max_positions": theirs.max_position_embeddings,
        "tie_word_embeddings": theirs.tie_word_embeddings,
        "qkv_bias": kind in ("gpt2", "qwen2") or getattr(theirs, "attention_bias", False),
        "output_bias": kind == "gpt2" or getattr(theirs, "attention_bias", False),
        "mlp_bias": kind == "gpt2" or getattr(theirs, "mlp_bias", False),
    }
    if kind == "opt":
        found |= dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), theirs.enable_bias)
        sizes = {"intermediate_size": theirs.ffn_dim, "norm_eps": torch.nn.LayerNorm(1).eps}
        return found | sizes | {"mlp": theirs.activation_function}
    if kind == "gpt2":
        activations = {"gelu_new": "gelu_tanh", "relu": "relu"}
        found |= {"norm_eps": theirs.layer_norm_epsilon, "mlp": activations[theirs.activation_function]}
        return found | {"intermediate_size": theirs.n_inner or 4 * theirs.n_embd}
    rope = theirs.rope_parameters
    rope = rope["full_attention"] if kind == "gemma3" else rope
    found |= {
        "intermediate_size": theirs.intermediate_size,
        "num_kv_heads": theirs.num_key_value_heads,
        "head_dim": getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads,
        "norm_eps": theirs.rms_norm_eps,
        "rope": turning(rope),
        "windows": windows(kind, theirs),
    }
    if kind == "gemma3":
        found |= {"query_scalar": theirs.query_pre_attn_scalar}
        found |= {"logit_softcap": theirs.final_logit_softcapping or 0}
        found |= {"local_rope": turning(theirs.rope_parameters["sliding_attention"])}
    if kind == "gemma2":
        found |= {"query_scalar": theirs.query_pre_attn_scalar}
        found |= {"attention_softcap": theirs.attn_logit_softcapping or 0}
        found |= {"logit_softcap": theirs.final_logit_softcapping or 0}
    return found


def turning(rope: Json) -> tuple[float, str, float]:
    """Base, scaling and factor of rotary settings."""
    scaling = {"default": "none"}.get(rope["rope_type"], rope["rope_type"])
    return rope["rope_theta"], scaling, rope.get("factor", 1.0)


def windows(kind: str, theirs: Any) -> list[int]:
    """By layer, as the modelling files read the config."""
    if kind in ("llama", "mistral"):
        return [getattr(theirs, "sliding_window", None) or 0] * theirs.num_hidden_layers
    return [theirs.sliding_window or 0 if kind == "sliding_attention" else 0 for kind in theirs.layer_types]


# Keys whose value bends the logits of a model this small.
BENDING = {"rms_norm_eps", "rope_parameters", "tie_word_embeddings", "attention_bias", "mlp_bias", "head_dim"}
BENDING |= {"num_key_value_heads", "sliding_window", "use_sliding_window", "max_window_layers"}
BENDING |= {"attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "n_inner"}
BENDING |= {"layer_norm_epsilon", "activation_function", "scale_attn_weights", "hidden_act"}
BENDING |= {"sliding_window_pattern"}


def bending() -> Iterator[Any]:
    """Of a key that means the same whether it is missing or null, one way is slow: ``test_every_key`` has
    both.
    """
    for param in changes():
        kind, key, way = param.values
        hf = changed(kind, key, way)
        if kind == "whisper" or key not in BENDING or theirs(kind, hf) is None:
            continue
        same = way == "null" and meant(kind, hf) == meant(kind, changed(kind, key, "missing"))
        yield pytest.param(*param.values, id=param.id, marks=pytest.mark.slow if same else ())


def meant(kind: str, hf: Json) -> Json | None:
    found = theirs(kind, hf)
    return None if found is None else meaning(kind, found)


@pytest.mark.parametrize(("kind", "key", "way"), list(bending()))
def test_logits(kind: str, key: str, way: str, tmp_path: Path) -> None:
    """A model of the class's making from the same config.json."""
    hf = changed(kind, key, way)
    config = theirs(kind, hf)
    assert config is not None
    ids = random_ids(30, seed=1)
    try:
        model = make_model(config, seed=2)
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0]
    except (TypeError, ValueError):  # such as a window of null in layers that have one
        refused_or_missing(kind, key)
        return
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(hf))
    torch.testing.assert_close(LLM(tmp_path, "cpu").logits(ids), expected, rtol=2e-4, atol=2e-4)
