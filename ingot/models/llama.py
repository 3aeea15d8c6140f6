"""LLaMA 1, 2, 3 and Vicuna.

Owns what their config says beyond the shared keys. Knows no other architecture.
Source: the Hugging Face class ``LlamaForCausalLM``, ``LLaMAForCausalLM`` in the first conversions.
"""

from __future__ import annotations

from ingot.config.model import DecoderConfig
from ingot.models.base import Architecture
from ingot.models.hf_values import HfConfig, flag
from ingot.models.llama_layout import LLAMA_KEYS, WINDOW_KEYS, llama_config, llama_weight_map, no_window

_KEYS = LLAMA_KEYS | WINDOW_KEYS | {"attention_bias", "mlp_bias"}


def config_from_hf(hf: HfConfig) -> DecoderConfig:
    """config.json of a LLaMA model → DecoderConfig."""
    bias, mlp_bias = flag(hf, "attention_bias", False), flag(hf, "mlp_bias", False)
    config = llama_config(hf, "llama", qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
    no_window(hf, "LlamaForCausalLM", config.max_positions)
    return config


LLAMA = Architecture(
    "llama", ("LlamaForCausalLM", "LLaMAForCausalLM"), "llama", _KEYS, config_from_hf, llama_weight_map
)
