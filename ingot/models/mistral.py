"""Mistral: LLaMA's shape, with a sliding window in every layer or in none.

Owns what its config says beyond the shared keys. Knows no other architecture.
Source: the Hugging Face class ``MistralForCausalLM``.
"""

from __future__ import annotations

from ingot.config.model import DecoderConfig
from ingot.models.base import Architecture
from ingot.models.hf_values import HfConfig
from ingot.models.llama_layout import (
    LLAMA_KEYS,
    WINDOW_KEYS,
    llama_config,
    llama_weight_map,
    sliding_window,
)


def config_from_hf(hf: HfConfig) -> DecoderConfig:
    """config.json of a Mistral model → DecoderConfig."""
    return llama_config(hf, "mistral", sliding_window=sliding_window(hf, default_on=True))


MISTRAL = Architecture(
    "mistral",
    ("MistralForCausalLM",),
    "mistral",
    LLAMA_KEYS | WINDOW_KEYS,
    config_from_hf,
    llama_weight_map,
)
