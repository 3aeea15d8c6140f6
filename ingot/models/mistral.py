"""Mistral: LLaMA's shape, with a sliding window in every layer or in none. Source: ``MistralForCausalLM``."""

from __future__ import annotations

from ingot.config.decoder_config import DecoderConfig
from ingot.errors import CheckpointError
from ingot.models.architecture import Architecture
from ingot.models.hf_values import HfConfig
from ingot.models.llama import (
    LLAMA_KEYS,
    WINDOW_KEYS,
    llama_config,
    llama_weight_map,
    sliding_window,
    stated_window,
)


def config_from_hf(hf: HfConfig) -> DecoderConfig:
    """config.json of a Mistral model → DecoderConfig.

    The class reads ``sliding_window`` alone; null is none. ``use_sliding_window`` and ``max_window_layers``
    are ignored, and types of single layers must agree.
    """
    window = sliding_window(hf, on=True, default=4096)
    if not window and stated_window(hf, 4096):
        raise CheckpointError(
            "layer_types of config.json contradict its sliding_window, which is that of every layer",
            seen=f"full_attention, window {stated_window(hf, 4096)}",
            allowed="sliding_attention with the window, or sliding_window null",
            fix="a model with one kind of attention, or correct config.json",
        )
    return llama_config(hf, "mistral", kv_heads=8, positions=131072, sliding_window=window)


MISTRAL = Architecture(
    "mistral",
    ("MistralForCausalLM",),
    "mistral",
    LLAMA_KEYS | WINDOW_KEYS,
    config_from_hf,
    llama_weight_map,
)
