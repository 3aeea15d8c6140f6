"""config.json of Gemma-2 as published, of both eras; ``real_configs.py`` has the other families."""

from __future__ import annotations

from typing import Any

_GEMMA2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
    "torch_dtype": "float32",
    "transformers_version": "4.42.0.dev0",
    "use_cache": True,
    "vocab_size": 256000,
}
GEMMA2: dict[str, dict[str, Any]] = {
    "gemma-2-9b": _GEMMA2,
    "gemma-2-27b-it": _GEMMA2
    | {
        "head_dim": 128,
        "hidden_size": 4608,
        "intermediate_size": 36864,
        "num_attention_heads": 32,
        "num_hidden_layers": 46,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 144,
        "torch_dtype": "bfloat16",
        "_attn_implementation": "eager",
    },
    "gemma-2 by transformers 5": {
        key: value for key, value in _GEMMA2.items() if key not in ("rope_theta", "sliding_window_size")
    }
    | {
        "dtype": "bfloat16",
        "layer_types": ["sliding_attention", "full_attention"] * 21,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None,
    },
}
