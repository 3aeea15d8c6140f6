"""Bugs planted into a Hugging Face checkpoint on disk, before an engine is built from it.

Owns changes of tensors and of config.json, and the culprit that ``align`` has to name for each. Knows nothing
of how it is found.

    plant_on_disk(checkpoint_folder, "rope_base")
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0, "layer_types": None}
LLAMA_LIKE = ("llama", "qwen2")


def plant_on_disk(folder: Path, name: str) -> None:
    """Put a bug into a LLaMA-, Qwen2- or GPT-2-shaped checkpoint with one safetensors file."""
    path = folder / "model.safetensors"
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(path)
    changed = ON_DISK[name][1]
    changed(tensors, config)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


Tensors = dict[str, torch.Tensor]


def _set(**values: Any) -> Callable[[Tensors, dict[str, Any]], None]:
    return lambda tensors, config: config.update(values)


def _theta(tensors: Tensors, config: dict[str, Any]) -> None:
    """Either form of the config, old and new."""
    config["rope_theta"] = 5e5
    if config.get("rope_parameters"):
        config["rope_parameters"]["rope_theta"] = 5e5


def _linear_rope(tensors: Tensors, config: dict[str, Any]) -> None:
    config["rope_parameters"] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}


def _each(ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    """Every tensor whose name ends so."""

    def put(tensors: Tensors, config: dict[str, Any]) -> None:
        found = [key for key in tensors if key.endswith(ending)]
        assert found, f"no tensor ends with {ending}"
        for key in found:
            tensors[key] = change(tensors[key])

    return put


def _swap_gates(tensors: Tensors, config: dict[str, Any]) -> None:
    for key in [k for k in tensors if k.endswith("gate_proj.weight")]:
        other = key.replace("gate_proj", "up_proj")
        tensors[key], tensors[other] = tensors[other], tensors[key]


def _unpermuted(tensors: Tensors, config: dict[str, Any]) -> None:
    for key in [k for k in tensors if "q_proj." in k or "k_proj." in k]:
        half = config["head_dim"] // 2
        tensors[key] = tensors[key].unflatten(0, (-1, 2, half)).transpose(1, 2).flatten(0, 2)


def _own_head(tensors: Tensors, config: dict[str, Any]) -> None:
    """Of a tied checkpoint: a head that is not the embedding."""
    config["tie_word_embeddings"] = False
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(1)


# name: (culprit, change, kinds)
ON_DISK: dict[str, tuple[str, Callable[..., None], tuple[str, ...]]] = {
    "rope_base": ("rope_base", _theta, LLAMA_LIKE),
    "rope_scaling": ("rope_scaling", _linear_rope, LLAMA_LIKE),
    "rope_style": ("rope_style", _unpermuted, LLAMA_LIKE),
    "gate_up_swapped": ("gate_up_swapped", _swap_gates, LLAMA_LIKE),
    "activation": ("activation", _set(activation_function="relu"), ("gpt2",)),
    "norm_eps": ("norm_eps", _set(rms_norm_eps=1e-4), LLAMA_LIKE),
    "norm_eps_layer": ("norm_eps", _set(layer_norm_epsilon=1e-3), ("gpt2",)),
    "norm_offset": ("norm_offset", _each("input_layernorm.weight", lambda w: w + 1), LLAMA_LIKE),
    "window": ("window", _set(**WINDOW), ("qwen2",)),
    "qkv_bias_missing": ("qkv_bias_missing", _each("_proj.bias", torch.zeros_like), ("qwen2",)),
    "o_bias_missing": ("o_bias_missing", _each("attn.c_proj.bias", torch.zeros_like), ("gpt2",)),
    "mlp_bias_doubled": ("mlp_bias_doubled", _each("mlp.c_fc.bias", lambda bias: 2 * bias), ("gpt2",)),
    "o_transposed": ("weight_transposed", _each("self_attn.o_proj.weight", torch.t), LLAMA_LIKE),
    "head_untied": ("head_untied", _own_head, LLAMA_LIKE),
}
