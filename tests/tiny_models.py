"""Tiny random checkpoints of Hugging Face's own classes.

Owns their sizes and their weights, large enough that greedy decoding has clear winners. Knows no Ingot.

    model = save_model(tiny_config("llama"), tmp_path, seed=1)
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.initialization import no_init_weights

Model = TypeVar("Model", bound=PreTrainedModel)
_CLASSES = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
}
# Caps and a window that bend what so small a model computes.
_GEMMA2 = {
    "num_hidden_layers": 4,
    "sliding_window": 7,
    "query_pre_attn_scalar": 12,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 4.0,
}
# Layers of both kinds twice, the last with a window; bases and a factor that part the two within 40 tokens.
_GEMMA3 = {
    "num_hidden_layers": 5,
    "sliding_window_pattern": 2,
    "sliding_window": 7,
    "query_pre_attn_scalar": 12,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}
_GEMMA = ("gemma2", "gemma3_text", "gemma3")  # their norms store the weight less one
_NO_SPECIALS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def tiny_config(kind: str, **changes: Any) -> PretrainedConfig:
    """Two layers (gemma2: four, gemma3: five), 32 channels, a vocabulary of 97, 128 positions; ``changes`` on
    top.
    """
    if kind == "gpt2":
        sizes = {"vocab_size": 97, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4}
        return GPT2Config(**(sizes | _NO_SPECIALS | changes))
    if kind == "opt":
        sizes = {"vocab_size": 97, "max_position_embeddings": 128, "hidden_size": 32, "ffn_dim": 48}
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
        return OPTConfig(**(sizes | _NO_SPECIALS | changes))
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
    }
    if kind == "mistral":
        sizes["sliding_window"] = None
    sizes |= {"gemma2": _GEMMA2, "gemma3": copy.deepcopy(_GEMMA3)}.get(kind, {})
    return _CLASSES[kind](**(sizes | _NO_SPECIALS | changes))


def make_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """The model of ``config`` with random weights."""
    attention = "eager" if config.model_type == "gemma2" else "sdpa"  # which has no softcap
    with no_init_weights():  # which are replaced
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    return randomize(model, seed)


@torch.no_grad()
def randomize(model: Model, seed: int = 0) -> Model:
    """Give a model weights of unit gain, and norms and biases away from 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() == 1:
            centred = name.endswith("bias") or model.config.model_type in _GEMMA
            weight.copy_(0.3 * noise + (0.0 if centred else 1.0))
        else:
            weight.copy_(1.3 * noise / min(weight.shape) ** 0.5)
    model.tie_weights()
    return model


def save_model(config: PretrainedConfig, folder: Path, seed: int = 0, **options: Any) -> PreTrainedModel:
    """Make a model and write it as a checkpoint; ``options`` go to ``save_pretrained``."""
    model = make_model(config, seed)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder, **options)
    return model


def edit_config(folder: Path, *drop: str, **changes: Any) -> None:
    """Change keys of a checkpoint's config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key in drop:
        config.pop(key, None)
    path.write_text(json.dumps(config | changes))


def random_ids(count: int, seed: int = 0, vocab_size: int = 97) -> list[int]:
    """Token ids that are the same on every run."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()
