"""Qwen3: LLaMA's shape with an RMSNorm on each query and key head. Source: ``Qwen3ForCausalLM``."""

from __future__ import annotations

from ingot.config.decoder_config import DecoderConfig
from ingot.models.architecture import Architecture
from ingot.models.hf_values import HfConfig, flag
from ingot.models.llama import LLAMA_KEYS, WINDOW_KEYS, llama_config, llama_weight_map, qwen_window

_KEYS = LLAMA_KEYS | WINDOW_KEYS | {"attention_bias"}


def config_from_hf(hf: HfConfig) -> DecoderConfig:
    """config.json of a Qwen3-shaped model → DecoderConfig; heads have 128 channels by default."""
    bias = flag(hf, "attention_bias", False)
    return llama_config(
        hf,
        "qwen3",
        head_dim=128,
        kv_heads=32,
        positions=32768,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        sliding_window=qwen_window(hf),
    )


QWEN3 = Architecture("qwen3", ("Qwen3ForCausalLM",), "qwen3", _KEYS, config_from_hf, llama_weight_map)
