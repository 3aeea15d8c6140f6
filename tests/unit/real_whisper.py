"""config.json of Whisper as published, of several eras; ``real_configs.py`` has the other families."""

from __future__ import annotations

from typing import Any

_SMALL: dict[str, Any] = {
    "activation_dropout": 0.0,
    "activation_function": "gelu",
    "architectures": ["WhisperForConditionalGeneration"],
    "attention_dropout": 0.0,
    "begin_suppress_tokens": [220, 50257],
    "bos_token_id": 50257,
    "d_model": 768,
    "decoder_attention_heads": 12,
    "decoder_ffn_dim": 3072,
    "decoder_layerdrop": 0.0,
    "decoder_layers": 12,
    "decoder_start_token_id": 50258,
    "dropout": 0.0,
    "encoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 12,
    "eos_token_id": 50257,
    "forced_decoder_ids": [[1, 50259], [2, 50359], [3, 50363]],
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "max_length": 448,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "model_type": "whisper",
    "num_hidden_layers": 12,
    "num_mel_bins": 80,
    "pad_token_id": 50257,
    "scale_embedding": False,
    "suppress_tokens": [1, 2, 7, 8, 9, 10, 14, 25],
    "torch_dtype": "float32",
    "transformers_version": "4.27.0.dev0",
    "use_cache": True,
    "vocab_size": 51865,
}
_LATER: dict[str, Any] = {
    "apply_spec_augment": False,
    "classifier_proj_size": 256,
    "mask_feature_length": 10,
    "mask_feature_min_masks": 0,
    "mask_feature_prob": 0,
    "mask_time_length": 10,
    "mask_time_min_masks": 2,
    "mask_time_prob": 0.05,
    "median_filter_width": 7,
    "use_weighted_layer_sum": False,
}
_LARGE = _SMALL | _LATER | {
    "d_model": 1280,
    "decoder_attention_heads": 20,
    "decoder_ffn_dim": 5120,
    "decoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "encoder_layers": 32,
    "num_hidden_layers": 32,
    "num_mel_bins": 128,
    "torch_dtype": "float16",
    "transformers_version": "4.36.0.dev0",
    "vocab_size": 51866,
}  # fmt: skip
WHISPER: dict[str, dict[str, Any]] = {
    "whisper-small": _SMALL,
    "whisper-tiny.en": _SMALL
    | _LATER
    | {
        "d_model": 384,
        "decoder_attention_heads": 6,
        "decoder_ffn_dim": 1536,
        "decoder_layers": 4,
        "encoder_attention_heads": 6,
        "encoder_ffn_dim": 1536,
        "encoder_layers": 4,
        "eos_token_id": 50256,
        "vocab_size": 51864,
    },
    "whisper-large-v3": _LARGE,
    "whisper-large-v3-turbo": _LARGE | {"decoder_layers": 4, "torch_dtype": "float16"},
}
