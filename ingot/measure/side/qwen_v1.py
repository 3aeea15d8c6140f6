"""Qwen v1's config and tensors as those of Qwen2, whose class Hugging Face has.

Up to ``seq_length`` both compute the same. Beyond it Qwen v1 changes its rotary base and scales queries;
callers refuse such lengths.
"""

from __future__ import annotations

from typing import Any

import torch

from ingot.checkpoint.checkpoint_reader import Checkpoint
from ingot.config.decoder_config import DecoderConfig

QWEN_V1 = "QWenLMHeadModel"

_OUTSIDE = {
    "transformer.wte.weight": "model.embed_tokens.weight",
    "transformer.ln_f.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_OF_LAYER = {
    "ln_1.weight": "input_layernorm.weight",
    "ln_2.weight": "post_attention_layernorm.weight",
    "attn.c_proj.weight": "self_attn.o_proj.weight",
    "mlp.w1.weight": "mlp.up_proj.weight",
    "mlp.w2.weight": "mlp.gate_proj.weight",
    "mlp.c_proj.weight": "mlp.down_proj.weight",
}


def qwen2_config(config: DecoderConfig) -> dict[str, Any]:
    """Values of a Qwen2 config of the same computation."""
    assert config.rope is not None, "Qwen v1 has rotary positions"
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.rope.original_max or config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_sliding_window": False,
    }


def qwen2_weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The tensors under Qwen2's names, q, k and v apart; computed tables are left out."""
    found: dict[str, torch.Tensor] = {}
    for name in checkpoint.tensors:
        if name in _OUTSIDE:
            found[_OUTSIDE[name]] = checkpoint.read(name)
            continue
        _, _, layer, rest = name.split(".", 3)
        prefix = f"model.layers.{layer}."
        if rest in _OF_LAYER:
            found[prefix + _OF_LAYER[rest]] = checkpoint.read(name)
        elif rest.startswith("attn.c_attn."):
            kind = rest.rpartition(".")[2]
            for one, part in zip("qkv", checkpoint.read(name).chunk(3), strict=True):
                found[f"{prefix}self_attn.{one}_proj.{kind}"] = part
    return found
