"""LLaMA 1, 2, 3, Vicuna, and Mistral-shaped models.

Owns what their config says beyond the shared keys. Knows no other architecture.
Source: the Hugging Face classes ``LlamaForCausalLM`` and ``MistralForCausalLM``.
"""

from __future__ import annotations

from ingot.config.model import DecoderConfig
from ingot.models.base import Architecture, HfConfig
from ingot.models.llama_layout import llama_config, llama_weight_map, sliding_window


def config_from_hf(hf: HfConfig) -> DecoderConfig:
    """config.json of a LLaMA or Mistral model → DecoderConfig."""
    bias = bool(hf.get("attention_bias", False))
    return llama_config(
        hf,
        "llama",
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias", False)),
        sliding_window=sliding_window(hf, default_on=True),
    )


LLAMA = Architecture("llama", ("LlamaForCausalLM", "MistralForCausalLM"), config_from_hf, llama_weight_map)
