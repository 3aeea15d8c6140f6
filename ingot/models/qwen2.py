"""Qwen1.5, Qwen2 and Qwen2.5: LLaMA's shape with a bias on queries, keys and values.

Owns what their config says beyond the shared keys. Knows no other architecture.
Source: the Hugging Face class ``Qwen2ForCausalLM``.
"""

from __future__ import annotations

from ingot.config.model import DecoderConfig
from ingot.models.base import Architecture, HfConfig
from ingot.models.llama_layout import llama_config, llama_weight_map, sliding_window


def config_from_hf(hf: HfConfig) -> DecoderConfig:
    """config.json of a Qwen2-shaped model → DecoderConfig."""
    return llama_config(hf, "qwen2", qkv_bias=True, sliding_window=sliding_window(hf))


QWEN2 = Architecture("qwen2", ("Qwen2ForCausalLM",), config_from_hf, llama_weight_map)
