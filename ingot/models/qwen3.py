"""Qwen3: LLaMA's shape with an RMSNorm on each query and key head.

Owns what its config says beyond the shared keys. Knows no other architecture.
Source: the Hugging Face class ``Qwen3ForCausalLM``.
"""

from __future__ import annotations

from ingot.config.model import DecoderConfig
from ingot.models.base import Architecture, HfConfig
from ingot.models.llama_layout import llama_config, llama_weight_map, sliding_window


def config_from_hf(hf: HfConfig) -> DecoderConfig:
    """config.json of a Qwen3-shaped model → DecoderConfig; heads have 128 channels unless it says
    otherwise.
    """
    bias = bool(hf.get("attention_bias", False))
    return llama_config(
        hf,
        "qwen3",
        head_dim=128,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        sliding_window=sliding_window(hf),
    )


QWEN3 = Architecture("qwen3", ("Qwen3ForCausalLM",), config_from_hf, llama_weight_map)
