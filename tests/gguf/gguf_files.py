"""GGUF files of tiny models, written by the ``gguf`` package as llama.cpp's converter does.

Names are the package's own map, rows of LLaMA's queries and keys those of ``LlamaModel.permute`` in
convert_hf_to_gguf.py. The package has no quantizers of the K types: their blocks are random.

    model = write_gguf(tmp_path / "model.gguf", make_model(tiny_config("llama")), "Q8_0")
    # model now has the file's values
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from tests.tiny_models import make_model, tiny_config

Kind = gguf.GGMLQuantizationType
# Multiples of 256, as the K types need.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def tiny(kind: str, wide: bool = False, **changes: Any) -> PreTrainedModel:
    """A model whose columns fill whole blocks."""
    return make_model(tiny_config(kind, **((WIDE if wide else SIZES) | changes)), seed=5)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: str,
    others: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    vectors: Mapping[str, np.ndarray] | None = None,
    most: int = 0,
) -> PreTrainedModel:
    """Write a file with matrices of the type ``kind``, and give the model the values that it holds.

    ``others``: parts of tensors' names in the file → their type. ``metadata``: added, or in place of what the
    config says; ``vectors``: tensors beside the model's. ``most``: tensors of a part, 0: there are no parts.
    """
    config, types = model.config, others or {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, config.model_type, split_max_tensors=most)
    add_metadata(writer, settings(config) | dict(metadata or {}))
    generator, meant = np.random.default_rng(7), {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        order = np.arange(len(tensor))
        if config.model_type == "llama" and (part := name.split(".")[-2]) in heads:
            order = permute(order, heads[part])
        stored = next((types[part] for part in types if own.startswith(part) or f".{part}" in own), kind)
        stored = Kind[stored if tensor.dim() == 2 else "F32"]
        blocks = quantized(tensor.numpy()[order], stored, generator)
        writer.add_tensor(own, blocks, raw_dtype=stored)
        values = np.empty(tensor.shape, np.float32)
        values[order] = gguf.dequantize(blocks, stored)
        meant[name] = torch.from_numpy(values)
    for name, values in (vectors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict(meant, strict=False)
    model.tie_weights()
    return model


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    return rows.reshape(heads, 2, len(rows) // heads // 2).swapaxes(1, 2).reshape(rows.shape)


def quantized(values: np.ndarray, kind: Kind, generator: np.random.Generator) -> np.ndarray:
    """The blocks of a matrix; of the K types random ones, of values about as large."""
    if not kind.name.endswith("_K"):
        return gguf.quantize(values.astype(np.float32), kind)
    size, count = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (values.size // size, count), dtype=np.uint8)
    steps = generator.uniform(0.5, 1.5, (len(blocks), 1)) * 5e-5
    if kind == Kind.Q6_K:
        blocks[:, 208:] = steps.astype(np.float16).view(np.uint8)
        return blocks.reshape(len(values), -1)
    # The minimum of each 32 values is the middle of their range, so that the matrix is around 0.
    blocks[:, 8:12] = blocks[:, 4:8]
    blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17
    middle = 7.5 if kind == Kind.Q4_K else 15.5
    blocks[:, :4] = np.hstack((4 * steps, 4 * middle * steps)).astype(np.float16).view(np.uint8)
    return blocks.reshape(len(values), -1)


def settings(config: PretrainedConfig) -> dict[str, Any]:
    """What the converter writes of a config."""
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    if config.model_type != "qwen2":
        found |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    return {f"{config.model_type}.{key}": value for key, value in found.items()}


def add_metadata(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    """Fields by key; None leaves one out."""
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_array(key, value)


BYTES = [chr(c) for c in range(33, 127)] + [chr(256 + n) for n in range(33)]  # letters, and Ġ among others
VOCABULARY = ["Ġhi", *BYTES[:89], "hi", "he", "<think>", "<|end|>", "<|im_start|>", "<|im_end|>", "<s>"]
BPE = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": VOCABULARY,
    "tokenizer.ggml.token_type": [1] * 92 + [4] + [3] * 4,
    "tokenizer.ggml.merges": ["h i", "h e"],
    "tokenizer.ggml.eos_token_id": 95,
    "tokenizer.ggml.bos_token_id": 96,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
}
