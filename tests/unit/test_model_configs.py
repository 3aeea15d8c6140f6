"""Published configs of every supported family are read; what Ingot does not do is refused by name."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from ingot.config.build_config import BuildConfig
from ingot.config.decoder_config import DecoderConfig, RopeConfig
from ingot.engine.assembly import check_max_seq_len
from ingot.errors import CheckpointError, ConfigError
from ingot.models.model_registry import ARCHITECTURES, find_architecture
from tests.unit.real_configs import REAL

NAMES = {
    "llama": (LlamaConfig, "LlamaForCausalLM"),
    "mistral": (MistralConfig, "MistralForCausalLM"),
    "qwen2": (Qwen2Config, "Qwen2ForCausalLM"),
    "qwen3": (Qwen3Config, "Qwen3ForCausalLM"),
    "gpt2": (GPT2Config, "GPT2LMHeadModel"),
    "opt": (OPTConfig, "OPTForCausalLM"),
    "gemma2": (Gemma2Config, "Gemma2ForCausalLM"),
    "gemma3": (Gemma3TextConfig, "Gemma3ForCausalLM"),
}


def read(hf: Mapping[str, Any]) -> DecoderConfig:
    return find_architecture(hf.get("architectures") or ()).read_config(hf)


def refusal(name: str, **changes: Any) -> str:
    """The message for a real config with changes; it says what to do."""
    with pytest.raises(CheckpointError) as error:
        read(REAL[name] | changes)
    assert error.value.fix, str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", REAL)
def test_real_configs_are_read(name: str) -> None:
    hf = json.loads(json.dumps(REAL[name]))
    config = read(hf)
    hf = hf.get("text_config", hf)
    layers, sizes = ("decoder_layers", "num_hidden_layers", "n_layer"), ("d_model", "hidden_size", "n_embd")
    assert config.num_layers == next(hf[key] for key in layers if key in hf)
    assert config.hidden_size == next(hf[key] for key in sizes if key in hf)


def test_what_is_read_of_them() -> None:
    first, mistral, qwen = (read(REAL[n]) for n in ("llama-1 of 2023-03", "mistral-0.1", "qwen v1.0"))
    assert (first.max_positions, first.sliding_window) == (2048, 0)
    assert (mistral.architecture, mistral.sliding_window) == ("mistral", 4096)
    assert (qwen.vocab_size, qwen.intermediate_size, qwen.max_positions) == (151936, 11008, 8192)
    assert read(REAL["qwen written as llama"]).sliding_window == 0
    assert read(REAL["llama-3.1-minitron-width"]).head_dim == 128
    assert read(REAL["qwen2.5-1m"]).max_positions == 262144 - 8192
    original = {"original_max_position_embeddings": 4096}
    for changes in (original, {"rope_scaling": REAL["llama-3.1"]["rope_scaling"] | original}):
        bent = read(REAL["llama-3.1"] | changes).rope
        assert bent is not None
        assert bent.original_max == 4096
    rope = read(REAL["qwen3-2507 with yarn"]).rope
    assert rope is not None
    assert (rope.scaling, rope.factor, rope.attention_factor) == ("yarn", 4.0, 1.0)


@pytest.mark.parametrize(
    ("name", "changes", "length"),
    [
        ("qwen2.5 with yarn", {}, 131072),  # as Qwen says to write it: max_position_embeddings stays 32768
        ("qwen2.5 with yarn", {"max_position_embeddings": 40960}, 131072),
        ("qwen3-2507 with yarn", {}, 131072),
        ("yarn-llama-2", {}, 131072),
        ("yarn-llama-2", {"original_max_position_embeddings": 2048}, 65536),
        ("llama-2", {"rope_scaling": {"type": "yarn", "factor": 2.5}}, 10240),
        ("vicuna-1.5-16k", {}, 16384),
        ("vicuna-1.5-16k", {"max_sequence_length": None}, 4096),
        ("vicuna-1.5-16k", {"original_max_position_embeddings": 2048}, 8192),
        ("deepseek-coder", {"max_position_embeddings": 16384}, 16384),
        ("llama-2", {"max_sequence_length": 8192}, 4096),
        ("llama-3.1", {}, 131072),
    ],
)
def test_lengths_of_scaled_rope(name: str, changes: dict[str, Any], length: int) -> None:
    assert read(REAL[name] | changes).max_positions == length


def test_a_longer_context_is_refused_with_where_the_limit_stands() -> None:
    build = BuildConfig("fp16", 1, 131073)
    with pytest.raises(ConfigError) as caught:
        check_max_seq_len(read(REAL["qwen2.5 with yarn"]), build)
    assert "`max_seq_len=131072` or less" in str(caught.value)
    assert "config.json" in str(caught.value)


def test_windows_of_mistral_are_those_of_its_class() -> None:
    """It reads sliding_window alone, and has one of 4096 without the key."""
    without = {key: value for key, value in REAL["mistral-0.1"].items() if key != "sliding_window"}
    assert read(without).sliding_window == 4096
    for changes in ({"use_sliding_window": False}, {"use_sliding_window": True, "max_window_layers": 16}):
        assert read(REAL["mistral-0.1"] | changes).sliding_window == 4096
        assert read(REAL["mistral-0.3"] | changes).sliding_window == 0
    assert read(REAL["mistral-0.3"] | {"layer_types": ["full_attention"] * 32}).sliding_window == 0
    assert read(REAL["mistral-0.1"] | {"layer_types": ["sliding_attention"] * 32}).sliding_window == 4096
    assert "contradict" in refusal("mistral-0.1", layer_types=["full_attention"] * 32)
    assert "no sliding_window" in refusal("mistral-0.3", layer_types=["sliding_attention"] * 32)


def test_windows_of_qwen_start_at_a_layer() -> None:
    on = {"use_sliding_window": True, "sliding_window": 1024}
    whole = {key: value for key, value in REAL["qwen3"].items() if key != "max_window_layers"}
    layers = whole["num_hidden_layers"]
    assert read(REAL["qwen3"] | on | {"max_window_layers": 0}).sliding_window == 1024
    assert read(REAL["qwen3"] | on | {"max_window_layers": layers}).sliding_window == 0
    assert read(whole | on | {"num_hidden_layers": 28}).sliding_window == 0
    assert "with and without" in refusal("qwen3", **on, max_window_layers=1)


def test_qwen_v1_has_its_rotary_base_twice() -> None:
    found = read(REAL["qwen-72b"])
    assert found.rope is not None
    assert (found.rope.theta, found.rope.scaling, found.max_positions) == (1e6, "none", 32768)
    assert "rotary_emb_base and rope_theta" in refusal("qwen-72b", rope_theta=10000)
    assert "rotary_emb_base and rope_theta" in refusal("qwen v1.1", rope_theta=1000000)


def test_gemma2() -> None:
    small, large, new = (read(hf) for name, hf in REAL.items() if name.startswith("gemma-2"))
    assert [small.window(layer) for layer in range(4)] == [4096, 0, 4096, 0]
    assert small.cut(1, 4).full_layers == (0, 2)
    assert small == new
    assert large.attention_scale == pytest.approx(1 / 12)
    assert large.q_size == 4096
    uncapped = read(REAL["gemma-2-9b"] | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (uncapped.attention_softcap, uncapped.logit_softcap) == (0, 0)
    assert "hidden_activation" in refusal("gemma-2-9b", hidden_activation="gelu")
    assert "layer_types" in refusal("gemma-2-9b", layer_types=["full_attention"])
    assert "layer_types" in refusal("gemma-2-9b", layer_types=["chunked_attention"] * 42)
    assert "use_bidirectional_attention" in refusal("gemma-2-9b", use_bidirectional_attention=True)


def test_gemma3() -> None:
    small, new = read(REAL["gemma-3-1b-it"]), read(REAL["gemma-3 by transformers 5"])
    assert [layer for layer in range(26) if not small.window(layer)] == [5, 11, 17, 23]
    assert small.rope_of(0) == small.local_rope == RopeConfig(256, 1e4)
    assert small.rope_of(5) == small.rope == RopeConfig(256, 1e6)
    assert small == new
    middle, large = read(REAL["gemma-3-4b-it"]), read(REAL["gemma-3-27b-it"])
    assert middle.rope == RopeConfig(256, 1e6, "linear", 8.0)
    assert middle.local_rope == RopeConfig(256, 1e4)
    assert (middle.vocab_size, middle.num_heads, middle.num_kv_heads) == (262208, 8, 4)
    assert (middle.max_positions, middle.sliding_window) == (131072, 1024)
    assert large.attention_scale == pytest.approx(168**-0.5)
    assert large.cut(4, 8).full_layers == (1,)
    assert large.cut(4, 8).local_rope == large.local_rope
    assert read(REAL["gemma-3-1b-it"] | {"final_logit_softcapping": 30.0}).logit_softcap == 30


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", 50.0),  # which the class ignores
        ("use_bidirectional_attention", True),  # EmbeddingGemma
        ("sliding_window_pattern", 0),
        ("sliding_window_pattern", None),
        ("layer_types", ["full_attention"]),
        ("hidden_activation", "gelu"),
        ("rope_local_base_freq", -1),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e6}),
        ("rope_parameters", [1]),
        ("rope_parameters", {"sliding_attention": {"rope_type": "dynamic", "factor": 2.0}}),
        ("rope_parameters", {"full_attention": 5}),
    ],
)
def test_gemma3_refuses_by_name(key: str, value: Any) -> None:
    assert key in refusal("gemma-3-1b-it", **{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [("text_config", None), ("text_config", [1]), ("text_config", "x"), ("audio_config", {"depth": 3})],
)
def test_gemma3_with_pictures_refuses_by_name(key: str, value: Any) -> None:
    assert key in refusal("gemma-3-4b-it", **{key: value})


def test_a_text_half_of_another_model_is_refused() -> None:
    text = REAL["gemma-3-4b-it"]["text_config"]
    other = {"text_config": text | {"model_type": "gemma2"}}
    assert "different models" in refusal("gemma-3-4b-it", **other)
    assert "logit_scale" in refusal("gemma-3-4b-it", text_config=text | {"logit_scale": 2})


@pytest.mark.parametrize("kind", NAMES)
def test_every_default_of_the_classes_is_read(kind: str) -> None:
    """A config that Hugging Face's class writes today, every key of it included."""
    made, name = NAMES[kind]
    eos = {"eos_token_id": None}
    hf = made(architectures=[name], **eos).to_dict()
    assert set(hf) >= set(made().to_dict())
    assert read(hf).architecture == kind


class _Recorder(dict[str, Any]):
    """A config that remembers which of its keys were asked for."""

    def __init__(self, hf: Mapping[str, Any]) -> None:
        super().__init__(hf)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)


_MASKED = ("prob", "length", "min_masks")


def _variants(name: str) -> Iterator[Mapping[str, Any]]:
    """Configs of one architecture: the real ones, those with a window, and all of these less one key."""
    window = {"use_sliding_window": True, "sliding_window": 1 << 40, "max_window_layers": 0}
    for hf in REAL.values():
        architecture = find_architecture(hf["architectures"])
        pictures = name == "minigpt4" and architecture.name == "llama"  # its keys, and a section of its own
        if architecture.name == name or pictures:
            hf = hf | ({"minigpt4": json.loads(PICTURES.read_text())["minigpt4"]} if pictures else {})
            full = hf | window if "sliding_window" in architecture.keys else hf
            yield from (hf, full, *({k: v for k, v in full.items() if k != left} for left in full))


PICTURES = Path(__file__).parents[2] / "benchmarks/shapes/minigpt4-7b.json"


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_the_keys_that_it_lists_are_those_that_it_reads(architecture: Any) -> None:
    """None is read and not listed, and none is listed, and so let pass, that is neither read nor known to do
    nothing.
    """
    asked = set()
    for hf in _variants(architecture.name):
        recorder = _Recorder(hf)
        with contextlib.suppress(
            CheckpointError, ConfigError
        ):  # it lacks what it needs; what it asked for counts
            architecture.config_from_hf(recorder)
        asked |= recorder.asked
    assert asked - architecture.keys == set()
    nothing = {"pretraining_tp", "max_seq_len", "max_seq_length", "model_max_length", "is_llama_config"}
    if architecture.name == "qwen2":
        nothing |= {"rotary_emb_base", "seq_length"}
    if architecture.name == "mistral":
        nothing |= {"use_sliding_window", "max_window_layers"}
    if architecture.name == "gpt2":
        nothing = {"predict_special_tokens"}
    if architecture.name == "opt":
        nothing = {"init_std", "layerdrop"}
    if architecture.name == "gemma2":
        nothing = {"hidden_act", "sliding_window_size", "cache_implementation"}
    if architecture.name == "gemma3":
        nothing = {"_sliding_window_pattern", "cache_implementation"}
    if architecture.name == "whisper":
        nothing = {"is_encoder_decoder", "num_hidden_layers", "init_std", "forced_decoder_ids"}
        nothing |= {"encoder_layerdrop", "decoder_layerdrop", "median_filter_width", "classifier_proj_size"}
        nothing |= {"apply_spec_augment", "use_weighted_layer_sum"}
        nothing |= {f"mask_{axis}_{key}" for axis in ("time", "feature") for key in _MASKED}
    if architecture.name == "qwen":
        nothing = {"bf16", "fp16", "fp32", "params_dtype", "onnx_safe", "softmax_in_fp32"}
    assert architecture.keys - asked == nothing


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama-3", "no_rope_layers", [1, 1, 1, 0]),
        ("llama-3", "no_rope_layer_interval", 4),
        ("llama-3", "partial_rotary_factor", 0.5),
        ("llama-3", "logit_scale", 0.0625),
        ("llama-3", "logits_scaling", 16.0),
        ("llama-3", "embedding_multiplier", 12.0),
        ("llama-3", "residual_multiplier", 0.22),
        ("llama-3", "attention_multiplier", 0.015625),
        ("llama-3", "query_pre_attn_scalar", 256),
        ("llama-3", "final_logit_softcapping", 30.0),
        ("llama-3", "attn_logit_softcapping", 50.0),
        ("llama-3", "rope_interleaved", True),
        ("llama-3", "use_qk_norm", True),
        ("llama-3", "num_local_experts", 8),
        ("llama-3", "is_encoder_decoder", True),
        ("llama-3", "add_cross_attention", True),
        ("llama-3", "vision_config", {"depth": 27}),
        ("llama-3", "quantization", {"bits": 4, "group_size": 64}),
        ("llama-3", "rope_ratio", 8),
        ("llama-3", "output_multiplier", 2),
        ("mistral-0.1", "attention_bias", True),
        ("mistral-0.1", "mlp_bias", True),
        ("qwen2.5", "attention_bias", True),
        ("qwen2.5", "use_mrope", True),
        ("qwen2.5", "is_causal", False),
        ("qwen3", "mlp_bias", True),
        ("qwen3", "scale_emb", 12),
        ("gpt2", "alibi", True),
        ("opt-125m", "add_cross_attention", True),
        ("opt-125m", "num_key_value_heads", 4),
        ("gpt2", "add_cross_attention", True),
        ("gpt2", "rope_theta", 10000.0),
        ("qwen v1.0", "apply_residual_connection_post_layernorm", True),
        ("qwen v1.1", "use_cache_quantization", True),
        ("qwen v1.1", "rope_scaling", {"type": "linear", "factor": 2}),
    ],
)
def test_settings_that_are_not_read_are_refused_by_name(name: str, key: str, value: Any) -> None:
    text = refusal(name, **{key: value, "hidden_dropout": 0.1, "my_note": ""})
    assert f"{key}={value!r}" in text
    assert "hidden_dropout" not in text
    assert "my_note" not in text


def test_all_of_them_at_once_and_long_values_cut() -> None:
    text = refusal("llama-3", no_rope_layers=[1] * 99, logit_scale=2)
    assert re.search(r"logit_scale=2, no_rope_layers=\[1, 1.*…", text)
    assert len(text) < 500


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_scale": 1.0, "partial_rotary_factor": 1.0, "is_causal": True},
        {"logit_scale": None, "layer_types": ["full_attention"] * 32, "num_experts": 0, "use_mrope": False},
        {"model_type": None},
    ],
    ids=str,
)
def test_settings_at_what_a_decoder_does_anyway(changes: dict[str, Any]) -> None:
    assert read(REAL["llama-3"] | changes) == read(REAL["llama-3"])


@pytest.mark.parametrize(
    ("name", "rope", "reported"),
    [
        (
            "qwen3",
            {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.8782},
            "rope_scaling.attn_factor=0.8782",
        ),
        ("qwen3", {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}, "rope_scaling.mscale=0.7"),
        ("qwen3", {"rope_type": "yarn", "factor": 4.0, "truncate": False}, "rope_scaling.truncate=False"),
        ("llama-3", {"rope_type": "default", "factor": 8.0}, "rope_scaling.factor=8.0"),
        (
            "llama-3",
            {"type": "linear", "factor": 2, "partial_rotary_factor": 0.5},
            "partial_rotary_factor=0.5",
        ),
        ("llama-3", {"type": "default", "mrope_section": [16, 24, 24]}, "mrope_section"),
        ("llama-3", {"type": "mrope", "rope_type": "default"}, "'default' and 'mrope'"),
        ("llama-3", {"type": "dynamic", "factor": 2.0}, "dynamic"),
        ("llama-3", {"type": "linear"}, "factor"),
        ("llama-3", {"type": "linear", "factor": 0}, "factor in config.json is not valid"),
        ("llama-3", {"type": "linear", "factor": True}, "factor in config.json is not valid"),
        ("llama-3", {"type": "linear", "factor": float("nan")}, "factor in config.json is not valid"),
        ("llama-3", {"type": "linear", "factor": 10**400}, "factor"),
        (
            "llama-3.1",
            {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
            "high_freq",
        ),
        ("llama-3", "linear", "object"),
    ],
)
def test_rope_settings(name: str, rope: Any, reported: str) -> None:
    assert reported in refusal(name, rope_scaling=rope)


def test_two_rope_settings_that_differ() -> None:
    both = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "rope_scaling": {"rope_type": "yarn"},
    }
    assert "rope_parameters and rope_scaling" in refusal("llama-3", **both)


@pytest.mark.parametrize(
    ("name", "changes", "reported"),
    [
        ("llama-3", {"sliding_window": 1024}, "no sliding window"),
        ("qwen2.5", {"layer_types": ["sliding_attention"] * 28}, "no sliding_window is in use"),
        ("qwen2.5", {"layer_types": ["linear_attention"] * 28}, "linear_attention"),
        ("qwen2.5", {"layer_types": ["full_attention"] * 27}, "27 types"),
        ("mistral-0.1", {"_sliding_window_pattern": 6}, "with and without"),
        ("mistral-0.1", {"sliding_window": -1}, "sliding_window"),
        (
            "mistral-0.1",
            {"layer_types": ["full_attention"] * 16 + ["sliding_attention"] * 16},
            "with and without",
        ),
    ],
)
def test_windows(name: str, changes: dict[str, Any], reported: str) -> None:
    assert reported in refusal(name, **changes)


class TestNames:
    def test_a_model_under_another_name(self) -> None:
        hf = SmolLM3Config(architectures=["LlamaForCausalLM"]).to_dict()
        with pytest.raises(CheckpointError, match=r"LlamaForCausalLM.*'smollm3'.*'llama'") as error:
            read(hf)
        assert "original config.json" in str(error.value.fix)
        with pytest.raises(CheckpointError, match="no_rope_layer_interval=4, no_rope_layers="):
            read({k: v for k, v in hf.items() if k != "model_type"})

    @pytest.mark.parametrize("name", ["llama-3", "mistral-0.1", "qwen2.5", "qwen3", "gpt2", "qwen v1.1"])
    @pytest.mark.parametrize("other", ["llama", "mistral", "qwen2", "gpt2", "phi3", 7, ["llama"]])
    def test_every_pair_but_the_right_one(self, name: str, other: Any) -> None:
        if other != REAL[name]["model_type"]:
            assert "name different models" in refusal(name, model_type=other)

    def test_an_unsupported_architecture_does_not_suggest_a_rename(self) -> None:
        text = refusal("llama-3", architectures=["SmolLM3ForCausalLM"])
        assert "LlamaForCausalLM" in text
        assert "architectures in config.json" not in text
        assert "architectures is missing" in refusal("llama-3", architectures=None)


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
BAD_SIZES = (0, -1, 2.5, 2.0, True, "32", [32], float("inf"), 10**12, 10**400)


@pytest.mark.parametrize("value", BAD_SIZES, ids=lambda v: repr(v)[:12])
@pytest.mark.parametrize("key", [*SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings"])
def test_sizes(key: str, value: Any) -> None:
    names = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
    names |= {"num_key_value_heads": "num_kv_heads", "max_position_embeddings": "max_positions"}
    text = refusal("llama-3", **{key: value})
    assert key in text or f"{names.get(key, key)} is out of range" in text or "a multiple of" in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("n_embd", v) for v in BAD_SIZES),
        *(("n_inner", v) for v in BAD_SIZES),
        *(("n_positions", v) for v in (0, True, 10**12)),
        *(("n_layer", v) for v in (0, 2.5, 10**9)),
    ],
    ids=lambda v: repr(v)[:12],
)
def test_sizes_of_gpt2(key: str, value: Any) -> None:
    assert re.search(
        f"{key} in config.json is not valid|out of range|a multiple of", refusal("gpt2", **{key: value})
    )


@pytest.mark.parametrize(
    ("name", "changes", "reported"),
    [
        *(
            ("llama-3", {"rms_norm_eps": v}, "rms_norm_eps")
            for v in (-1, 0, float("nan"), float("inf"), "1e-6", True)
        ),
        *(
            ("llama-3", {"rope_theta": v}, "rope_theta")
            for v in (0, -1, float("nan"), float("inf"), "x", True)
        ),
        ("llama-3", {"rope_theta": 1}, "rotary base"),
        ("llama-3", {"rope_parameters": {"rope_theta": 0}}, "rope_theta"),
        ("gpt2", {"layer_norm_epsilon": -1e-5}, "layer_norm_epsilon"),
        ("opt-125m", {"do_layer_norm_before": "no"}, "do_layer_norm_before"),
        ("opt-125m", {"word_embed_proj_dim": 768.0}, "word_embed_proj_dim"),
        ("opt-125m", {"word_embed_proj_dim": 512}, r"proj_dim 512.*hidden size \(768\).*except opt-350m"),
        ("opt-125m", {"num_attention_heads": 7}, "768 and 7"),
        ("opt-125m", {"activation_function": "mish"}, "mish"),
        ("qwen v1.1", {"rotary_emb_base": 0}, "rotary_emb_base"),
        ("qwen v1.1", {"layer_norm_epsilon": -1}, "layer_norm_epsilon"),
        ("qwen v1.1", {"seq_length": 0}, "seq_length"),
        ("qwen v1.1", {"no_bias": False}, "no_bias"),
        ("qwen v1.1", {"scale_attn_weights": False}, "scale_attn_weights"),
        ("qwen v1.1", {"rotary_pct": 0.5}, "rotary_pct"),
        ("qwen v1.0", {"pos_emb": "alibi"}, "alibi"),
        ("llama-3", {"hidden_size": 4097}, "4097 and 32"),
        ("gpt2", {"n_head": 7}, "768 and 7"),
        ("llama-3", {"num_key_value_heads": 5}, "multiple of num_kv_heads"),
        ("llama-3", {"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ("llama-3", {"attention_bias": 1}, "attention_bias"),
        ("llama-3", {"torch_dtype": "banana"}, "torch_dtype in config.json is not valid; seen: 'banana'"),
        ("llama-3", {"dtype": 16}, "dtype in config.json is not valid"),
        ("llama-3", {"dtype": ["float16"]}, "dtype in config.json is not valid"),
        ("llama-3", {"eos_token_id": 128256}, "eos_token_id.*0 to 128255"),
        ("llama-3", {"eos_token_id": [128001, 128256]}, "eos_token_id"),
        ("llama-3", {"eos_token_id": -1}, "eos_token_id"),
        ("llama-3", {"eos_token_id": True}, "eos_token_id"),
        ("qwen2.5-1m", {"dual_chunk_attention_config": {"chunk_size": 8, "local_size": 8}}, "max_positions"),
    ],
    ids=lambda v: repr(v)[:40],
)
def test_values_out_of_range(name: str, changes: dict[str, Any], reported: str) -> None:
    assert re.search(reported, refusal(name, **changes))


def test_shapes_that_ship_are_read() -> None:
    folder = Path(__file__).parents[2] / "benchmarks" / "shapes"
    found = {path.stem: read(json.loads(path.read_text())) for path in folder.glob("*.json")}
    sizes = {name: (config.num_layers, config.hidden_size) for name, config in found.items()}
    assert sizes == {
        "gemma3-4b": (34, 2560),
        "gpt2-medium": (24, 1024),
        "llama-7b": (32, 4096),
        "llama31-8b": (32, 4096),
        "minigpt4-7b": (32, 4096),
        "opt-6.7b": (32, 4096),
        "qwen3-8b": (36, 4096),
        "qwen2.5-14b-like": (48, 5120),
        "whisper-tiny": (4, 384),
        "whisper-base": (6, 512),
        "whisper-small": (12, 768),
        "whisper-medium": (24, 1024),
        "whisper-large-v3": (32, 1280),
        "whisper-large-v3-turbo": (4, 1280),
    }
