"""What a config means that lacks a key: the value that its own class in transformers has."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from ingot.models.registry import find_architecture

KINDS: dict[str, type[PretrainedConfig]] = {
    "LlamaForCausalLM": LlamaConfig,
    "MistralForCausalLM": MistralConfig,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
    "GPT2LMHeadModel": GPT2Config,
}
KEYS = (
    *("rms_norm_eps", "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act"),
    *("layer_norm_epsilon", "activation_function", "n_inner"),
)


@pytest.mark.parametrize("name", KINDS)
def test_a_key_that_is_not_there(name: str) -> None:
    written: dict[str, Any] = KINDS[name](num_hidden_layers=2).to_dict() | {"architectures": [name]}
    if name == "MistralForCausalLM":
        written["sliding_window"] = None
    architecture = find_architecture([name])
    whole = architecture.read_config(written)
    known = [key for key in KEYS if key in written]
    assert len(known) >= 3
    for key in known:
        assert architecture.read_config({k: v for k, v in written.items() if k != key}) == whole, key
