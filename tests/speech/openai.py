"""Hugging Face's model of Whisper as OpenAI would have saved it.

state, dims = openai_state(model), openai_dims(model)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_NAMES = (  # Hugging Face's, OpenAI's; in this order
    ("decoder.embed_tokens", "decoder.token_embedding"),
    ("embed_positions.weight", "positional_embedding"),
    ("encoder.layer_norm", "encoder.ln_post"),
    ("decoder.layer_norm", "decoder.ln"),
    (".layers.", ".blocks."),
    ("encoder_attn_layer_norm", "cross_attn_ln"),
    ("self_attn_layer_norm", "attn_ln"),
    ("encoder_attn", "cross_attn"),
    ("self_attn", "attn"),
    ("final_layer_norm", "mlp_ln"),
    ("fc1", "mlp.0"),
    ("fc2", "mlp.2"),
    ("q_proj", "query"),
    ("k_proj", "key"),
    ("v_proj", "value"),
    ("out_proj", "out"),
)


def openai_state(model: Any) -> dict[str, torch.Tensor]:
    """The tensors under OpenAI's names, none for the tied head."""
    found = {}
    for name, tensor in model.model.state_dict().items():
        for theirs, other in _NAMES:
            name = name.replace(theirs, other)
        found[name] = tensor.detach().clone()
    return found


def openai_dims(model: Any) -> dict[str, int]:
    """The sizes under OpenAI's names."""
    config = model.config
    return {
        "n_mels": config.num_mel_bins,
        "n_vocab": config.vocab_size,
        "n_audio_ctx": config.max_source_positions,
        "n_audio_state": config.d_model,
        "n_audio_head": config.encoder_attention_heads,
        "n_audio_layer": config.encoder_layers,
        "n_text_ctx": config.max_target_positions,
        "n_text_state": config.d_model,
        "n_text_head": config.decoder_attention_heads,
        "n_text_layer": config.decoder_layers,
    }


def save_openai(model: Any, file: Path, **changes: Any) -> Path:
    """Write a file, with ``changes`` to what it holds at its top level."""
    held = {"dims": openai_dims(model), "model_state_dict": openai_state(model)} | changes
    torch.save({name: value for name, value in held.items() if value is not None}, file)
    return file
