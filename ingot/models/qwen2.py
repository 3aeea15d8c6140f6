"""Qwen1.5, Qwen2, Qwen2.5: LLaMA's shape with a bias on q, k and v. Source: ``Qwen2ForCausalLM``."""

from __future__ import annotations

from ingot.config.decoder_config import DecoderConfig
from ingot.models.architecture import Architecture
from ingot.models.hf_values import HfConfig, integer
from ingot.models.llama import LLAMA_KEYS, WINDOW_KEYS, llama_config, llama_weight_map, qwen_window

_CHUNKS = "dual_chunk_attention_config"
# CodeQwen1.5 says twice, in the words of Qwen v1, what rope_theta and max_position_embeddings say.
_KEYS = LLAMA_KEYS | WINDOW_KEYS | {_CHUNKS, "rotary_emb_base", "seq_length"}


def config_from_hf(hf: HfConfig) -> DecoderConfig:
    """config.json of a Qwen2-shaped model → DecoderConfig.

    Qwen2.5-1M attends in chunks beyond the first one; that is not supported, so the first is the longest
    request.
    """
    config = llama_config(
        hf, "qwen2", kv_heads=32, positions=32768, qkv_bias=True, sliding_window=qwen_window(hf)
    )
    chunks = hf.get(_CHUNKS)
    if not chunks:
        return config
    first = integer(chunks, "chunk_size") - integer(chunks, "local_size")
    return config.replace(max_positions=min(config.max_positions, first))


QWEN2 = Architecture("qwen2", ("Qwen2ForCausalLM",), "qwen2", _KEYS, config_from_hf, llama_weight_map)
