"""LLaMA 1, 2, 3 and Vicuna.

Covers what their config says beyond the shared keys. Source: the Hugging Face class ``LlamaForCausalLM``,
``LLaMAForCausalLM`` in the first conversions.
"""

from __future__ import annotations

from functools import partial

from ingot.models.architecture import Architecture
from ingot.models.llama_layout import OWN_LLAMA_KEYS, llama_weight_map, own_llama_config

LLAMA = Architecture(
    "llama",
    ("LlamaForCausalLM", "LLaMAForCausalLM"),
    "llama",
    OWN_LLAMA_KEYS,
    partial(own_llama_config, architecture="llama"),
    llama_weight_map,
)
